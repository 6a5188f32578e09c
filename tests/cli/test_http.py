"""HTTP: what a service answers, to whom it does not, and that no client holds it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loader_service.cli import http as module
from loader_service.cli.http import HttpServer
from loader_service.cli.http_pages import LOOP_LAG_LIMIT_S, PATHS, missing
from loader_service.errors import ConfigError, StateError
from loader_service.keeping.status import ServiceStatus
from tests.support.statuses import DRAFT, READY, STATUS, TARGET, status_with

WATCHDOG_S = 60.0
LONG_S = 600.0

pytestmark = pytest.mark.usefixtures("no_leaked_descriptors")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the next look."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)


def no_plan(load: str | None) -> Mapping[str, object]:
    return {"load": load}


def serving(
    status: ServiceStatus | Callable[[], ServiceStatus] = STATUS,
    plan: Callable[[str | None], Mapping[str, object]] = no_plan,
    address: str = "127.0.0.1:0",
) -> HttpServer:
    return HttpServer(address, (lambda: status) if isinstance(status, ServiceStatus) else status, plan)


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.code, self.headers, self.body = response.status, response.headers, response.read()

    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.body)


def ask(server: HttpServer, path: str, method: str = "GET", body: bytes | None = None) -> Reply:
    with contextlib.closing(http.client.HTTPConnection(server.address, timeout=WATCHDOG_S)) as connection:
        connection.request(method, path, body)
        return Reply(connection.getresponse())


def connected(server: HttpServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WATCHDOG_S)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends it."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            received += part
    return received


class Lines(logging.Handler):
    """What the server logs, and that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.come = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.come:
            self.records.append(record)
            self.come.notify_all()

    def wait_for(self, text: str) -> logging.LogRecord:
        def found() -> logging.LogRecord | None:
            return next((record for record in self.records if text in record.getMessage()), None)

        with self.come:
            record = self.come.wait_for(found, WATCHDOG_S)
        assert record is not None, text
        return record


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("loader_service.http"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


# What is answered


def test_each_path_answers_what_it_says_and_is_not_kept_by_caches() -> None:
    with serving(READY) as server:
        replies = {path: ask(server, path) for path in ("/", *(path.partition("?")[0] for path in PATHS))}
        named = ask(server, "/plan?load=a%20%C3%BC%26b&load=last%20one")
        empty = ask(server, "/plan?load=")
    for path, reply in replies.items():
        assert reply.code == 200, path
        assert int(reply.headers["Content-Length"]) == len(reply.body) > 0
        assert reply.headers["Cache-Control"] == "no-store"
        assert "Python" not in reply.headers["Server"]
    assert replies["/healthz"].body == b"ok\n"
    assert replies["/readyz"].json() == {"ready": True, "missing": []}
    assert replies["/status"].json() == json.loads(json.dumps(READY.as_dict()))
    assert replies["/plan"].json() == {"load": None}
    assert named.json() == {"load": "last one"}
    assert empty.json() == {"load": ""}
    assert b"\nloader_service_ready 1.0\n" in replies["/metrics"].body
    assert replies["/metrics"].headers["Content-Type"].startswith("text/plain; version=")
    for path in PATHS:
        assert f'href="{path.partition("?")[0]}"' in replies["/"].body.decode()


def test_head_is_get_without_its_body() -> None:
    with serving() as server:
        for path, code in (("/status", 200), ("/readyz", 503), ("/nowhere", 404)):
            got, head = ask(server, path), ask(server, path, "HEAD")
            assert (head.code, head.body) == (got.code, b"") == (code, b"")
            assert head.headers["Content-Length"] == str(len(got.body))
            assert head.headers["Content-Type"] == got.headers["Content-Type"]
        with connected(server) as connection:  # the client above would not look at a body
            connection.sendall(b"HEAD /status HTTP/1.1\r\n\r\n")
            assert all_of(connection).endswith(b"\r\n\r\n")


def test_health_is_that_of_the_loop() -> None:
    late = iter((LOOP_LAG_LIMIT_S, LOOP_LAG_LIMIT_S + 1))
    with serving(lambda: status_with(late_s=next(late))) as server:
        assert ask(server, "/healthz").code == 200
        stuck = ask(server, "/healthz")
    assert (stuck.code, stuck.body) == (503, b"the service's event loop is 31.0 s late\n")


@pytest.mark.parametrize(
    ("loads", "says"),
    [
        (
            (replace(TARGET, state="failed", reason="EIO"), replace(DRAFT, state="agreeing")),
            ["load 'target' has failed: EIO", "load 'draft' is agreeing"],
        ),
        ((replace(TARGET, state="ready"), replace(DRAFT, state="failed")), ["load 'draft' has failed"]),
        ((TARGET,), ["load 'target' is reading: 6000 bytes of 9000 bytes"]),
        ((replace(TARGET, state="ready"),), ["all loads of this service are ready, those of another one are not"]),
    ],
    ids=["failed", "failed without a word", "reading", "another service"],
)
def test_readiness_says_what_is_missing(loads: Any, says: list[str]) -> None:
    assert missing(status_with(loads=loads)) == says


def test_a_service_that_is_not_ready_says_so_with_503() -> None:
    with serving() as server:
        reply = ask(server, "/readyz")
    assert reply.code == 503
    assert reply.json() == {"ready": False, "missing": missing(STATUS)}
    assert len(missing(STATUS)) == 2


def test_what_is_not_there_and_what_would_change_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", LONG_S)
    with serving() as server:
        for path in ("/healthz/", "/../status", "//status/x", "/favicon.ico"):
            reply = ask(server, path)
            assert reply.code == 404
            assert all(known in reply.body.decode() for known in PATHS)
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
            reply = ask(server, "/status", method, b"x" * (4 << 20))  # which it has to take: else the answer is lost
            assert (reply.code, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_a_plan_that_is_not_there_is_a_record() -> None:
    def plan(load: str | None) -> Mapping[str, object]:
        raise ConfigError("there is no load 'x'") if load else StateError("not planned yet")

    with serving(plan=plan) as server:
        unknown, early = ask(server, "/plan?load=x"), ask(server, "/plan")
    assert (unknown.code, unknown.json()["message"]) == (404, "there is no load 'x'")
    assert (early.code, early.json()["error"]) == (503, "StateError")


@pytest.mark.parametrize("path", ["/status", "/metrics", "/healthz", "/readyz", "/"])
def test_a_status_that_cannot_be_had_is_a_record_and_the_service_goes_on(path: str, lines: Lines) -> None:
    broken = threading.Event()
    broken.set()

    def status() -> ServiceStatus:
        if broken.is_set():
            raise RuntimeError("no status today")
        return READY

    with serving(status) as server:
        reply = ask(server, path)
        broken.clear()
        assert ask(server, path).code == 200
    assert reply.code == 500
    assert (reply.json()["error"], reply.json()["message"]) == ("RuntimeError", "no status today")
    logged = lines.wait_for(f"{path} cannot be answered")
    assert logged.levelno == logging.ERROR
    assert logged.exc_info is not None


def test_requests_are_answered_side_by_side_and_none_is_logged_above_debug(lines: Lines) -> None:
    clients = 8
    together = threading.Barrier(clients, timeout=WATCHDOG_S)

    def status() -> ServiceStatus:
        together.wait()
        return READY

    with serving(status) as server, ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(lambda _: ask(server, "/status"), range(clients)))
    assert [reply.code for reply in replies] == [200] * clients
    assert {record.levelno for record in lines.records} == {logging.DEBUG}


# Clients that do not behave


def code_or_none(server: HttpServer) -> int | None:
    """None where the server had ended the connection before the request came."""
    with contextlib.suppress(ConnectionError, http.client.BadStatusLine):
        return ask(server, "/healthz").code
    return None


GARBAGE = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", b"400"),
    "no version": (b"GET\r\n\r\n", b"400"),
    "another protocol": (b"GET / RTSP/1.0\r\n\r\n", b"400"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
    "long line": (b"GET /" + b"x" * (1 << 20), b"431"),
    "long header": (b"GET / HTTP/1.1\r\nA: " + b"x" * (1 << 20), b"431"),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 5000, b"431"),
    "headers without end": (b"GET / HTTP/1.1\r\n" + b"A: xxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n" * 5000, b"431"),
    "a line break in the path": (b"GET /\xff%0d%0aSet-Cookie:x HTTP/1.1\r\n\r\n", b"404"),
}


def test_garbage_is_refused_in_words_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", LONG_S)
    monkeypatch.setattr(module, "HEAD_WITHIN_S", LONG_S)
    with serving() as server:
        for name, (sent, code) in GARBAGE.items():
            with connected(server) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                head, _, body = all_of(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + code), name
            assert b"Set-Cookie" not in head
            assert body.endswith(b"\n"), name
            assert ask(server, "/healthz").code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: a"], ids=["nothing", "a word", "a line"]
)
def test_a_client_that_does_not_get_on_with_its_request_is_left(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_WITHIN_S", 0.0)
    with serving() as server, connected(server) as slow:
        slow.sendall(sent)
        assert all_of(slow) == b""


def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked = [0.0], threading.Semaphore(0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    look = module._Server.service_actions

    def service_actions(server: Any) -> None:
        look(server)
        looked.release()

    def status() -> ServiceStatus:
        clock[0] += LONG_S
        while looked.acquire(blocking=False):  # those before
            pass
        for _ in range(2):
            assert looked.acquire(timeout=WATCHDOG_S)
        return READY

    monkeypatch.setattr(module._Server, "service_actions", service_actions)
    with serving(status) as server:
        assert ask(server, "/healthz").body == b"ok\n"


def test_a_client_that_does_not_take_its_answer_is_left(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    monkeypatch.setattr(module, "TAKEN_WITHIN_S", 0.0)
    large = {"text": "x" * (64 << 20)}
    with serving(plan=lambda _load: large) as server, connected(server) as slow:
        slow.sendall(b"GET /plan HTTP/1.1\r\n\r\n")
        ended = lines.wait_for("a connection has ended early")
        assert ended.levelno == logging.DEBUG
        assert len(all_of(slow)) < len(large["text"])


def test_a_client_that_keeps_its_connection_after_the_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 1)
    with serving() as server, connected(server) as kept:
        kept.sendall(b"GET /healthz HTTP/1.1\r\nConnection: keep-alive\r\n\r\n")
        assert b"\r\nConnection: close\r\n" in all_of(kept)
        while (code := code_or_none(server)) != 200:
            assert code in {503, None}


def test_connections_are_bounded_and_the_next_one_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(module, "HEAD_WITHIN_S", LONG_S)
    with serving() as server, connected(server), connected(server) as second:
        for _ in range(3):
            with connected(server) as third:
                assert all_of(third).startswith(b"HTTP/1.1 503 ")
        second.close()
        while (code := code_or_none(server)) != 200:
            assert code in {503, None}
    warnings = [record for record in lines.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "more than 2 connections" in warnings[0].getMessage()


def test_a_process_out_of_descriptors_says_so_once_and_serves_on(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    refusals = [OSError(errno.EMFILE, "Too many open files")] * 2
    accept = socketserver.TCPServer.get_request

    def get_request(server: socketserver.TCPServer) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", get_request)
    with serving() as server:
        assert ask(server, "/healthz").code == 200
    assert [record.getMessage() for record in lines.records if record.levelno == logging.WARNING] == [
        "no connection can be accepted: [Errno 24] Too many open files"
    ]


# From binding to closing


def test_it_closes_while_clients_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("HEAD_WITHIN_S", "LINGER_S", "TAKEN_WITHIN_S"):
        monkeypatch.setattr(module, limit, LONG_S)
    with contextlib.ExitStack() as clients:
        with serving() as server:
            idle, served, half = (clients.enter_context(connected(server)) for _ in range(3))
            served.sendall(b"GET /healthz HTTP/1.1\r\nConnection: keep-alive\r\n\r\n")
            half.sendall(b"GET /heal")
            assert all_of(served).startswith(b"HTTP/1.1 200 ")
        assert all_of(idle) == all_of(half) == b""
        with pytest.raises(ConnectionRefusedError):
            connected(server)


def test_it_closes_without_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 0.0)
    asked, answer = threading.Event(), threading.Event()

    def status() -> ServiceStatus:
        asked.set()
        answer.wait(WATCHDOG_S)
        return STATUS

    with contextlib.ExitStack() as client:
        with serving(status) as server:
            connection = client.enter_context(connected(server))
            connection.sendall(b"GET /status HTTP/1.1\r\n\r\n")
            assert asked.wait(WATCHDOG_S)
        assert all_of(connection) == b""
        answer.set()


def test_it_binds_at_once_to_that_address_alone() -> None:
    with serving() as server:
        host, port = server.address.split(":")
        assert host == "127.0.0.1"
        with pytest.raises(ConfigError, match=rf"HTTP cannot be served at {server.address}: Address already in use"):
            serving(address=server.address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), timeout=WATCHDOG_S)
        assert ask(server, "/healthz").code == 200
    with serving(address=server.address) as again:  # at once, although the system remembers that connection
        assert ask(again, "/healthz").code == 200


def test_addresses_may_be_names_and_of_the_sixth_version() -> None:
    with serving(address="localhost:0") as named:
        assert ask(named, "/healthz").code == 200
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(address="[::1]:0") as sixth:
        assert sixth.address.startswith("[::1]:")
        assert ask(sixth, "/healthz").code == 200


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("9100", "write HOST:PORT"),
        (":9100", r"0\.0\.0\.0:9100 for all interfaces"),
        ("::1:9100", "write HOST:PORT"),
        ("[]:9100", "write HOST:PORT"),
        ("127.0.0.1:", "a number from 0 to 65535"),
        ("127.0.0.1:http", "a number from 0 to 65535"),
        ("127.0.0.1:65536", "a number from 0 to 65535"),
        ("127.0.0.1:-1", "a number from 0 to 65535"),
        ("192.0.2.1:0", "Cannot assign requested address"),
        (f"{'a' * 70}:0", "HTTP cannot be served at a{70}:0: "),
        ("nobody.invalid:0", r"HTTP cannot be served at nobody\.invalid:0: \w+"),
        ("a\0b:0", "HTTP cannot be served at"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_with_its_cause(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serving(address=address)
