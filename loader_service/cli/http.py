"""The HTTP server of a resident service: small, for reading only, on threads of its own.

A connection has one request. Its thread may block in the socket, and is woken when its time is up, or the server
closes, by shutting the socket down: so no client holds one for ever, however slowly it sends or takes.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import logging
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Self

from loader_service.cli.http_pages import Answer, Pages, text
from loader_service.errors import ConfigError
from loader_service.keeping.status import ServiceStatus

MOST_CONNECTIONS: Final = 64
MOST_HEAD_BYTES: Final = 16 << 10
HEAD_WITHIN_S: Final = 10.0
TAKEN_WITHIN_S: Final = 60.0  # the plan of a large model is megabytes
LINGER_S: Final = 1.0
LOOK_EVERY_S: Final = 0.2
CLOSE_WITHIN_S: Final = 1.0

_log = logging.getLogger("loader_service.http")


class HttpServer:
    """Serves what `status` and `plan` say under `address`, HOST:PORT, from entering to leaving.

    Binds at once, to that address alone; port 0 takes any that is free. Both callables are called on the server's
    threads, several at once. `plan` may raise ConfigError for a load that there is not, and StateError while there is
    no plan yet. Leaving waits for requests in work, 1 s at most: those left then get no answer.
    Raises ConfigError where the address is none or cannot be bound.
    """

    def __init__(
        self,
        address: str,
        status: Callable[[], ServiceStatus],
        plan: Callable[[str | None], Mapping[str, object]],
    ) -> None:
        self._server = _bound(address, Pages(status, plan))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_EVERY_S,), name="loader-http", daemon=True
        )

    @property
    def address(self) -> str:
        """What is bound, as HOST:PORT in numbers."""
        host, port, *_ = self._server.server_address
        return f"[{host!s}]:{port}" if self._server.address_family == socket.AF_INET6 else f"{host!s}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()


def _bound(address: str, pages: Pages) -> _Server:
    host, port = _host_and_port(address)
    refused: Exception | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise _not_served(address, error) from error
    for family, _, _, _, bind_to in found:
        try:
            return _Server(family, bind_to, pages)
        except OSError as error:
            refused = refused or error
    raise _not_served(address, refused or OSError("it has no address")) from refused


def _not_served(address: str, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"HTTP cannot be served at {address}: {why}", errno=error.errno if isinstance(error, OSError) else None
    )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if in_brackets := host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or (":" in host and not in_brackets):
        raise ConfigError(
            f"HTTP cannot be served at {address!r}: write HOST:PORT, as 127.0.0.1:9100, [::1]:9100, or 0.0.0.0:9100 "
            "for all interfaces"
        )
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"HTTP cannot be served at {address!r}: the port must be a number from 0 to 65535")
    return host, int(port)


class _Client:
    """A connection's thread, and when its time is up."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.until_s = time.monotonic() + HEAD_WITHIN_S


class _Server(socketserver.TCPServer):
    """Accepts on one thread, which also looks after those of the connections."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, family: int, bind_to: Any, pages: Pages) -> None:  # noqa: ANN401 - as the family has it
        self.address_family = family
        self.pages = pages
        self._gate = threading.Lock()  # a connection is cut only before it is closed: its number may be another's then
        self._clients: dict[socket.socket, _Client] = {}
        self._numbers = itertools.count()
        self._warned = False  # since the last connection that was served
        super().__init__(bind_to, _Handler)

    def give(self, connection: socket.socket, seconds: float) -> None:
        """From now on the connection has so long. On its own thread."""
        self._clients[connection].until_s = time.monotonic() + seconds

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:  # mostly: no more descriptors. It would be tried again at once
            self._warn("no connection can be accepted: %s", error)
            time.sleep(LOOK_EVERY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's types
        if len(self._clients) >= MOST_CONNECTIONS:
            self._warn("more than %d connections at once: others are refused", MOST_CONNECTIONS)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._serve,
            args=(request, client_address),
            name=f"loader-http-{next(self._numbers)}",
            daemon=True,
        )
        with self._gate:
            self._clients[request] = _Client(thread)
        thread.start()
        self._warned = False

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            self.finish_request(connection, peer)
        except Exception:  # noqa: BLE001 - of one client; others are served on
            self.handle_error(connection, peer)
        finally:
            self.shutdown_request(connection)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - socketserver's type
        with self._gate:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's names
        gone = isinstance(sys.exception(), OSError)
        _log.log(logging.DEBUG if gone else logging.ERROR, "a connection has ended early", exc_info=True)

    def _warn(self, says: str, *args: object) -> None:
        if not self._warned:
            _log.warning(says, *args)
        self._warned = True

    def service_actions(self) -> None:
        """Between any two connections, and every `LOOK_EVERY_S`."""
        now_s = time.monotonic()
        self._cut(lambda client: client.until_s <= now_s)

    def _cut(self, whether: Callable[[_Client], bool]) -> None:
        """Wakes the threads of these connections, which end then."""
        with self._gate:
            for connection, client in self._clients.items():
                if whether(client):
                    with contextlib.suppress(OSError):  # the client may have gone
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        with self._gate:
            threads = [client.thread for client in self._clients.values()]
        self._cut(lambda _client: True)
        until_s = time.monotonic() + CLOSE_WITHIN_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


class _Head(io.BufferedReader):
    """A request's line and headers, so many bytes of them."""

    left = MOST_HEAD_BYTES

    def readline(self, size: int | None = -1) -> bytes:  # noqa: ARG002 - callers give limits of their own, all larger
        line = super().readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    """One connection: one request, one answer."""

    server: _Server
    protocol_version = default_request_version = "HTTP/1.1"  # what is no HTTP gets an answer with a head, too
    requestline = command = ""
    request_version = protocol_version
    rbufsize = 0  # `_Head` has its own

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def handle(self) -> None:
        try:
            self.raw_requestline = self.rfile.readline()
        except http.client.LineTooLong:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if not self.raw_requestline or not self.parse_request():  # which has answered then
            return
        if self.command not in {"GET", "HEAD"}:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
            return
        self.server.give(self.connection, math.inf)
        self._send(self.server.pages.answer(self.path))

    def finish(self) -> None:
        """Takes what the client still sends, for a moment: where some is left unread, closing would take back the
        answer."""
        self.server.give(self.connection, LINGER_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(64 << 10):
                pass
        super().finish()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Also what `parse_request` says of garbage."""
        status = HTTPStatus(code)
        self._send(text(status, message or status.description or status.phrase))

    def _send(self, answer: Answer) -> None:
        self.server.give(self.connection, TAKEN_WITHIN_S)
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        if answer.code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "loader-service"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        _log.debug("%r", format % args)
