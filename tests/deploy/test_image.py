"""The Dockerfile: hadolint's parser and rules take it, it copies what exists, and its health check tells health."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.deploy.examples import ROOT, compose, dockerfile, last_stage, program


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [program("hadolint"), "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_image_is_built_in_stages_on_a_base_that_can_be_chosen() -> None:
    instructions = dockerfile()
    assert instructions[0] == ("ARG", "BASE=python:3.11-slim-bookworm")
    assert [argument for name, argument in instructions if name == "FROM"] == ["${BASE} AS build", "${BASE} AS runtime"]
    last = [argument for name, argument in instructions[instructions.index(("FROM", "${BASE} AS runtime")) :]]
    assert not any("pip install" in argument for argument in last)


def test_image_runs_without_root_and_passes_signals_on() -> None:
    stage = last_stage()
    user, group = stage["USER"].split(":")
    assert min(int(user), int(group)) > 0
    assert json.loads(stage["ENTRYPOINT"]) == ["tini", "--"]
    assert json.loads(stage["CMD"])[:2] == ["loader-service", "serve"]
    assert stage["STOPSIGNAL"] == "SIGTERM"


def test_what_the_image_copies_exists_and_reaches_the_build() -> None:
    sources = [
        source
        for name, argument in dockerfile()
        if name == "COPY" and "--from=" not in argument
        for source in argument.split()[:-1]
    ]
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source.rstrip("/"), pattern) for pattern in admitted), f".dockerignore keeps {source} out"


def image_check() -> list[str]:
    command: list[str] = json.loads(last_stage()["HEALTHCHECK"].split("CMD", 1)[1])
    return command


def compose_check() -> list[str]:
    kind, *command = compose()["services"]["loader"]["healthcheck"]["test"]
    assert kind == "CMD"
    return [str(word) for word in command]


@contextmanager
def answering(codes: dict[str, int]) -> Iterator[int]:
    """A server on a port of its own that gives a path's code."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("check", "path"), [(image_check, "/healthz"), (compose_check, "/readyz")])
def test_a_health_check_succeeds_on_200_alone(check: object, path: str) -> None:
    assert callable(check)
    interpreter, *args = check()
    assert interpreter == "python"

    def code_at(port: int) -> int:
        words = [shlex.quote(arg.replace(":9595/", f":{port}/")) for arg in args]
        command = shlex.split(" ".join(words))
        assert command != args
        return subprocess.run([sys.executable, "-I", *command], stderr=subprocess.DEVNULL, timeout=60).returncode

    with answering({path: 200}) as port:
        assert code_at(port) == 0
    assert code_at(port) != 0  # nobody listens any more
    with answering({path: 503}) as port:
        assert code_at(port) != 0
