"""Workers beside a resident service: every form gets every byte, and nothing is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import loader_service as ls
from loader_service.memory.pinning import FakePinner
from tests.e2e import parallel
from tests.e2e.seats import Seat, all_of, errors, make_seats, values
from tests.e2e.test_sharing import FORMS, check, take
from tests.keeping.making import config_of, storage, worker
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint
from tests.tables import making as tables


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return parallel.write(tmp_path_factory.mktemp("cut"))


@pytest.fixture
def own(tmp_path: Any) -> Checkpoint:
    """One that a test may change."""
    return awkward_checkpoint(tmp_path / "checkpoint", columns=70)


def whole(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


async def test_every_rank_gets_its_parts_and_reads_nothing(cut: Checkpoint) -> None:
    """Rows, columns, sections, experts and stages of two by two ranks, in every form, one after the other."""
    wanted = []
    for coords in parallel.COORDS:
        every = {
            name: parallel.expected(name, tensor, coords["pp"], coords["tp"]) for name, tensor in whole(cut).items()
        }
        wanted.append({name: part for name, part in every.items() if part is not None})
    config = config_of(cut, {"rules": parallel.RULES}, serve={"keep": ["target"]}, mesh=parallel.MESH)
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()

        async def work(seat: Seat) -> list[ls.LoadReport]:
            reports = []
            async with worker(seat, config) as attached:
                for form in FORMS:
                    async with attached.open("target") as load:
                        check(await take(load, form, wanted[seat.rank]), wanted[seat.rank])
                    reports.append(load.report)
            return reports

        seats = make_seats(4)
        for seat, reports in zip(seats, values(await all_of(seats, work)), strict=True):
            assert [report.read_bytes for report in reports] == [0, 0, 0]
            assert {report.policies["service"].effective for report in reports} == {"kept"}
            assert (seat.storage.opens(), seat.storage.reads) == (0, [])


async def test_a_worker_writes_to_memory_of_its_own(large: Checkpoint) -> None:
    config = config_of(large, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.LoaderService(config, "solo", attach=True) as attached:
            for _ in range(2):
                async with attached.open("target") as load:
                    found = {name: tensor async for name, tensor in load}
                check(found, whole(large))
                for tensor in found.values():
                    tensor.zero_()
    check({name: torch.zeros_like(tensor) for name, tensor in whole(large).items()}, found)  # outlives the service


async def test_a_draft_that_lies_in_a_kept_target_needs_no_memory_of_its_own(large: Checkpoint) -> None:
    draft = {"key_prefixes": ["layers.3", "big"]}
    config = config_of(large, draft=draft, serve={"keep": ["target", "draft"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        first, second = service.status().loads
        assert first.kept_bytes >= large.payload_bytes
        assert (second.kept_bytes, second.read_bytes) == (0, 0)
        disk = storage()
        async with ls.LoaderService(config, "solo", storage=disk, attach=True) as attached:
            async with attached.open("draft") as load:
                found = {name: tensor async for name, tensor in load}
        assert disk.reads == []
    check(found, {name: large.tensor(name) for name in ("layers.3.norm.weight", "big.weight")})


@pytest.mark.parametrize("layout", tables.LAYOUTS)
async def test_host_tables_are_there_at_once(tmp_path: Any, layout: str) -> None:
    checkpoint = tables.write(tmp_path)
    config = config_of(checkpoint, tables.rules(layout), serve={"keep": ["target"]}, mesh={"tp": 2})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()

        async def work(seat: Seat) -> tuple[dict[str, ls.HostTable], dict[str, torch.Tensor]]:
            async with worker(seat, config) as attached:
                found = {name: await attached.host_table("target", name) for name in tables.TABLES}
                rows = {}
                async with attached.open("target") as load:
                    for name, source in load.tables.items():
                        rows[name] = torch.empty(
                            (source.rows[1] - source.rows[0], *source.shape[1:]), dtype=source.dtype
                        )
                        await source.aread_rows_into(rows[name], source.rows[0])
                return found, rows

        seats = make_seats(2)
        held = values(await all_of(seats, work))
    for seat, (found, rows) in zip(seats, held, strict=True):
        assert seat.storage.reads == []
        for name, table in found.items():
            cuts = tables.shares("equal", 2)[seat.rank] if name != tables.EMPTY else (0, 0)
            tables.assert_table(table, checkpoint, name, cuts, layout)
            tables.assert_rows(rows[name], checkpoint, name, cuts)
    if layout == "shared":  # the same memory, without a copy
        assert held[0][0][tables.WEIGHT].access.effective == "kept"
        held[0][0][tables.WEIGHT].tensor.view(torch.uint8)[3, 4] ^= 255
        first, second = (found[tables.WEIGHT].tensor.view(torch.uint8) for found, _ in held)
        assert torch.equal(first, second)


async def test_a_shared_table_that_a_worker_has_written_to_is_read_anew(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tables.write(tmp_path)
    config = config_of(checkpoint, tables.rules("shared"), serve={"keep": ["target"]}, mesh={"tp": 1})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        async with ls.LoaderService(config, "solo", attach=True) as attached:
            table = await attached.host_table("target", tables.WEIGHT)
            table.tensor.view(torch.uint8)[7, 0] ^= 1
        async with ls.LoaderService(config, "solo", attach=True) as attached:
            table = await attached.host_table("target", tables.WEIGHT)
    tables.assert_table(table, checkpoint, tables.WEIGHT, (0, tables.ROWS), "shared")
    assert table.access.effective != "kept"
    assert "were changed in memory that workers share" in caplog.text


@pytest.mark.parametrize("how", ["touched", "replaced"])
async def test_a_file_that_has_changed_since_is_read_anew(
    own: Checkpoint, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(own, serve={"keep": ["target"]})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        path = own.folder / "model-00002-of-00002.safetensors"
        if how == "replaced":
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[:-64] + bytes(64))
        os.utime(path, ns=(10**18, 10**18))
        disk = storage()
        async with ls.LoaderService(config, "solo", storage=disk, attach=True) as attached:
            async with attached.open("target") as load:
                found = {name: tensor async for name, tensor in load}
    outcome = load.report.policies["service"]
    assert outcome.effective == "partly kept"
    assert outcome.reason.endswith(f"; {path} changed since it was read: start the service again")
    assert outcome.reason.rpartition("; ")[2] in caplog.text
    assert load.report.files_read == (path.name,)
    assert {read.path for read in disk.reads} == {str(path)}
    wanted = whole(own)
    if how == "replaced":
        wanted["experts"].flatten()[-32:] = 0
    check(found, wanted)


@pytest.mark.parametrize("if_absent", ["read", "error"])
async def test_where_no_service_is_the_configuration_decides(large: Checkpoint, if_absent: str) -> None:
    config = config_of(large, serve={"keep": ["target"], "if_absent": if_absent})

    async def work(seat: Seat) -> ls.LoadReport:
        async with worker(seat, config) as attached:
            async with attached.open("target") as load:
                check(await take(load, "owned", whole(large)), whole(large))
            return load.report

    results = await all_of(make_seats(2), work)
    if if_absent == "read":
        for report in values(results):
            outcome = report.policies["service"]
            assert (outcome.requested, outcome.effective) == ("read", "read")
            assert "start `loader-service serve`" in outcome.reason
        return
    for error in errors(results):
        assert isinstance(error, ls.AttachError | ls.RankFailure)
        assert error.record().error == "AttachError"
        assert config.serve.socket in str(error)
        assert error.exit_code in (4, 5)


@pytest.mark.parametrize("if_absent", ["read", "error"])
async def test_a_service_that_ends_under_its_workers(large: Checkpoint, if_absent: str) -> None:
    """A load that is open goes on to its end; the next one reads, or fails; a new service is found again."""
    config = config_of(large, serve={"keep": ["target"], "if_absent": if_absent})
    disk = storage()
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(ls.ResidentService(config, "solo"))
        await service.fill()
        attached = await stack.enter_async_context(ls.LoaderService(config, "solo", storage=disk, attach=True))
        async with attached.open("target") as load:
            found: dict[str, torch.Tensor] = {}
            async for name, tensor in load:
                if not found:
                    await service.__aexit__(None, None, None)
                found[name] = tensor
        check(found, whole(large))
        assert disk.reads == []

        if if_absent == "error":
            with pytest.raises(ls.AttachError, match="no resident service answers"):
                async with attached.open("target"):
                    pass
        else:
            async with attached.open("target") as load:
                check({name: tensor async for name, tensor in load}, whole(large))
            assert load.report.read_bytes >= large.payload_bytes

        again = await stack.enter_async_context(ls.ResidentService(config, "solo"))
        await again.fill()
        before = len(disk.reads)
        async with attached.open("target") as load:
            check({name: tensor async for name, tensor in load}, whole(large))
        assert load.report.policies["service"].effective == "kept"
        assert len(disk.reads) == before


async def test_one_rank_has_a_service_and_the_other_none(tmp_path: Any) -> None:
    """Tables are then filled by both, from memory and from the file."""
    checkpoint = tables.write(tmp_path)
    config = config_of(checkpoint, tables.rules("shared"), serve={"keep": ["target"]}, mesh={"tp": 2})
    elsewhere = config_of(checkpoint, tables.rules("shared"), serve={}, mesh={"tp": 2})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()

        async def work(seat: Seat) -> ls.HostTable:
            async with worker(seat, config if seat.rank == 0 else elsewhere) as attached:
                async with attached.open("target") as load:
                    async for name, tensor in load:
                        if isinstance(tensor, torch.Tensor):
                            assert_same(tensor, checkpoint.tensor(name), name)
                return await attached.host_table("target", tables.DEEP)

        seats = make_seats(2)
        for seat, table in zip(seats, values(await all_of(seats, work)), strict=True):
            tables.assert_table(table, checkpoint, tables.DEEP, tables.shares("equal", 2)[seat.rank], "shared")
        assert seats[0].storage.reads == []
        assert seats[1].storage.reads != []


async def test_pinned_tables_are_pinned_where_they_are_kept(tmp_path: Any) -> None:
    checkpoint = tables.write(tmp_path)
    config = config_of(checkpoint, tables.rules("shared"), serve={"keep": ["target"]}, mesh={"tp": 1})
    async with ls.ResidentService(config, "solo") as service:
        await service.fill()
        pinner = FakePinner()
        disk = storage()
        async with ls.LoaderService(config, "solo", storage=disk, pinner=pinner, attach=True) as attached:
            table = await attached.host_table("target", tables.WEIGHT)
        assert (table.pinned, table.access.effective, disk.reads) == (True, "kept", [])


def test_the_blocking_face_attaches_too(large: Checkpoint) -> None:
    config: Mapping[str, Any] = {"config": config_of(large, serve={"keep": [], "warm": ["target"]})}
    with ls.attach_blocking(**config) as attached, attached.open("target") as load:
        check(dict(load), whole(large))
    assert load.report.policies["service"].effective == "read"
