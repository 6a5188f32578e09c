# Two stages: the first one builds an environment, the second one carries it and nothing that built it.
#   docker build -t loader-service --build-arg TORCH_INDEX_URL=... .
#   docker run --rm --network none loader-service loader-service demo --folder /tmp/demo
# docs/deployment.md says how it is run.

# Both stages stand on it: Python 3.11 to 3.13 as `python`, and apt. One with a digest makes a build repeatable.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/build/constraints.txt \
    PIP_BUILD_CONSTRAINT=/build/constraints.txt
WORKDIR /build
COPY constraints.txt ./
# torch alone, and first: it is most of the image. The default index's build for x86-64 wants CUDA's libraries, 4 GB,
# which the service has no use for: give the index of the CPU builds.
ARG TORCH_INDEX_URL
RUN python -m venv /opt/loader-service \
 && /opt/loader-service/bin/pip install --no-deps ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch
# The other dependencies, torch's own too, in a layer that a change of the code leaves as it is.
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
 && /opt/loader-service/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY loader_service/ loader_service/
RUN /opt/loader-service/bin/pip install --no-deps .

FROM ${BASE} AS runtime
# tini passes signals on and collects the ranks that torchrun leaves behind: PID 1 must do both.
# hadolint ignore=DL3008
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
STOPSIGNAL SIGTERM
# Of the service below. A container that runs another command is started with --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9595/healthz', timeout=5)"]
ENTRYPOINT ["tini", "--"]
CMD ["loader-service", "serve", "/etc/loader-service/model.yaml", "--http", "0.0.0.0:9595"]
