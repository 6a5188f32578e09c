"""`into`: exactly the tensors asked for, into the caller's memory, checked before a byte moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


def freed(*shape: int) -> torch.Tensor:
    """A tensor whose storage was given away, as sharding wrappers do."""
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(64)
    return tensor


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the same shape with other strides: transposed, or every other element."""
    if tensor.dim() >= 2:
        return torch.zeros_like(tensor.transpose(0, -1).contiguous()).transpose(0, -1)
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]


@pytest.mark.parametrize("capacity", [4096, "64KiB", "1GiB"])
@pytest.mark.parametrize("memory", ["contiguous", "strided"])
async def test_every_tensor_lands_in_the_callers_memory(
    checkpoint: Checkpoint, capacity: int | str, memory: str
) -> None:
    config = checkpoint.config(staging={"capacity_bytes": capacity}, reads={"chunk_bytes": 10_000})
    make = torch.zeros_like if memory == "contiguous" else strided
    params = {name: make(checkpoint.tensor(name)) for name in checkpoint.tensors}
    addresses = {name: tensor.data_ptr() for name, tensor in params.items()}
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        await load.into(params)
    for name, tensor in params.items():
        assert tensor.data_ptr() == addresses[name]
        assert_same(tensor, checkpoint.tensor(name), name)
    assert load.report.complete
    assert load.report.payload_bytes == checkpoint.payload_bytes


async def test_only_the_named_tensors_are_read(checkpoint: Checkpoint) -> None:
    storage = FakeStorage(LocalStorage())
    wanted = ["table.scale", "scale", "layers.7.norm.weight"]
    params = {name: torch.zeros_like(checkpoint.tensor(name)) for name in wanted}
    config = checkpoint.config(reads={"coalesce_gap_bytes": 0})
    async with ls.LoaderService(config, "solo", storage=storage) as service, service.open("target") as load:
        await load.into(params)
    assert load.report.read_bytes == sum(tensor.nbytes for tensor in params.values())
    assert load.report.tensors == 3
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


async def test_parameters_that_require_gradients_are_filled(checkpoint: Checkpoint) -> None:
    param = torch.nn.Parameter(torch.zeros(640, 700))
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        await load.into({"big.weight": param})
    assert_same(param, checkpoint.tensor("big.weight"))


async def test_legal_memory_of_unusual_kinds_is_filled(checkpoint: Checkpoint) -> None:
    wide = torch.zeros(640, 700)
    with torch.inference_mode():
        inference = torch.zeros(700, 640).t()
    slices = {
        "scale": torch.zeros(3)[1],
        "layers.1.norm.weight": torch.zeros(257, 1, dtype=torch.bfloat16).as_strided((257,), (1,)),
        "flag": torch.zeros(9, dtype=torch.bool)[1:9:3],
        "odd": torch.zeros(13, 7, dtype=torch.uint8)[:, 3],
    }
    async with ls.LoaderService(checkpoint.config(), "solo") as service:
        for big in (wide, inference):
            async with service.open("target") as load:
                await load.into({"big.weight": big, **slices})
            assert_same(big, checkpoint.tensor("big.weight"))
    for name, tensor in slices.items():
        assert_same(tensor, checkpoint.tensor(name), name)


async def test_one_element_of_a_strided_view_is_contiguous_memory(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, {"m.safetensors": {"one": ("BF16", (1,)), "row": ("F32", (1, 5))}})
    params = {"one": torch.zeros(4, dtype=torch.bfloat16)[1:2:2], "row": torch.zeros(9, 5)[3:4:2]}
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        await load.into(params)
    for name, tensor in params.items():
        assert_same(tensor, checkpoint.tensor(name), name)


def test_blocking_into(checkpoint: Checkpoint) -> None:
    param = torch.zeros(640, 700)
    with ls.LoaderService.blocking(checkpoint.config(), "solo") as service, service.open("target") as load:
        load.into({"big.weight": param})
    assert_same(param, checkpoint.tensor("big.weight"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        pytest.param("nowhere", torch.zeros(1), "is not among the tensors", id="unknown name"),
        pytest.param("big.weight", torch.zeros(700, 640), "has shape", id="shape"),
        pytest.param("big.weight", torch.zeros(640, 700, dtype=torch.int32), "is torch.int32", id="dtype of same size"),
        pytest.param("big.weight", torch.zeros(640, 700, device="meta"), "meta device", id="meta"),
        pytest.param("big.weight", torch.zeros(640, 1).expand(640, 700), "share memory", id="expanded"),
        pytest.param("big.weight", torch.zeros(1339).as_strided((640, 700), (1, 1)), "share memory", id="overlapping"),
        pytest.param("big.weight", freed(640, 700), "beyond its storage", id="freed storage"),
        pytest.param(
            "table.weight", torch._conj(torch.zeros(2, dtype=torch.complex64)), "is torch.complex64", id="conj"
        ),
        pytest.param("big.weight", torch.zeros(640, 700).to_sparse(), "only strided", id="sparse"),
        pytest.param("big.weight", [0.0], "is a list", id="not a tensor"),
    ],
)
async def test_a_wrong_destination_is_refused_before_a_byte_moves(
    checkpoint: Checkpoint, name: str, tensor: torch.Tensor, message: str
) -> None:
    storage = FakeStorage(LocalStorage())
    right = torch.full((37, 3), 7, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    async with ls.LoaderService(checkpoint.config(), "solo", storage=storage) as service:
        with pytest.raises(ls.DestinationError, match=message) as caught:
            async with service.open("target") as load:
                headers = storage.bytes_read()
                await load.into({"table.scale": right, name: tensor})
        assert storage.bytes_read() == headers
    assert right.view(torch.uint8).eq(7).all()
    assert caught.value.tensor == name
    assert caught.value.exit_code == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
async def test_a_nested_destination_is_refused(checkpoint: Checkpoint) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 700), torch.zeros(637, 700)])
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        with pytest.raises(ls.DestinationError, match=r"'big\.weight': is nested"):
            await load.into({"big.weight": nested})


async def test_destinations_that_are_no_mapping_are_refused(checkpoint: Checkpoint) -> None:
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        for wrong in (None, [torch.zeros(1)]):
            with pytest.raises(ls.DestinationError, match="takes a mapping"):
                await load.into(wrong)  # type: ignore[arg-type]


async def test_a_refused_destination_leaves_the_load_usable(checkpoint: Checkpoint) -> None:
    param = torch.zeros(640, 700)
    async with ls.LoaderService(checkpoint.config(), "solo") as service, service.open("target") as load:
        with pytest.raises(ls.DestinationError):
            await load.into({"big.weight": torch.zeros(1)})
        await load.into({"big.weight": param})
    assert_same(param, checkpoint.tensor("big.weight"))


async def test_slices_land_in_the_ranks_own_shape(checkpoint: Checkpoint, tmp_path: Path) -> None:
    load_config = {"rules": [{"match": "*", "split": {"axis": "tp", "dim": 1}}]}
    config = checkpoint.config(load_config, mesh={"tp": 1})
    param = torch.zeros(640, 700)
    async with ls.LoaderService(config, "solo") as service, service.open("target") as load:
        await load.into({"big.weight": param})
        assert load.spec("big.weight").full_shape == load.spec("big.weight").shape == (640, 700)
        with pytest.raises(KeyError, match="is not among those that this rank takes"):
            load.spec("nowhere")
    assert_same(param, checkpoint.tensor("big.weight"))
