"""Who prints a failure, and how reports come together, with a real store and ranks that share one loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from loader_service.agreement.codec import encode_entry, encode_record
from loader_service.agreement.group import Rendezvous
from loader_service.agreement.messages import PHASES, Phase, PhaseRecord, Verdict
from loader_service.cli import ranks
from loader_service.cli.ranks import Place, Spokesman, fail_reports, gather, place_from, turn_to_print
from loader_service.config.schema import AgreementConfig
from loader_service.errors import ConfigError, FailureRecord, LoaderError, RankFailure

READ_FAILED = FailureRecord("ReadError", "no luck", 1, "read")
RANK_0_DIED = FailureRecord("LostRank", "no sign of life", 0, "read")
STORE_OF_RANK_0_DIED = FailureRecord("LostStore", "connection reset", 0, "read")
STORE_DIED = FailureRecord("LostStore", "connection reset", None, "read")


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def places(server: TCPStore, world_size: int, nonce: str) -> list[Place]:
    address = f"127.0.0.1:{server.port}"
    return [
        Place(rank, world_size, Rendezvous(address, rank, world_size, nonce, served=True)) for rank in range(world_size)
    ]


async def gather_all(server: TCPStore, nonce: str, own: Sequence[dict[str, Any]]) -> list[list[dict[str, object]]]:
    """What each rank gets."""
    return await asyncio.gather(
        *(
            gather(place, document, AgreementConfig(timeout_s=20.0))
            for place, document in zip(places(server, len(own), nonce), own, strict=True)
        )
    )


def unreachable(world_size: int, *, served: bool = True) -> list[Place]:
    """Places whose store is not there: nothing listens on the discard port."""
    return [
        Place(rank, world_size, Rendezvous("127.0.0.1:9", rank, world_size, "none", served=served))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        (READ_FAILED, [0, 1, 2]),
        (RANK_0_DIED, [2, 0, 1]),
        (FailureRecord("LostRank", "gone", 1), [0, 2, 1]),
        (STORE_DIED, [0, 1, 2]),
        (FailureRecord("AgreementError", "they differ", None), [0, 1, 2]),
    ],
    ids=["a failing rank lives", "rank 0 died", "rank 1 died", "nobody is named", "ranks differ"],
)
def test_turns_to_print_leave_out_the_dead(record: FailureRecord, turns: list[int]) -> None:
    assert [turn_to_print(record, rank=rank, world_size=3) for rank in range(3)] == turns


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (READ_FAILED, True),
        (FailureRecord("LostRank", "gone", 1), True),
        (FailureRecord("ReadError", "no luck", 0), True),
        (RANK_0_DIED, False),
        (STORE_DIED, False),
    ],
    ids=["a rank failed", "a rank died", "rank 0 failed", "rank 0 died", "the store died"],
)
def test_a_verdict_of_a_living_leader_is_printed_by_it(record: FailureRecord, expected: bool) -> None:
    assert ranks.leader_prints(record) is expected


async def test_a_common_verdict_is_printed_by_rank_0_without_asking_anyone() -> None:
    nowhere = unreachable(3)
    voices = [await Spokesman(place).voice(READ_FAILED, agreed=True) for place in nowhere]
    assert voices == ["document", "none", "none"]


async def test_without_a_verdict_the_first_rank_alone_prints(server: TCPStore) -> None:
    all_ranks = places(server, 4, "all")
    voices = await asyncio.gather(*(Spokesman(place).voice(READ_FAILED, agreed=False) for place in all_ranks))
    assert voices == ["document", "none", "none", "none"]


async def test_a_rank_that_finds_nobody_before_it_prints(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "WAIT_FOR_LOWER_RANK_S", 0.2)
    living = places(server, 4, "half")[2:]  # ranks 0 and 1 died, the verdict names rank 0
    voices = await asyncio.gather(*(Spokesman(place).voice(RANK_0_DIED, agreed=True) for place in living))
    assert voices == ["document", "none"]


async def test_without_a_store_what_is_known_decides() -> None:
    async def voices(record: FailureRecord, *, agreed: bool, served: bool) -> list[str]:
        nowhere = unreachable(3, served=served)
        return [await Spokesman(place).voice(record, agreed=agreed) for place in nowhere]

    # Rank 0 hosted the store, and is gone.
    assert (await voices(STORE_OF_RANK_0_DIED, agreed=True, served=False))[1:] == ["document", "none"]
    # An agent hosted it: rank 0 may live, and each rank knows only that it is cut off itself.
    assert await voices(STORE_DIED, agreed=True, served=True) == ["document", "line", "line"]
    assert (await voices(STORE_OF_RANK_0_DIED, agreed=True, served=True))[1:] == ["line", "line"]
    assert await voices(READ_FAILED, agreed=False, served=True) == ["document", "line", "line"]


async def test_one_rank_alone_prints() -> None:
    assert await Spokesman(Place(0, 1, None)).voice(READ_FAILED, agreed=False) == "document"


async def test_a_rank_that_was_stopped_and_given_up_prints_no_second_document(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "WAIT_FOR_LOWER_RANK_S", 0.2)
    leader, resumed = places(server, 2, "resumed")
    speaking = Spokesman(leader)
    assert await speaking.voice(FailureRecord("LostRank", "no sign of life", 1), agreed=True) == "document"
    await speaking.printed()
    interrupted = FailureRecord("LoadCancelledError", "interrupted by SIGTERM", 1)
    assert await Spokesman(resumed, stopped=lambda: True).voice(interrupted, agreed=False) == "none"


async def test_a_rank_whose_leader_died_without_printing_prints_in_its_place(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "WAIT_FOR_LOWER_RANK_S", 0.2)
    interrupted = FailureRecord("LoadCancelledError", "interrupted by SIGTERM", 1)
    assert await Spokesman(places(server, 2, "died")[1]).voice(interrupted, agreed=False) == "document"


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_was_stopped_and_finds_no_store_says_a_line_only(rank: int) -> None:
    """The store's host may have printed and ended meanwhile; or, where it was stopped itself, the others have."""
    resumed = Spokesman(unreachable(2)[rank], stopped=lambda: True)
    assert await resumed.voice(STORE_OF_RANK_0_DIED, agreed=True) == "line"
    assert await resumed.voice(READ_FAILED, agreed=False) == "line"


async def test_where_the_store_is_gone_no_mark_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_claim", lambda meeting, wait_s: pytest.fail("it takes seconds if the store is frozen"))
    speaking = Spokesman(unreachable(2, served=False)[1])
    assert await speaking.voice(STORE_OF_RANK_0_DIED, agreed=True) == "document"
    await speaking.printed()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("LostRank", 4),
        ("LateRank", 4),
        ("LostStore", 4),
        ("ReadError", 5),
        ("LoadCancelledError", 130),
        ("MemoryError", 6),
        ("KeyError", 1),
    ],
)
def test_every_record_of_a_rank_has_its_code(error: str, code: int) -> None:
    assert ranks.exit_code_of(FailureRecord(error, "it happened", 1)) == code


async def test_reports_come_together_in_rank_order(server: TCPStore) -> None:
    own = [{"rank": rank, "files_read": [f"{rank}-{i}" for i in range(5000)]} for rank in range(3)]
    assert await gather_all(server, "reports", own) == [own, own, own]


def random_names(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [f"{source.getrandbits(256):064x}.safetensors" for _ in range(count)]


async def test_a_report_of_thousands_of_files_without_any_pattern_arrives_whole(server: TCPStore) -> None:
    own = [{"rank": rank, "files_read": random_names(4000, rank), "fallbacks": []} for rank in range(2)]
    assert await gather_all(server, "hashed", own) == [own, own]


async def test_a_report_that_is_too_large_comes_without_its_lists_and_says_so(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "part_limit", lambda world_size: 100)
    small = {"rank": 0, "files_read": ["a"], "warnings": ["w"], "fallbacks": ["f"]}
    many = {"rank": 1, "files_read": random_names(20, 1), "warnings": ["w"], "fallbacks": ["f"]}
    [[first, second], other] = await gather_all(server, "too large", [small, many])
    assert other == [first, second]
    assert first == small
    assert second == {
        **many,
        "files_read": [],
        "fallbacks": ["f", "report: files_read of rank 1 (20 texts) is too long to collect"],
    }


@pytest.mark.parametrize("world_size", [2, 8, 1000, 10000])
def test_the_parts_of_all_reports_fit_into_a_record_and_a_verdict(world_size: int) -> None:
    part = "~" * ranks.part_limit(world_size)
    encode_record(PhaseRecord(listed=part))
    encode_entry(Verdict(5, PHASES[0], "go", listed=(part,) * world_size))


@pytest.mark.parametrize("phase", [None, Phase.FINISH])
async def test_a_report_that_never_comes_names_its_rank_and_the_load_s_phase_not_its_own_part(
    phase: Phase | None, server: TCPStore
) -> None:
    first = places(server, 2, f"absent in {phase}")[0]
    finals: list[LoaderError] = []
    settings = AgreementConfig(timeout_s=0.5, grace_s=0.2)
    with pytest.raises(RankFailure) as caught:
        await gather(first, {"rank": 0}, settings, phase=phase, on_final=finals.append)
    for error in (caught.value, *finals):
        assert (error.record().error, error.rank, error.phase) == ("LateRank", 1, phase)
    assert len(finals) == 1


async def test_a_rank_that_cannot_open_its_load_tells_the_others(server: TCPStore) -> None:
    verdicts: list[LoaderError | None] = []

    async def note(verdict: LoaderError | None) -> None:
        verdicts.append(verdict)

    both = places(server, 2, "refused")
    await asyncio.gather(*(ranks.tell_others(place, "all", ConfigError("no such key"), note) for place in both))
    assert [verdict.record().error for verdict in verdicts if verdict is not None] == ["ConfigError"] * 2
    assert {verdict.rank for verdict in verdicts if verdict is not None} == {0}


async def test_what_ends_a_load_that_cannot_be_opened_is_told_before_cleaning_up(server: TCPStore) -> None:
    """The leader's cleaning up waits for a rank that does not leave: here for as long as it is not told to."""
    leader, member = places(server, 2, "refused in order")
    told, may_leave = asyncio.Event(), asyncio.Event()

    async def leader_tells(verdict: LoaderError | None) -> None:
        assert verdict is not None
        told.set()

    async def member_tells(verdict: LoaderError | None) -> None:
        await may_leave.wait()

    error = ConfigError("no such key")
    leading = asyncio.ensure_future(ranks.tell_others(leader, "all", error, leader_tells))
    other = asyncio.ensure_future(ranks.tell_others(member, "all", error, member_tells))
    async with asyncio.timeout(20):
        await told.wait()
        assert not leading.done()
        may_leave.set()
        await asyncio.gather(leading, other)


async def test_an_error_in_place_of_a_report_is_the_cause_on_the_others(server: TCPStore) -> None:
    first, second = places(server, 2, "no report")
    settings = AgreementConfig(timeout_s=20.0)
    finals: list[LoaderError] = []
    error = ConfigError("no room for the manifest")
    outcomes = await asyncio.gather(
        gather(first, {"rank": 0}, settings, on_final=finals.append),
        fail_reports(second, error, settings, phase=Phase.FINISH, on_final=finals.append),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], RankFailure)
    assert outcomes[0].record() == FailureRecord("ConfigError", "no room for the manifest", 1, "finish")
    assert outcomes[1] is None
    assert [final.record() for final in finals] == [outcomes[0].record()] * 2


async def test_an_interruption_while_reports_are_gathered_is_the_cause_on_the_others(server: TCPStore) -> None:
    first, second = places(server, 2, "interrupted")
    settings = AgreementConfig(timeout_s=20.0)
    gathering = asyncio.ensure_future(gather(first, {"rank": 0}, settings))
    await asyncio.sleep(0)  # it takes part
    gathering.cancel("interrupted by SIGTERM")
    with pytest.raises(RankFailure, match="interrupted by SIGTERM") as caught:
        await gather(second, {"rank": 1}, settings)
    assert (caught.value.record().error, caught.value.rank) == ("LoadCancelledError", 0)
    with pytest.raises(asyncio.CancelledError):
        await gathering


async def test_an_error_is_told_to_its_end_by_a_rank_that_is_cancelled_meanwhile(server: TCPStore) -> None:
    first, second = places(server, 2, "cancelled")
    settings, error = AgreementConfig(timeout_s=20.0), MemoryError("no room for the manifest")
    begun: list[None] = []
    telling = asyncio.ensure_future(fail_reports(second, error, settings))
    await asyncio.sleep(0)  # it takes part
    for _ in range(3):
        telling.cancel("interrupted by SIGTERM")
        await asyncio.sleep(0)
    with pytest.raises(RankFailure) as caught:
        await gather(first, {"rank": 0}, settings, on_begin=lambda: begun.append(None))
    assert caught.value.record() == FailureRecord("MemoryError", "no room for the manifest", 1)
    assert begun == [None]
    with pytest.raises(asyncio.CancelledError):
        await telling


async def test_one_rank_alone_gathers_its_own_report_and_has_nobody_to_tell() -> None:
    alone, settings = Place(0, 1, None), AgreementConfig()
    assert await gather(alone, {"rank": 0}, settings) == [{"rank": 0}]
    await fail_reports(alone, ConfigError("no room"), settings)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
        ({"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, (3, 4)),
    ],
    ids=["nothing", "one", "four"],
)
def test_the_place_comes_from_the_launcher(environ: dict[str, str], expected: tuple[int, int]) -> None:
    place = place_from(environ)
    assert (place.rank, place.world_size) == expected
    assert place.alone == (place.world_size == 1)
