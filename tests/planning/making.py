"""Catalogs and plans for tests, and an interpreter that fills a rank's tensors from a plan with numpy alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loader_service.checkpoint.catalog import Catalog, Shard, build_catalog
from loader_service.checkpoint.dtypes import DTYPES
from loader_service.checkpoint.header import parse_header
from loader_service.config.schema import LoadConfig
from loader_service.planning.fragments import SubRange, subdivide
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, RankPlan, make_plan
from loader_service.reading.reader import FileIdentity

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype code, the header's shape
KIB = 1 << 10


@dataclass(frozen=True)
class Checkpoint:
    catalog: Catalog
    files: dict[str, bytes]  # path -> content

    def payload(self, name: str) -> bytes:
        i = self.catalog.id_of(name)
        assert i is not None
        content = self.files[self.catalog.shards[self.catalog.shard_ids[i]].path]
        return content[self.catalog.starts[i] : self.catalog.stops[i]]


def make_checkpoint(shards: Mapping[str, Sequence[Tensor]]) -> Checkpoint:
    """Tensors in the order given, shard by shard; payload bytes are pseudo-random and the same in every run."""
    generator = np.random.default_rng(7)
    found, files = [], {}
    for number, (shard_name, tensors) in enumerate(shards.items()):
        entries, end = {}, 0
        for name, code, shape in tensors:
            nbytes = math.prod(shape) * DTYPES[code].bits // 8
            entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(entries).encode()
        header = len(text).to_bytes(8, "little") + text
        content = header + generator.bytes(end)
        path = f"/checkpoints/{shard_name}"
        parsed = parse_header(header, file_bytes=len(content), path=path)
        identity = FileIdentity(device=1, inode=number + 1, size_bytes=len(content), mtime_ns=0)
        found.append((Shard(shard_name, path, identity, parsed.header_bytes, parsed.sha256), parsed))
        files[path] = content
    return Checkpoint(build_catalog(found, None, "advisory"), files)


def one_shard(*tensors: Tensor) -> Checkpoint:
    return make_checkpoint({"model.safetensors": tensors})


def named(*names: str) -> Checkpoint:
    """A checkpoint of small tensors with these names."""
    return one_shard(*((name, "U8", (4,)) for name in names))


def plan_of(
    checkpoint: Checkpoint,
    load: Mapping[str, object] | None = None,
    mesh: Mapping[str, int] | None = None,
    *,
    gap_bytes: int = 256 * KIB,
) -> LoadPlan:
    """The plan of load `target` for all ranks of the mesh, by default for one rank."""
    world_size = math.prod((mesh or {}).values())
    config = LoadConfig.model_validate(dict(load or {}))
    return make_plan(
        checkpoint.catalog, "target", config, Mesh.row_major(mesh, world_size), coalesce_gap_bytes=gap_bytes
    )


def names_of(plan: RankPlan) -> list[str]:
    return [plan.name(i) for i in range(len(plan))]


def elements(payload: bytes, shape: Sequence[int], itemsize: int) -> npt.NDArray[np.void]:
    """Stored bytes as an array of opaque elements."""
    return np.frombuffer(payload, dtype=f"V{itemsize}").reshape(tuple(shape))


def filled(plan: RankPlan, files: Mapping[str, bytes], *, max_bytes: int) -> list[npt.NDArray[np.void]]:
    """The rank's tensors, filled as a reader would: from the extents' bytes alone, in ranges of `max_bytes`.

    Checks on the way that extents do not overlap, that every fragment lies in its extent and every sub range in its
    fragment, and that every element is filled exactly once.
    """
    tensors = [np.zeros(plan.storage_shape(i), dtype=f"V{plan.itemsize(i)}") for i in range(len(plan))]
    times = [np.zeros(tensor.shape, dtype=np.int32) for tensor in tensors]
    before = (-1, 0)
    for e, extent in enumerate(plan.extents):
        assert (extent.shard_id, extent.start) >= before
        before = (extent.shard_id, extent.stop)
        data = files[extent.path][extent.start : extent.stop]
        assert len(data) == extent.stop - extent.start > 0
        first, last = plan.extent_first_fragment[e : e + 2].tolist()
        assert plan.fragment_start[first] == extent.start
        assert plan.fragment_stop[last - 1] == extent.stop
        for f in range(first, last):
            i = int(plan.fragment_tensor[f])
            _check_direct(plan, f)
            end = plan.fragment_start[f]
            for sub in subdivide(plan, f, max_bytes):
                assert end <= sub.start < sub.stop <= plan.fragment_stop[f]
                assert sub.stop - sub.start <= max(max_bytes, plan.itemsize(i))
                end = sub.stop
                _fill(tensors[i], times[i], sub, data, extent.start)
            assert end == plan.fragment_stop[f]
    assert all((count == 1).all() for count in times)
    for f in np.flatnonzero(plan.fragment_dst >= 0).tolist():
        dst = int(plan.fragment_dst[f])
        nbytes = int(plan.fragment_stop[f] - plan.fragment_start[f])
        path = plan.catalog.shards[plan.fragment_shard[f]].path
        held = tensors[int(plan.fragment_tensor[f])].tobytes()[dst : dst + nbytes]
        assert held == files[path][int(plan.fragment_start[f]) : int(plan.fragment_stop[f])]
    return tensors


def _check_direct(plan: RankPlan, f: int) -> None:
    """A fragment is direct exactly when all bytes of its range are wanted."""
    whole = plan.block(f)
    assert (whole.start, whole.stop) == (plan.fragment_start[f], plan.fragment_stop[f])
    wanted = sum(math.prod(view.shape) for view in whole.views) * plan.itemsize(int(plan.fragment_tensor[f]))
    assert (wanted == whole.stop - whole.start) == (plan.fragment_dst[f] >= 0)


def _fill(
    tensor: npt.NDArray[np.void], times: npt.NDArray[np.int32], sub: SubRange, data: bytes, data_start: int
) -> None:
    itemsize = tensor.dtype.itemsize
    held = data[sub.start - data_start : sub.stop - data_start]
    for view in sub.views:
        strides = [stride * itemsize for stride in view.strides]
        source = np.ndarray(view.shape, tensor.dtype, buffer=held, offset=view.offset_bytes, strides=strides)
        assert tensor[view.index].shape == view.shape
        tensor[view.index] = source
        times[view.index] += 1
