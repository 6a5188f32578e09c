"""An exception of the consumer's own class ends the load on every rank at once, whatever asking it for words does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import pytest

import loader_service as ls
from loader_service.engine import Engine
from tests.agreement.test_odd_errors import LiesAboutItsClass, NoText, no_errno, no_record
from tests.e2e import forty
from tests.e2e.forty import SMALL
from tests.e2e.seats import Seat, all_of, make_seats, values
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("forty"))


class NoNotes(Exception):
    """Refuses what a verdict would be attached to."""

    def add_note(self, note: str, /) -> None:
        raise KeyboardInterrupt(note)


class NoRank(ls.ReadError):
    def __setattr__(self, name: str, value: object) -> None:
        if name == "rank" and value is not None:
            raise SystemExit("no")
        super().__setattr__(name, value)


MAKERS: dict[str, Callable[[], Exception]] = {
    "no text": lambda: NoText(SystemExit(3)),
    "no record": lambda: no_record(KeyboardInterrupt("no")),
    "no errno": lambda: no_errno(SystemExit(3)),
    "huge errno": lambda: OSError(10**5000, "why", "where"),
    "odd path": lambda: ls.ReadError("why", path=5),  # type: ignore[arg-type]
    "no notes": lambda: NoNotes("why"),
    "no rank": lambda: NoRank("why"),
    "odd class": lambda: LiesAboutItsClass("why"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
async def test_an_odd_exception_is_told_to_the_others(
    checkpoint: Checkpoint, make: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """With the log at its most talkative: its lines are made of the exception too."""
    caplog.set_level(logging.DEBUG, "loader_service")
    config, seats, own = checkpoint.config(**SMALL), make_seats(2), make()

    async def work(seat: Seat) -> FailureOf:
        async with seat.service(config) as service:
            load = service.open("target")
            try:
                async with load:
                    async for _ in load:
                        if seat.rank == 1:
                            raise own
            except Exception as error:
                assert load.failure is not None
                assert not load.succeeded
                return error, load.failure.record()
        raise AssertionError("the load succeeded")

    (first, told), (second, also_told) = values(await all_of(seats, work))
    assert second is own
    assert told == also_told
    assert (told.error, told.rank) == (type(own).__name__, 1)
    assert type(first) is ls.RankFailure


FailureOf = tuple[Exception, ls.FailureRecord]


async def test_a_phase_that_ends_with_an_odd_exception_can_be_logged(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "loader_service")
    own = NoText(SystemExit(3))

    def resources(*_: object, **__: object) -> NoReturn:
        raise own

    monkeypatch.setattr(Engine, "resources", resources)
    async with ls.LoaderService(checkpoint.config(**SMALL), "solo") as service:
        with pytest.raises(NoText) as caught:
            async with service.open("target"):
                pass
    assert caught.value is own
    assert [line for line in caplog.messages if "open failed" in line and "NoText" in line]


async def test_a_load_has_succeeded_once_all_ranks_agree_on_it(checkpoint: Checkpoint) -> None:
    seats = make_seats(2)

    async def work(seat: Seat) -> list[bool]:
        async with seat.service(checkpoint.config(**SMALL)) as service:
            load = service.open("target")
            seen = [load.succeeded]
            async with load:
                seen.append(load.succeeded)
            return [*seen, load.succeeded]

    assert values(await all_of(seats, work)) == [[False, False, True]] * 2
