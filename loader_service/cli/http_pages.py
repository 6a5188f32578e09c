"""What a resident service answers over HTTP: from a path to an answer, without any network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from loader_service import logs
from loader_service.cli.html_page import document
from loader_service.cli.metrics import registry_of
from loader_service.errors import ConfigError, FailureRecord, StateError, record_of
from loader_service.keeping.status import ServiceStatus
from loader_service.sizes import format_size

LOOP_LAG_LIMIT_S: Final = 30.0  # a loop that is later is stuck: no read and no message of a rank keeps it so long
PATHS: Final = {
    "/healthz": f"200 while the service's event loop is less than {LOOP_LAG_LIMIT_S:g} s late, else 503",
    "/readyz": "200 once the services of all ranks have everything, else 503; says what is missing",
    "/metrics": "for Prometheus",
    "/status": "what the service is at",
    "/plan?load=NAME": "who reads what of a load",
}

_log = logs.logger("loader_service.http")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gets."""

    code: HTTPStatus
    content_type: str
    body: bytes


class Pages:
    """Answers from what `status` and `plan` say at that moment; from any thread. Nothing can be changed over it."""

    def __init__(self, status: Callable[[], ServiceStatus], plan: Callable[[str | None], Mapping[str, object]]) -> None:
        self._status = status
        self._plan_of = plan
        self._registry = registry_of(status)
        self._pages: dict[str, Callable[[str], Answer]] = {
            "/": self._index,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/metrics": self._metrics,
            "/status": lambda _query: _json(HTTPStatus.OK, self._status().as_dict()),
            "/plan": self._plan,
        }

    def answer(self, target: str) -> Answer:
        """To a request's target, path and query. Never raises: what goes wrong is an answer, and is logged."""
        path, _, query = target.partition("?")
        page = self._pages.get(path)
        if page is None:
            return text(HTTPStatus.NOT_FOUND, f"no such path; there are /, {', '.join(PATHS)}")
        try:
            return page(query)
        except Exception as error:  # noqa: BLE001 - of the service; it is asked again
            _log.exception("%s cannot be answered", path)
            return _failure(HTTPStatus.INTERNAL_SERVER_ERROR, record_of(error))

    def _index(self, _query: str) -> Answer:
        status = self._status()
        links = "".join(
            f'<li><a href="{escape(path.partition("?")[0])}">{escape(path)}</a>: {escape(says)}</li>\n'
            for path, says in PATHS.items()
        )
        title = f"loader-service {status.version}, service {status.rank} of {status.world_size}"
        page = document(title, ["Nothing can be changed from here."], f"<ul>\n{links}</ul>\n")
        return Answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(errors="replace"))

    def _health(self, _query: str) -> Answer:
        late_s = self._status().late_s
        if late_s > LOOP_LAG_LIMIT_S:
            return text(HTTPStatus.SERVICE_UNAVAILABLE, f"the service's event loop is {late_s:.1f} s late")
        return text(HTTPStatus.OK, "ok")

    def _readiness(self, _query: str) -> Answer:
        status = self._status()
        code = HTTPStatus.OK if status.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(code, {"ready": status.ready, "missing": missing(status)})

    def _metrics(self, _query: str) -> Answer:
        return Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _plan(self, query: str) -> Answer:
        load = parse_qs(query, keep_blank_values=True).get("load", [None])[-1]
        try:
            return _json(HTTPStatus.OK, self._plan_of(load))
        except ConfigError as error:
            return _failure(HTTPStatus.NOT_FOUND, error.record())
        except StateError as error:
            return _failure(HTTPStatus.SERVICE_UNAVAILABLE, error.record())


def missing(status: ServiceStatus) -> list[str]:
    """Why a service is not ready, a sentence each; nothing where it is."""
    if status.ready:
        return []
    found = []
    for load in status.loads:
        match load.state:
            case "ready":
                continue
            case "failed":
                says = f"has failed: {load.reason}" if load.reason else "has failed"
            case "reading":
                says = f"is reading: {format_size(load.read_bytes)} of {format_size(load.wanted_bytes)}"
            case _:
                says = f"is {load.state}"
        found.append(f"load {load.load!r} {says}")
    return found or ["all loads of this service are ready, those of another one are not"]


def text(code: HTTPStatus, says: str) -> Answer:
    """A plain line."""
    return Answer(code, "text/plain; charset=utf-8", f"{says}\n".encode(errors="replace"))


def _json(code: HTTPStatus, what: Mapping[str, object]) -> Answer:
    return Answer(code, "application/json", f"{json.dumps(what)}\n".encode())


def _failure(code: HTTPStatus, record: FailureRecord) -> Answer:
    return _json(code, record.as_dict())
