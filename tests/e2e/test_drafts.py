"""Draft loads: exactly the draft's byte ranges, whatever the index says, seen at the reading protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch

import loader_service as ls
from loader_service.config.schema import ServiceConfig
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.e2e.seats import Seat, all_of, errors, header_reads, make_seats, payload_bytes_read, payload_reads, values
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint
from tests.support.shards import write_index

Form = Literal["owned", "batches", "into"]
FORMS: tuple[Form, ...] = ("owned", "batches", "into")

STAGES = ["mtp.0.", "mtp.1."]
HOLDERS = {"model-00002-of-00005.safetensors", "model-00003-of-00005.safetensors"}
NOT_IN_INDEX = "mtp.1.norm.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Five shards: two hold stages 0 and 1 among other tensors, one only stage 2, one names that merely look alike."""
    folder = tmp_path_factory.mktemp("target")
    made = write_checkpoint(
        folder,
        {
            "model-00001-of-00005.safetensors": {
                "model.embed.weight": ("BF16", (300, 64)),
                "model.layers.0.w": ("BF16", (64, 64)),
            },
            "model-00002-of-00005.safetensors": {
                "model.layers.1.w": ("BF16", (128, 64)),
                "mtp.0.attn.weight": ("BF16", (100, 64)),
                "model.layers.1.norm": ("F32", (3,)),
                "mtp.0.attn.scale": ("F32", (100,)),
                "model.layers.1.big": ("F32", (300, 64)),
                "mtp.0.head": ("F8_E4M3", (77, 31)),
            },
            "model-00003-of-00005.safetensors": {
                "mtp.1.attn.weight": ("BF16", (100, 64)),
                "model.layers.2.w": ("BF16", (128, 64)),
                NOT_IN_INDEX: ("F32", (64,)),
                "model.norm": ("F32", (64,)),
            },
            "model-00004-of-00005.safetensors": {"mtp.2.attn.weight": ("BF16", (100, 64)), "mtp.2.e": ("F32", (0,))},
            "model-00005-of-00005.safetensors": {
                "mtp.10.w": ("BF16", (64, 64)),
                "mtp.1x.w": ("BF16", (8, 8)),
                "xmtp.0.w": ("BF16", (8, 8)),
                "mtp": ("BF16", (8, 8)),
            },
        },
    )
    write_index(folder, {name: shard for name, shard in made.shard_of.items() if name != NOT_IN_INDEX})
    return made


def names_under(checkpoint: Checkpoint, *prefixes: str) -> list[str]:
    return [name for name in checkpoint.tensors if name.startswith(prefixes)]


def two_loads(checkpoint: Checkpoint, draft: Mapping[str, object] | None = None) -> ServiceConfig:
    return ls.config_from_dict(
        {
            "checkpoint": {"path": str(checkpoint.folder)},
            "loads": {"target": {"skip": ["mtp.*"]}, "draft": {"key_prefixes": STAGES, **(draft or {})}},
            "reads": {"access": "buffered"},  # one handle and one read, also of what is not in the page cache any more
            "staging": {"capacity_bytes": "32KiB"},
        }
    )


async def take(
    service: ls.LoaderService, load_name: str, form: Form, checkpoint: Checkpoint, wanted: list[str]
) -> tuple[dict[str, torch.Tensor], ls.LoadReport]:
    """A load in one of its forms, as (tensors by name, report). `wanted`: the names, which only `into` has to know."""
    taken: dict[str, torch.Tensor] = {}
    async with service.open(load_name) as load:
        if form == "owned":
            taken = {name: tensor async for name, tensor in load}
        elif form == "batches":
            async for batch in load.batches():
                with batch, torch.no_grad():
                    for piece in batch:
                        whole = taken.setdefault(piece.name, torch.empty_like(checkpoint.tensor(piece.name)))
                        whole[piece.index].copy_(piece.tensor)
        else:
            taken = {name: torch.empty_like(checkpoint.tensor(name)) for name in wanted}
            await load.into(taken)
    return taken, load.report


def assert_complete(taken: Mapping[str, torch.Tensor], checkpoint: Checkpoint, wanted: list[str]) -> None:
    assert list(taken) == wanted, "these names and no other, in plan order"
    for name in wanted:
        assert_same(taken[name], checkpoint.tensor(name), name)


def assert_reads(storage: FakeStorage, report: ls.LoadReport, checkpoint: Checkpoint, files: set[str]) -> None:
    """Payload of exactly these files was read, at most 5 % more than was handed over, and no file opened twice."""
    assert {Path(read.path).name for read in payload_reads(storage)} == files == set(report.files_read)
    assert payload_bytes_read(storage) == report.read_bytes
    assert report.payload_bytes <= report.read_bytes <= 1.05 * report.payload_bytes
    for shard in set(checkpoint.shard_of.values()):
        assert storage.opens(f"*{shard}") == 1, (
            "opened for its header, and the holders' payload through the same handle"
        )
        assert header_reads(storage, str(checkpoint.folder / shard)) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", ["advisory", "ignore"])
async def test_only_the_draft_is_read_and_handed_over(checkpoint: Checkpoint, form: Form, index: str) -> None:
    storage = FakeStorage(LocalStorage())
    config = two_loads(checkpoint, {"checkpoint": {"path": str(checkpoint.folder), "index": index}})
    wanted = names_under(checkpoint, "mtp.0.", "mtp.1.")
    assert NOT_IN_INDEX in wanted
    assert len(wanted) == 5
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        taken, report = await take(service, "draft", form, checkpoint, wanted)
    assert_complete(taken, checkpoint, wanted)
    assert_reads(storage, report, checkpoint, HOLDERS)
    assert report.payload_bytes == sum(tensor.nbytes for tensor in taken.values())


@pytest.mark.parametrize(
    ("prefixes", "stages", "files"),
    [
        pytest.param(["mtp.0"], ["mtp.0."], {"model-00002-of-00005.safetensors"}, id="one stage, without its dot"),
        pytest.param(["mtp.1"], ["mtp.1."], {"model-00003-of-00005.safetensors"}, id="1 is neither 10 nor 1x"),
        pytest.param(
            ["mtp.2."], ["mtp.2."], {"model-00004-of-00005.safetensors"}, id="the stage in a shard of its own"
        ),
        pytest.param(["mtp.1.", "mtp.0"], ["mtp.0.", "mtp.1."], HOLDERS, id="the order of prefixes does not matter"),
    ],
)
async def test_each_stage_is_read_from_its_holders(
    checkpoint: Checkpoint, prefixes: list[str], stages: list[str], files: set[str]
) -> None:
    storage = FakeStorage(LocalStorage())
    wanted = names_under(checkpoint, *stages)
    async with ls.LoaderService(two_loads(checkpoint, {"key_prefixes": prefixes}), "solo", storage=storage) as service:
        taken, report = await take(service, "draft", "owned", checkpoint, wanted)
    assert_complete(taken, checkpoint, wanted)
    assert_reads(storage, report, checkpoint, files)


async def test_a_load_without_prefixes_reads_everything(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        taken, report = await take(service, "target", "owned", checkpoint, [])
    assert_complete(taken, checkpoint, list(checkpoint.tensors))
    assert_reads(storage, report, checkpoint, set(checkpoint.shard_of.values()))


@pytest.mark.parametrize("form", ["owned", "batches"])
async def test_target_then_draft_in_one_service_read_headers_once(checkpoint: Checkpoint, form: Form) -> None:
    storage = FakeStorage(LocalStorage())
    draft, target = names_under(checkpoint, "mtp.0.", "mtp.1."), names_under(checkpoint, "model.", "xmtp.", "mtp")
    target = [name for name in target if not name.startswith("mtp.")]
    async with ls.LoaderService(two_loads(checkpoint), "solo", storage=storage) as service:
        assert_complete((await take(service, "target", form, checkpoint, []))[0], checkpoint, target)
        before = payload_bytes_read(storage)
        taken, report = await take(service, "draft", form, checkpoint, draft)
    assert_complete(taken, checkpoint, draft)
    assert payload_bytes_read(storage) - before == report.read_bytes <= 1.05 * report.payload_bytes
    assert set(report.files_read) == HOLDERS
    for shard in set(checkpoint.shard_of.values()):
        assert header_reads(storage, str(checkpoint.folder / shard)) == 1
        assert storage.opens(f"*{shard}") == 1


async def test_ranks_load_target_and_draft_in_one_service_and_in_separate_ones(checkpoint: Checkpoint) -> None:
    """Two ranks, both ways in, get the same draft tensors from the same files."""
    draft = names_under(checkpoint, "mtp.0.", "mtp.1.")

    async def work(seat: Seat) -> list[set[str]]:
        files = []
        async with seat.service(two_loads(checkpoint)) as service:
            await take(service, "target", "owned", checkpoint, [])
            taken, report = await take(service, "draft", "owned", checkpoint, draft)
            assert_complete(taken, checkpoint, draft)
            files.append(set(report.files_read))
        async with seat.service(two_loads(checkpoint)) as service:
            taken, report = await take(service, "draft", "owned", checkpoint, draft)
            assert_complete(taken, checkpoint, draft)
            files.append(set(report.files_read))
        return files

    assert values(await all_of(make_seats(2), work)) == [[HOLDERS, HOLDERS]] * 2


async def test_a_draft_may_lie_in_another_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Target and draft have a shard of the same name; each load reads its own."""
    other = write_checkpoint(
        tmp_path / "draft",
        {
            "model-00001-of-00005.safetensors": {"mtp.0.w": ("F32", (50, 7)), "mtp.3.w": ("F32", (9,))},
            "model.safetensors": {"mtp.1.w": ("BF16", (11,))},
        },
    )
    storage = FakeStorage(LocalStorage())
    config = two_loads(checkpoint, {"checkpoint": {"path": str(other.folder)}})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        taken, report = await take(service, "draft", "owned", other, [])
        assert_complete(taken, other, ["mtp.0.w", "mtp.1.w"])
        assert {Path(read.path).parent for read in storage.reads} == {other.folder}, "the target was not touched"
        assert payload_bytes_read(storage) == report.read_bytes
        taken, _ = await take(service, "target", "owned", checkpoint, [])
        assert "model.embed.weight" in taken
        assert_same(taken["model.embed.weight"], checkpoint.tensor("model.embed.weight"))
        assert (await service.plan("draft")).catalog is not (await service.plan("target")).catalog


@pytest.mark.parametrize("on_no_match", ["error", "read_all"])
async def test_one_of_several_prefixes_without_a_key_ends_the_load_everywhere(
    checkpoint: Checkpoint, on_no_match: str
) -> None:
    seats = make_seats(2)
    config = two_loads(checkpoint, {"key_prefixes": ["mtp.0.", "mtp.7"], "on_no_match": on_no_match})

    async def work(seat: Seat) -> None:
        async with seat.service(config) as service, service.open("draft"):
            pass

    for seat, error in zip(seats, errors(await all_of(seats, work)), strict=True):
        assert isinstance(error, ls.CheckpointError)
        assert error.exit_code == 3
        assert error.phase == "plan"
        assert "mtp.7" in str(error)
        assert "'mtp.0' (3)" in str(error), "the namespaces that are there"
        assert not payload_reads(seat.storage)


async def test_no_prefix_with_a_key_is_an_error_by_default(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    config = two_loads(checkpoint, {"key_prefixes": ["draft.0", "mtp.1x.w.x"]})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        with pytest.raises(ls.CheckpointError, match=r"draft\.0"):
            async with service.open("draft"):
                pass
    assert not payload_reads(storage)


@pytest.mark.parametrize("form", ["owned", "batches"])
async def test_no_prefix_with_a_key_may_read_all_and_says_so(checkpoint: Checkpoint, form: Form) -> None:
    storage = FakeStorage(LocalStorage())
    config = two_loads(checkpoint, {"key_prefixes": ["draft.0", "draft.1"], "on_no_match": "read_all"})
    async with ls.LoaderService(config, "solo", storage=storage) as service:
        taken, report = await take(service, "draft", form, checkpoint, [])
    assert_complete(taken, checkpoint, list(checkpoint.tensors))
    assert any("key_prefixes" in fallback for fallback in report.fallbacks)
    assert any("draft.0" in warning for warning in report.warnings)


async def test_a_prefix_may_be_a_whole_name(checkpoint: Checkpoint) -> None:
    config = two_loads(checkpoint, {"key_prefixes": ["model.norm", "mtp.0.head"]})
    async with ls.LoaderService(config, "solo") as service:
        taken, _ = await take(service, "draft", "owned", checkpoint, [])
    assert_complete(taken, checkpoint, ["mtp.0.head", "model.norm"])


async def test_draft_rules_split_the_draft_over_ranks(checkpoint: Checkpoint) -> None:
    """Prefixes and rules together: each of two ranks reads its half of the draft and nothing else."""
    rules = [{"match": "*.weight", "split": {"axis": "tp", "dim": 0}}]
    config = ls.config_from_dict(
        {
            "checkpoint": {"path": str(checkpoint.folder)},
            "mesh": {"tp": 2},
            "loads": {"draft": {"key_prefixes": STAGES, "rules": rules}},
        }
    )

    async def work(seat: Seat) -> tuple[dict[str, torch.Tensor], ls.LoadReport]:
        async with seat.service(config) as service:
            return await take(service, "draft", "owned", checkpoint, [])

    seats = make_seats(2)
    ranks = values(await all_of(seats, work))
    for seat, (taken, report) in zip(seats, ranks, strict=True):
        assert_reads(seat.storage, report, checkpoint, HOLDERS)
        for name, tensor in taken.items():
            whole = checkpoint.tensor(name)
            half = len(whole) // 2
            wanted = whole[half * seat.rank : half * (seat.rank + 1)] if name.endswith(".weight") else whole
            assert_same(tensor, wanted, name)
