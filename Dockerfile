# Two stages: the first one builds an environment, the second one carries it and nothing that built it.
#   docker build -t loader-service .
#   docker run --rm -v /models:/models:ro -v ./my.yaml:/etc/loader.yaml:ro loader-service \
#     torchrun --nproc-per-node 4 -m loader_service load /etc/loader.yaml --load target
# Pinned memory in the container needs --ulimit memlock=-1, ranks in one container --shm-size or --ipc=host.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
# For a torch build of another kind: --build-arg PIP_EXTRA_INDEX_URL=... Not set, pip's own default applies.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/build/constraints.txt \
    PIP_BUILD_CONSTRAINT=/build/constraints.txt
WORKDIR /build
RUN python -m venv /opt/loader-service
# The dependencies first, in a layer that a change of the code leaves as it is.
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
 && /opt/loader-service/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY loader_service/ loader_service/
RUN /opt/loader-service/bin/pip install --no-deps .

FROM python:${PYTHON_VERSION}-slim AS runtime
# tini passes signals on and collects the ranks that torchrun leaves behind: PID 1 must do both.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --shell /usr/sbin/nologin loader
COPY --from=build /opt/loader-service /opt/loader-service
COPY configs/ /opt/loader-service/configs/
ENV PATH=/opt/loader-service/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONFAULTHANDLER=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/loader
# With LOADER_CONFIG set: can that load be planned, that is, are the checkpoint's mount and its headers in order? It reads
# no payload. Without: does the program start? LOADER_LOAD names the load, `target` unless set.
HEALTHCHECK --interval=2m --timeout=60s --start-period=60s --retries=3 \
  CMD ["sh", "-c", "if [ -n \"$LOADER_CONFIG\" ]; then exec loader-service plan \"$LOADER_CONFIG\" --load \"${LOADER_LOAD:-target}\" --json > /dev/null; else exec loader-service schema --json > /dev/null; fi"]
ENTRYPOINT ["tini", "--"]
CMD ["loader-service", "--help"]
