"""What stops a load of ranks that share reads before they read, and what only stops the sharing: alike on all ranks."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest

import loader_service as ls
from loader_service.memory.admission import Room
from loader_service.sizes import format_size
from tests.e2e import forty
from tests.e2e.doors import Left, check_failed, check_logs, use
from tests.e2e.forty import LAST
from tests.e2e.seats import Seat, all_of, make_seats, payload_bytes_read, payload_reads, values
from tests.sharing.failing import FIRST, SLOT_BYTES, SLOTS, WAYS, all_at_once, config_of, load_all, write
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.usefixtures("no_leaked_tasks", "nothing_is_left", "nothing_is_left_of_all")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("failures"))


def wanted_once(seats: Sequence[Seat], reports: Sequence[ls.LoadReport], way: str, nbytes: int) -> None:
    """Each rank got `nbytes`, and the node read them once, or each rank from what was read ahead once."""
    for report in reports:
        assert report.complete
        assert report.payload_bytes == nbytes
        assert report.policies["sharing"].effective == way, report.policies["sharing"]
    read_bytes = sum(payload_bytes_read(seat.storage) for seat in seats)
    assert sum(report.striped_bytes for report in reports) == nbytes
    assert read_bytes == (nbytes if way == "staging" else nbytes * len(seats))


@pytest.mark.parametrize("way", WAYS)
async def test_headers_that_fail_once_are_read_again_by_all_and_the_load_is_shared(
    checkpoint: Checkpoint, way: str
) -> None:
    async def check(who: set[int]) -> None:
        seats = make_seats(3)
        for rank in who:
            seats[rank].storage.fail(f"*{LAST}", errno.ETIMEDOUT)
        config = config_of(checkpoint, way)
        work = partial(load_all, config=config, names=list(checkpoint.tensors), checkpoint=checkpoint)
        reports = values(await all_of(seats, work))
        wanted_once(seats, reports, way, checkpoint.payload_bytes)
        for report in reports:
            assert [line for line in report.fallbacks if "headers" in line], "and every rank says so"

    await all_at_once([{0}, {1, 2}, {0, 1, 2}], check)


@pytest.mark.parametrize("way", WAYS)
async def test_a_header_that_one_rank_cannot_read_fails_all_before_anything_is_shared(
    checkpoint: Checkpoint, way: str
) -> None:
    async def check(case: tuple[int, int]) -> None:
        who, code = case
        seats = make_seats(3)
        seats[who].storage.fail(f"*{LAST}", code, times=None)

        async def work(seat: Seat) -> Left:
            async with seat.service(config_of(checkpoint, way)) as service:
                found = await use(service, checkpoint)
                assert not payload_reads(seat.storage)
                seat.storage.clear()
                assert (await use(service, checkpoint)).complete
                return found

        results = values(await all_of(seats, work))
        kind = "CheckpointError" if code == errno.ENOENT else "ReadError"
        verdict = results[who].verdict
        assert verdict is not None
        assert (verdict.error, verdict.phase, verdict.path) == (kind, "catalog", str(checkpoint.folder / LAST))
        check_failed(results, who, None, verdict)

    await all_at_once([(0, errno.EACCES), (2, errno.EIO), (1, errno.ENOENT)], check)


SOME = [f"s2.w{number:02}" for number in (*range(2, 12), *range(15, 20))]


@pytest.mark.parametrize("way", WAYS)
async def test_of_a_draft_its_own_ranges_are_read_once_and_no_others(checkpoint: Checkpoint, way: str) -> None:
    seats = make_seats(3)
    config = config_of(checkpoint, way, {"key_prefixes": SOME})
    reports = values(await all_of(seats, partial(load_all, config=config, names=SOME, checkpoint=checkpoint)))
    nbytes = sum(len(checkpoint.tensors[name][2]) for name in SOME)
    wanted_once(seats, reports, way, nbytes)
    for seat, report in zip(seats, reports, strict=True):
        assert set(report.files_read) <= {LAST}
        assert not payload_reads(seat.storage, f"*{FIRST}")
    ahead = [piece for seat in seats for piece in seat.storage.read_aheads]
    assert {Path(path).name for path, _, _ in ahead} == ({LAST} if way == "page_cache" else set())
    assert sum(piece_bytes for _, _, piece_bytes in ahead) == (nbytes if way == "page_cache" else 0)


@pytest.mark.parametrize("way", WAYS)
async def test_prefixes_without_a_match(checkpoint: Checkpoint, way: str) -> None:
    async def check(case: tuple[list[str], str]) -> None:
        prefixes, on_no_match = case
        seats = make_seats(3)
        config = config_of(checkpoint, way, {"key_prefixes": prefixes, "on_no_match": on_no_match})
        if len(prefixes) == 1 and on_no_match == "read_all":
            work = partial(load_all, config=config, names=list(checkpoint.tensors), checkpoint=checkpoint)
            reports = values(await all_of(seats, work))
            wanted_once(seats, reports, way, checkpoint.payload_bytes)
            assert all(any("key_prefixes" in line for line in report.fallbacks) for report in reports)
            return

        async def fail(seat: Seat) -> Left:
            async with seat.service(config) as service:
                return await use(service, checkpoint)

        results = values(await all_of(seats, fail))
        check_logs([result.log for result in results])
        for seat, result in zip(seats, results, strict=True):
            assert isinstance(result.error, ls.CheckpointError)
            assert (result.error.phase, result.error.exit_code) == ("plan", 3)
            assert "mtp.7" in str(result.error)
            assert result.verdict == results[0].verdict
            assert not payload_reads(seat.storage)

    await all_at_once(list(product((["mtp.7"], ["s2", "mtp.7"]), ("error", "read_all"))), check)


DIFFERENT: list[tuple[str, dict[str, object], dict[str, dict[str, object]]]] = [
    ("key_prefixes", {"key_prefixes": ["s2"]}, {}),
    ("on_no_match", {"key_prefixes": ["s1"], "on_no_match": "read_all"}, {}),
    ("cache.on", {"key_prefixes": ["s1"]}, {"cache": {"capacity_bytes": "1MiB"}}),
    ("reads.sharing", {"key_prefixes": ["s1"]}, {"reads": {"sharing": "none"}}),
]


@pytest.mark.parametrize("way", WAYS)
async def test_ranks_whose_prefixes_cache_or_sharing_differ_stop_before_they_look_at_a_file(
    checkpoint: Checkpoint, way: str
) -> None:
    async def check(case: tuple[str, dict[str, object], dict[str, dict[str, object]]]) -> None:
        key, load, sections = case
        seats = make_seats(3)
        configs = [config_of(checkpoint, way, {"key_prefixes": ["s1"]})] * 2
        configs.append(config_of(checkpoint, way, load, **sections))

        async def work(seat: Seat) -> Left:
            async with seat.service(configs[seat.rank]) as service:
                return await use(service, checkpoint)

        results = values(await all_of(seats, work))
        check_logs([result.log for result in results])
        for seat, result in zip(seats, results, strict=True):
            assert isinstance(result.error, ls.AgreementError)
            assert "ranks 0 and 2 differ in config" in str(result.error)
            assert key in str(result.error)
            assert result.verdict == results[0].verdict
            assert not seat.storage.reads

    await all_at_once(DIFFERENT, check)


# What a node cannot do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_ranks_of_one_node_that_see_different_files_read_each_for_itself(
    checkpoint: Checkpoint, tmp_path: Path, way: str
) -> None:
    copies = [checkpoint, *(replace(checkpoint, folder=tmp_path / str(rank)) for rank in (1, 2))]
    for copy in copies[1:]:
        await asyncio.to_thread(shutil.copytree, checkpoint.folder, copy.folder)
    seats = make_seats(3)

    async def work(seat: Seat) -> ls.LoadReport:
        own = copies[seat.rank]
        return await load_all(seat, config_of(own, way), list(own.tensors), own)

    for seat, report in zip(seats, values(await all_of(seats, work)), strict=True):
        policy = report.policies["sharing"]
        assert (policy.requested, policy.effective) == (way, "none")
        assert policy.reason == "ranks 0 and 1 of one node see different files (device, inode, size or time)"
        assert any(line.startswith(f"sharing: none instead of {way}: ") for line in report.fallbacks)
        assert payload_bytes_read(seat.storage) == checkpoint.payload_bytes


LITTLE_BYTES = (1 << 20) + SLOTS * SLOT_BYTES  # some slots, beside the reserve


@pytest.mark.parametrize("way", WAYS)
async def test_a_rank_without_the_memory_makes_all_read_for_themselves(checkpoint: Checkpoint, way: str) -> None:
    seats = make_seats(3)

    async def work(seat: Seat) -> ls.LoadReport:
        async with seat.service(config_of(checkpoint, way, memory={"reserve_bytes": "1MiB"})) as service:
            free_bytes = LITTLE_BYTES if seat.rank == 1 else 64 << 20
            rooms = (Room("", 1 << 30, free_bytes),)
            assert service._engine is not None
            service._engine.memory_rooms = lambda: rooms
            return await forty.consume(service, checkpoint)

    for report in values(await all_of(seats, work)):
        policy = report.policies["sharing"]
        assert (policy.requested, policy.effective) == (way, "none")
        assert "3 ranks (lowest: 0) want" in policy.reason
        assert f"the machine has {format_size(LITTLE_BYTES)} free" in policy.reason
        assert any(policy.reason in line for line in report.fallbacks)
