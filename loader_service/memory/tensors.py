"""Tensors over raw bytes: which torch dtype a safetensors code means here, and views without a copy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import torch

from loader_service.errors import CheckpointError, DestinationError

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


@functools.cache
def torch_dtype(code: str) -> torch.dtype | None:
    """The torch dtype of a safetensors code, None where torch (or this version of it) has none, as for F6."""
    dtype = getattr(torch, _TORCH_NAMES.get(code, ""), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def tensor_view(
    u8: torch.Tensor, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor of `dtype` and `shape` over the bytes of `u8` (uint8, one dimension, contiguous) from `offset_bytes` on.

    `strides` count elements (None: row-major), `shape` is torch's (halved last dimension for F4). The view shares and
    keeps alive the memory of `u8`, except where its first byte is not aligned to the element size: then it is an
    aligned copy, which is what devices and vector code need. Raises DestinationError if it would reach outside `u8`.
    """
    if 0 in shape:
        return empty_tensor(shape, dtype)
    strides = _row_major(shape) if strides is None else strides
    itemsize = dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    span_bytes = (last + 1) * itemsize
    if offset_bytes < 0 or min(strides, default=0) < 0 or offset_bytes + span_bytes > u8.numel():
        raise DestinationError(
            f"a tensor of {dtype} and shape {tuple(shape)} takes {span_bytes} bytes from byte {offset_bytes} on, "
            f"but the buffer has {u8.numel()}"
        )
    start = u8.storage_offset() + offset_bytes
    if start % itemsize or (u8.data_ptr() + offset_bytes) % itemsize:
        u8, start = _aligned(u8[offset_bytes : offset_bytes + span_bytes], itemsize), 0
    # `set_` costs 2 us, slicing, viewing and reshaping 4.5; it takes any memory, so the bounds are checked above.
    view = torch.empty(0, dtype=dtype, device="cpu")
    return view.set_(u8.untyped_storage(), start // itemsize, tuple(shape), tuple(strides))


def raw_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, writable; keeps the tensor's memory alive."""
    # Strides of dimensions of size 1 mean nothing but would survive `reshape`, and then `view` refuses them.
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def why_unwritable(tensor: torch.Tensor) -> str | None:
    """Why elements cannot be put into the tensor's memory; None if they can."""
    if tensor.device.type == "meta":
        return "is on the meta device: it has no memory to fill"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: only strided tensors can be filled"
    if tensor.is_nested:
        return "is nested: fill the tensors that it is made of"
    if tensor.is_quantized:
        return "is quantized: only plain tensors can be filled"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view: fill what it is a view of"
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return "has no memory of its own (within torch.vmap, torch.func.grad or another transform?)"
    if tensor.numel() == 0:
        return None
    if storage.device.type != tensor.device.type:
        return "has no memory of its own (a fake tensor?)"
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    last = tensor.storage_offset() + sum(stride * (size - 1) for stride, size in dims)
    if (last + 1) * tensor.element_size() > storage.nbytes():
        return f"reaches beyond its storage, which has {storage.nbytes()} bytes: was it freed or resized?"
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(dims):
        if stride <= reach:
            return "has elements that share memory (expanded, or with overlapping strides)"
        reach += stride * (size - 1)
    return None


def empty_tensor(
    shape: Sequence[int], dtype: torch.dtype, *, path: str | None = None, name: str | None = None
) -> torch.Tensor:
    """A tensor without elements. Raises CheckpointError, with `path` and `name`, where torch cannot hold its shape:
    [0, 2**63, 4] is a legal header's."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except (RuntimeError, TypeError, OverflowError) as error:
        where = f"{path}: " if path is not None else ""
        what = f"tensor '{name}', which" if name is not None else "a tensor that"
        text = f"{where}torch cannot hold {what} is empty, of {dtype} and shape {tuple(shape)}"
        raise CheckpointError(f"{text}: leave it out of the load", path=path, tensor=name) from error


def _aligned(part: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The same bytes with a storage that begins with them, copied only if their address makes it necessary."""
    if part.data_ptr() % itemsize:
        return part.clone()
    return torch.from_numpy(part.numpy())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
