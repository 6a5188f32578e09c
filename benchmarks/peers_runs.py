"""Runs of the peers' benchmark: a process for each, page cache and memory in a known state, bytes compared before."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import (
    GIB,
    MIB,
    SIDE_TIMEOUT_S,
    Rounds,
    cached_share,
    condition_memory,
    drop_from_cache,
    read_into_cache,
)
from benchmarks.peers_cases import LIMIT, OURS, Case, Side
from benchmarks.peers_sides import READY, Result
from benchmarks.peers_venv import ROOT, Environments
from benchmarks.peers_works import Request

CAPACITY_BYTES = 256 * MIB  # staging.capacity_bytes of the loader
TRIES = 3  # to bring the page cache into its state
SHOWN = 3  # of the names of wrong tensors
REFERENCE = "peers_works.reference"


class SideFailedError(Exception):
    """A side's process ended with an error. The text is its last word, fit for a table."""


@dataclass(slots=True)
class Series(Rounds):
    """All rounds of one side of one case. `failure` says why there are none, `wrong` which bytes are not the files'."""

    case: Case
    side: Side
    cache: str
    results: list[Result] = field(default_factory=list)
    failure: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def who(self) -> str:
        return f"{self.case.name}, {self.cache}, {self.side.label}"

    @property
    def measured(self) -> Sequence[Result]:
        return self.results

    def as_dict(self) -> dict[str, object]:
        names = ("seconds", "gib_per_s", "cpu_s_per_gib", "above_bytes", "lag_p99_ms")
        medians = {name: self.median(name) for name in names} if self.results else {}
        found: dict[str, object] = {"case": self.case.name, "cache": self.cache, "side": asdict(self.side)}
        found |= {"failure": self.failure, "wrong": self.wrong}
        return found | {"medians": medians, "rounds": [asdict(result) for result in self.results]}


# One process


class _Process:
    """A side's process: ready, it waits to be told to go."""

    def __init__(self, process: subprocess.Popen[str], errors: Any) -> None:
        self._process = process
        self._errors = errors

    def hear(self) -> Any:
        """Raises `SideFailedError` where it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        sys.stderr.write(said)
        last = [text.strip() for text in said.splitlines() if text.strip()]
        raise SideFailedError(last[-1] if code > 0 and last else f"its process ended with {code}")

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `hear` tells
            self._process.stdin.write("go\n")
            self._process.stdin.flush()


@contextlib.contextmanager
def _started(request: Request, where: str, environments: Environments) -> Iterator[_Process]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*environments.command(where), json.dumps(asdict(request))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environments.variables(where),
        )
        timer = threading.Timer(SIDE_TIMEOUT_S, process.kill)
        timer.start()
        with process:
            try:
                yield _Process(process, errors)
            finally:
                timer.cancel()
                process.kill()


def _request(case: Case, side: Side, digests: str = "") -> Request:
    return Request(side.work, case.files, case.take, CAPACITY_BYTES, digests)


def prepare(case: Case, cache: str) -> tuple[float | None, int]:
    """Brings page cache and memory into their state: (the cached share of the files, bytes of memory touched)."""
    files = [Path(path) for path in case.files]
    # The page cache's copy, the tensors, and what is between: a whole file of the largest buffers.
    wanted_bytes = 5 * case.payload_bytes // 2 + CAPACITY_BYTES
    for _ in range(TRIES):
        (drop_from_cache if cache == "cold" else read_into_cache)(files)
        conditioned_bytes = condition_memory(wanted_bytes)
        cached = cached_share(files)
        if cached is None or (cached <= 0.01 if cache == "cold" else cached >= 0.99):
            return cached, conditioned_bytes
    raise RuntimeError(f"{cached:.1%} of the files is cached where it is to be {cache}: does anybody else use them?")


def run(series: Series, environments: Environments) -> Result:
    """One round of one side. Raises `SideFailedError`."""
    with _started(_request(series.case, series.side), series.side.where, environments) as process:
        if process.hear() != READY:
            raise SideFailedError("its process did not say that it is ready")
        cached, conditioned_bytes = prepare(series.case, series.cache)
        process.go()
        result = Result(**process.hear())
    return dataclasses.replace(result, cached_before=cached, conditioned_bytes=conditioned_bytes)


# Bytes


def compare(case: Case, sides: Sequence[Side], environments: Environments) -> dict[str, list[str] | str]:
    """For each side by its label: which bytes are wrong, or why it could not run. Nothing is timed."""
    with tempfile.TemporaryDirectory(prefix="loader-bench-") as temporary:
        path = str(Path(temporary) / "digests.json")
        right = _digests(case, Side("", REFERENCE, OURS, "own"), path, environments)
        found: dict[str, list[str] | str] = {}
        for side in sides:
            _note(f"comparing the bytes of {case.name}, {side.label}")
            try:
                found[side.label] = differences(right, _digests(case, side, path, environments))
            except SideFailedError as error:
                found[side.label] = str(error)
    return found


def _digests(case: Case, side: Side, path: str, environments: Environments) -> dict[str, str]:
    with _started(_request(case, side, path), side.where, environments) as process:
        process.hear()
        process.go()
        process.hear()
    digests: dict[str, str] = json.loads(Path(path).read_text())
    return digests


def differences(right: dict[str, str], found: dict[str, str]) -> list[str]:
    """In words, of the first tensors that are missing, not wanted, or other than they should be."""
    wrong = [name for name in {**right, **found} if right.get(name) != found.get(name)]
    return [f"'{name}' is {found.get(name, 'missing')}, not {right.get(name, 'wanted')}" for name in wrong[:SHOWN]]


# All


def measure(case: Case, caches: Sequence[str], rounds: int, environments: Environments, seed: int = 0) -> list[Series]:
    """Interleaved, in another order each round; a side that cannot run is left out of them, with the reason."""
    checked = compare(case, case.sides, environments)
    all_series = [Series(case, side, cache) for cache in caches for side in (*case.sides, *case.limits(cache))]
    for each in all_series:
        outcome = checked.get(each.side.label, [])
        if isinstance(outcome, str):
            _fail(each, outcome, environments)
        else:
            each.wrong += outcome
    order = random.Random(seed)
    for number in range(rounds):
        began_s = time.perf_counter()
        for each in order.sample(all_series, len(all_series)):
            if not each.failure:
                _run_one(each, environments)
        _note(f"{case.name}, round {number + 1} of {rounds}: {time.perf_counter() - began_s:.0f} s")
    return all_series


def _run_one(each: Series, environments: Environments) -> None:
    try:
        each.results.append(run(each, environments))
    except SideFailedError as error:
        each.results.clear()
        _fail(each, str(error), environments)
    else:
        result = each.results[-1]
        _note(f"  {each.who}: {result.seconds:.2f} s, {result.payload_bytes / GIB:.2f} GiB")


def _fail(each: Series, reason: str, environments: Environments) -> None:
    """A peer that fails is named in the table. The loader and the limits may not fail."""
    if each.side.peer in (OURS, LIMIT):
        raise RuntimeError(f"{each.who}: {reason}")
    each.failure = environments.missing.get(each.side.peer, reason)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
