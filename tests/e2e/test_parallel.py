"""Tensor, expert and pipeline parallel loads: every rank's bytes equal slices of safetensors' own tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e import parallel
from tests.e2e.seats import Seat, all_of, make_seats, payload_bytes_read, values
from tests.support.checkpoints import Checkpoint, assert_same, sha256
from tests.support.ranks import Rank, run_ranks

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return parallel.write(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint) -> Tensors:
    """All tensors as safetensors itself reads them (in plan order), but F4, which it does not know everywhere."""
    read: Tensors = {}
    for file in sorted(set(checkpoint.shard_of.values())):
        with safe_open(checkpoint.folder / file, framework="pt") as shard:
            read.update({name: shard.get_tensor(name) for name in shard.keys() if name != "packed"})  # noqa: SIM118
    return {name: read[name] if name in read else checkpoint.tensor(name) for name in checkpoint.tensors}


def config_for(checkpoint: Checkpoint, **sections: object) -> ServiceConfig:
    return checkpoint.config({"rules": parallel.RULES}, mesh=parallel.MESH, **sections)


def parts_of(whole: Tensors, coords: Mapping[str, int]) -> Tensors:
    parts = {name: parallel.expected(name, tensor, coords["pp"], coords["tp"]) for name, tensor in whole.items()}
    return {name: part for name, part in parts.items() if part is not None}


def assert_parts(found: Tensors, wanted: Tensors) -> None:
    assert list(found) == list(wanted), "plan order, with empty parts and nothing else"
    for name, part in wanted.items():
        assert_same(found[name], part, name)


BUDGETS = [pytest.param(4096, id="4 KiB"), pytest.param("64KiB", id="64 KiB"), pytest.param("1GiB", id="1 GiB")]
RANKS = [pytest.param(coords, id=f"pp{coords['pp']}tp{coords['tp']}") for coords in parallel.COORDS]


@pytest.mark.parametrize("capacity", BUDGETS)
@pytest.mark.parametrize("coords", RANKS)
class TestEveryForm:
    """Each rank by itself, at its coordinates: the three forms give the same bytes through any budget."""

    async def test_owned(
        self, checkpoint: Checkpoint, whole: Tensors, coords: dict[str, int], capacity: object
    ) -> None:
        storage = FakeStorage(LocalStorage())
        config = config_for(checkpoint, staging={"capacity_bytes": capacity}, reads={"chunk_bytes": 300})
        async with ls.LoaderService(config, "solo", coords, storage=storage) as service:
            async with service.open("target") as load:
                found = {name: tensor async for name, tensor in load}
        assert_parts(found, parts_of(whole, coords))
        for tensor in found.values():
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert load.report.complete
        assert load.report.payload_bytes == sum(tensor.nbytes for tensor in found.values())
        assert load.report.read_bytes == payload_bytes_read(storage), "the report counts what the storage saw"

    async def test_batches(
        self, checkpoint: Checkpoint, whole: Tensors, coords: dict[str, int], capacity: object
    ) -> None:
        wanted = parts_of(whole, coords)
        found = {name: torch.zeros_like(part).contiguous() for name, part in wanted.items()}
        seen = dict.fromkeys(wanted, 0)
        config = config_for(checkpoint, staging={"capacity_bytes": capacity}, reads={"chunk_bytes": 300})
        async with ls.LoaderService(config, "solo", coords) as service, service.open("target") as load:
            async for batch in load.batches():
                with batch, torch.no_grad():
                    for piece in batch:
                        found[piece.name][piece.index].copy_(piece.tensor)
                        seen[piece.name] += piece.tensor.numel()
        assert_parts(found, wanted)
        assert seen == {name: part.numel() for name, part in wanted.items()}, "each element comes once"

    @pytest.mark.parametrize("memory", ["contiguous", "strided"])
    async def test_into(
        self, checkpoint: Checkpoint, whole: Tensors, coords: dict[str, int], capacity: object, memory: str
    ) -> None:
        wanted = parts_of(whole, coords)
        found = {name: torch.zeros_like(part).contiguous() for name, part in wanted.items()}
        if memory == "strided":
            found = {name: torch.zeros((*part.shape, 2), dtype=part.dtype)[..., 1] for name, part in wanted.items()}
        config = config_for(checkpoint, staging={"capacity_bytes": capacity}, reads={"chunk_bytes": 300})
        async with ls.LoaderService(config, "solo", coords) as service, service.open("target") as load:
            await load.into(found)
        assert_parts(found, wanted)


@pytest.mark.parametrize("gap", [0, "256KiB"])
async def test_specs_say_where_every_part_comes_from_and_ranks_together_take_all(
    checkpoint: Checkpoint, whole: Tensors, gap: object
) -> None:
    """`mine[destination] = full[source]` for all pairs rebuilds what was delivered; the sources cover everything."""
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in whole.items()}
    for coords in parallel.COORDS:
        config = config_for(checkpoint, reads={"coalesce_gap_bytes": gap})
        async with ls.LoaderService(config, "solo", coords) as service, service.open("target") as load:
            async for name, tensor in load:
                spec = load.spec(name)
                assert spec.full_shape == tuple(whole[name].shape)
                assert spec.dtype == tensor.dtype
                rebuilt = torch.zeros_like(tensor)
                for source, destination in spec.parts:
                    rebuilt[destination] = whole[name][source]
                    covered[name][source] += 1
                assert_same(rebuilt, tensor, name)
                assert len(spec.parts) == 1 or any(kind in name for kind in ("qkv", "gate_up"))
            with pytest.raises(KeyError):
                load.spec("nowhere")
    for name, count in covered.items():
        assert bool((count >= 1).all()), f"{name}: a part of it is on no rank"
    disjoint = [name for name in covered if name.endswith((".o", ".stacked", ".middle", "gate_up", "gate_up_t"))]
    for name in [*disjoint, "table", "thin", "grid", "lm_head.weight"]:
        assert bool((count := covered[name]).eq(1).all()), f"{name}: {count}"


async def test_four_ranks_get_their_parts_together(checkpoint: Checkpoint, whole: Tensors) -> None:
    """Row-major places in the mesh, agreed among four ranks; each reads little more than it takes."""
    config = config_for(checkpoint, staging={"capacity_bytes": "16KiB"})

    async def work(seat: Seat) -> tuple[Tensors, ls.LoadReport]:
        async with seat.service(config) as service, service.open("target") as load:
            found = {name: tensor async for name, tensor in load}
        return found, load.report

    seats = make_seats(4)
    ranks = values(await all_of(seats, work))
    for seat, (found, report) in zip(seats, ranks, strict=True):
        assert_parts(found, parts_of(whole, parallel.COORDS[seat.rank]))
        assert (report.rank, report.world_size, report.complete) == (seat.rank, 4, True)
    assert len({report.plan_digest for _, report in ranks}) == 1


async def test_coords_override_the_order_of_ranks(checkpoint: Checkpoint, whole: Tensors) -> None:
    """Ranks in another order than the mesh's; two on one place get the same."""
    places = [parallel.COORDS[place] for place in (3, 1, 1, 0, 2)]

    async def work(seat: Seat) -> Tensors:
        async with seat.service(config_for(checkpoint), places[seat.rank]) as service, service.open("target") as load:
            return {name: tensor async for name, tensor in load}

    for place, found in zip(places, values(await all_of(make_seats(5), work)), strict=True):
        assert_parts(found, parts_of(whole, place))


async def test_a_local_plan_is_what_the_load_does(checkpoint: Checkpoint) -> None:
    """`plan` needs no other rank, covers every rank, and is the plan that the ranks agree on."""

    async def work(seat: Seat) -> tuple[str, list[int], int]:
        async with seat.service(config_for(checkpoint)) as service:
            plan = await service.plan("target")
            async with service.open("target") as load:
                assert load.plan is plan
                async for _ in load:
                    pass
            sizes = [plan.for_rank(rank).payload_bytes for rank in range(4)]
            assert sizes[seat.rank] == load.report.payload_bytes
            return plan.digest, sizes, plan.for_rank(seat.rank).read_bytes - load.report.read_bytes

    results = values(await all_of(make_seats(4), work))
    assert len({(digest, tuple(sizes)) for digest, sizes, _ in results}) == 1


async def test_a_rank_with_coords_plans_its_own_part_before_it_meets_the_others(checkpoint: Checkpoint) -> None:
    async def work(seat: Seat) -> tuple[int, int]:
        async with seat.service(config_for(checkpoint), parallel.COORDS[3 - seat.rank]) as service:
            plan = await service.plan("target")
            planned = plan.for_rank(seat.rank).payload_bytes
            with pytest.raises(ls.ConfigError, match="not known"):
                plan.for_rank((seat.rank + 1) % 4)
            async with service.open("target") as load:
                async for _ in load:
                    pass
            return planned, load.report.payload_bytes

    for planned, loaded in values(await all_of(make_seats(4), work)):
        assert planned == loaded


def load_with_processes(rank: Rank, folder: str) -> tuple[dict[str, str], bool]:
    """What a rank process got, as hashes. The group is torch.distributed's default one."""
    rank.init_process_group()

    async def main() -> tuple[dict[str, str], bool]:
        config = Checkpoint(Path(folder), {}, {}).config({"rules": parallel.RULES}, mesh=parallel.MESH)
        async with ls.LoaderService(config) as service, service.open("target") as load:
            found = {name: sha256(tensor) async for name, tensor in load}
        return found, load.report.complete

    return asyncio.run(main())


@pytest.mark.processes
def test_four_processes_get_their_parts(checkpoint: Checkpoint, whole: Tensors) -> None:
    outcomes = run_ranks(load_with_processes, 4, str(checkpoint.folder))
    for outcome in outcomes:
        wanted = parts_of(whole, parallel.COORDS[outcome.rank])
        assert outcome.get() == ({name: sha256(part) for name, part in wanted.items()}, True)
