"""`into`: exactly the tensors asked for, into the caller's memory, checked before a byte moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loader_service as ls
from loader_service.reading.fake import FakeStorage
from loader_service.reading.local import LocalStorage
from tests.support.checkpoints import Checkpoint, assert_same, awkward_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return awkward_checkpoint(tmp_path_factory.mktemp("awkward"))


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
        pytest.param("big.weight", torch.zeros(640, 1).expand(640, 700), "is expanded", id="expanded"),
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
        assert load.spec("big.weight").full_shape == (640, 700)
    assert_same(param, checkpoint.tensor("big.weight"))
