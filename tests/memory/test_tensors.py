from __future__ import annotations

import random
import struct

import pytest
import torch

from loader_service.errors import CheckpointError, DestinationError
from loader_service.memory.allocators import allocate_host
from loader_service.memory.tensors import empty_tensor, raw_memory, tensor_view, torch_dtype

CODES = {
    "BOOL": (torch.bool, 1),
    "U8": (torch.uint8, 1),
    "I8": (torch.int8, 1),
    "U16": (torch.uint16, 2),
    "I16": (torch.int16, 2),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "U32": (torch.uint32, 4),
    "I32": (torch.int32, 4),
    "F32": (torch.float32, 4),
    "U64": (torch.uint64, 8),
    "I64": (torch.int64, 8),
    "F64": (torch.float64, 8),
    "C64": (torch.complex64, 8),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "F8_E5M2": (torch.float8_e5m2, 1),
    "F8_E8M0": (torch.float8_e8m0fnu, 1),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 1),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 1),
    "F4": (torch.float4_e2m1fn_x2, 1),
}


def filled(nbytes: int, *, congruent_to: int = 0) -> tuple[torch.Tensor, bytes]:
    buffer = allocate_host(nbytes, congruent_to=congruent_to)
    content = random.Random(nbytes).randbytes(nbytes)
    buffer.memoryview[:] = content
    return buffer.tensor, content


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_torch_dtype(code: str) -> None:
    dtype, itemsize = CODES[code]
    assert torch_dtype(code) is dtype
    assert dtype.itemsize == itemsize


@pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2", "u8", "", "F128"])
def test_codes_without_a_torch_dtype_have_none(code: str) -> None:
    assert torch_dtype(code) is None


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("offset", [0, 64, 3])
def test_a_view_of_any_dtype_at_any_offset_has_the_bytes_of_the_memory(code: str, offset: int) -> None:
    dtype, itemsize = CODES[code]
    u8, content = filled(200)
    view = tensor_view(u8, offset, dtype, (2, 3))
    assert (view.dtype, view.shape, view.is_contiguous()) == (dtype, (2, 3), True)
    assert bytes_of(view) == content[offset : offset + 6 * itemsize]
    assert view.data_ptr() % itemsize == 0
    assert (view.data_ptr() == u8.data_ptr() + offset) == (offset % itemsize == 0)


def test_an_aligned_address_is_viewed_even_if_the_buffer_begins_unaligned() -> None:
    u8, content = filled(100, congruent_to=4093)
    view = tensor_view(u8, 3, torch.float64, (4,))
    assert view.data_ptr() == u8.data_ptr() + 3
    assert bytes_of(view) == content[3:35]
    u8[3] = content[3] ^ 1
    assert bytes_of(view) != content[3:35]


def test_a_copy_of_unaligned_bytes_is_not_the_memory_and_a_view_keeps_it_alive() -> None:
    u8, content = filled(1 << 16)
    copy, view = tensor_view(u8, 1, torch.int32, (10,)), tensor_view(u8, 4, torch.int32, (10,))
    u8.zero_()
    assert bytes_of(copy) == content[1:41]
    assert view.tolist() == [0] * 10
    del u8
    view.fill_(5)
    assert view.tolist() == [5] * 10


@pytest.mark.parametrize("offset", [0, 8, 2, 5], ids=lambda offset: f"offset {offset}")
def test_strides_count_elements(offset: int) -> None:
    u8, content = filled(400)
    view = tensor_view(u8, offset, torch.int32, (2, 3), (20, 2))
    expected = [
        [struct.unpack_from("<i", content, offset + 4 * (20 * row + 2 * column))[0] for column in range(3)]
        for row in range(2)
    ]
    assert view.tolist() == expected


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 4)])
def test_an_empty_tensor_needs_no_bytes(shape: tuple[int, ...]) -> None:
    u8, _ = filled(4)
    for dtype, _ in CODES.values():
        view = tensor_view(u8, 4, dtype, shape)
        assert (view.shape, view.dtype) == (shape, dtype)


def test_an_empty_tensor_that_torch_cannot_hold_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"^/a: torch cannot hold tensor 'w', which is empty, .*: leave it out"
    ) as caught:
        empty_tensor((0, 1 << 63, 4), torch.float32, path="/a", name="w")
    assert (caught.value.path, caught.value.tensor) == ("/a", "w")


def test_an_empty_tensor_that_torch_cannot_hold_is_a_checkpoint_error() -> None:
    u8, _ = filled(4)
    with pytest.raises(CheckpointError, match="cannot hold"):
        tensor_view(u8, 0, torch.float32, (0, 1 << 63, 4))


def test_a_scalar_and_a_tensor_of_many_dimensions_are_viewed() -> None:
    u8, content = filled(16)
    assert tensor_view(u8, 4, torch.int32, ()).item() == struct.unpack_from("<i", content, 4)[0]
    assert tensor_view(u8, 0, torch.uint8, (1,) * 41).shape == (1,) * 41


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        pytest.param(0, (5, 5), None, id="too large"),
        pytest.param(1, (24,), None, id="one byte too many"),
        pytest.param(-4, (2,), None, id="before the start"),
        pytest.param(0, (2, 2), (24, 1), id="last element outside"),
        pytest.param(96, (2,), (-1,), id="backwards"),
    ],
)
def test_a_view_never_reaches_outside_the_memory(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    u8, _ = filled(96)
    with pytest.raises(DestinationError):
        tensor_view(u8, offset, torch.float32, shape, strides)


def test_a_part_of_a_larger_buffer_is_its_own_bounds() -> None:
    u8, content = filled(96)
    part = u8[8:24]
    assert bytes_of(tensor_view(part, 4, torch.int32, (3,))) == content[12:24]
    with pytest.raises(DestinationError):
        tensor_view(part, 4, torch.int32, (4,))


def test_views_are_on_the_cpu_whatever_torchs_default_device_is() -> None:
    u8, _ = filled(16)
    with torch.device("meta"):
        views = [tensor_view(u8, 0, torch.int32, (2,)), tensor_view(u8, 1, torch.int32, (0,))]
    assert [view.device.type for view in views] == ["cpu", "cpu"]


@pytest.mark.parametrize("code", CODES)
def test_the_raw_memory_of_a_tensor_is_its_own_bytes_and_keeps_them_alive(code: str) -> None:
    dtype, itemsize = CODES[code]
    tensor = torch.zeros(3 * itemsize * 2, dtype=torch.uint8).view(dtype).reshape(2, 3)
    raw = raw_memory(tensor)
    raw[1] = 7
    assert (raw.nbytes, raw.readonly, raw.format) == (6 * itemsize, False, "B")
    assert bytes_of(tensor)[1] == 7
    del tensor
    assert raw[1] == 7


@pytest.mark.parametrize("tensor", [torch.zeros(()), torch.zeros((0, 3)), torch.nn.Parameter(torch.zeros(2))])
def test_raw_memory_of_scalars_empty_tensors_and_parameters(tensor: torch.Tensor) -> None:
    assert raw_memory(tensor).nbytes == tensor.nbytes
