"""Rows of host-resident tables as `load` takes them: piece by piece, since a rank's share may be larger than memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import torch

from loader_service.filling import TensorSpec
from loader_service.memory.allocators import PAGE_BYTES, allocate_host
from loader_service.memory.tensors import empty_tensor, tensor_view
from loader_service.rows import RowSource

PIECE_BYTES = 64 << 20


async def pieces(
    name: str, source: RowSource, spec: TensorSpec, *, piece_bytes: int = PIECE_BYTES
) -> AsyncIterator[tuple[torch.Tensor, TensorSpec]]:
    """This rank's rows in order: each piece with how it comes from the whole table. Every piece is in the same memory,
    and there is one at least, if only of no rows."""
    start, stop = source.rows
    if start == stop:
        yield empty_tensor(spec.shape, source.dtype, path=source.path, name=name), spec
        return
    itemsize = source.dtype.itemsize
    row_bytes = torch.Size(source.shape[1:]).numel() * itemsize
    step = min(max(1, piece_bytes // max(1, row_bytes)), stop - start)
    buffer = allocate_host(PAGE_BYTES + step * row_bytes)
    ((source_index, own_index),) = spec.parts
    for first in range(start, stop, step):
        last = min(stop, first + step)
        skip = (source.offset + first * row_bytes) % PAGE_BYTES  # so that it is read past the page cache
        shape = (last - first, *source.shape[1:])
        rows = tensor_view(buffer.tensor, skip if skip % itemsize == 0 else 0, source.dtype, shape)
        await source.aread_rows_into(rows, first)
        part = (slice(first, last), *source_index[1:]), (slice(0, last - first), *own_index[1:])
        yield rows, replace(spec, shape=shape, parts=(part,))
