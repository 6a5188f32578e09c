"""`inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loader_service.checkpoint.catalog import Catalog
from loader_service.checkpoint.dtypes import DTYPE_LIST
from loader_service.cli.catalogs import read_headers
from loader_service.cli.output import print_document
from loader_service.config.yaml_file import config_from_dict
from loader_service.errors import EXIT_OK

Counts = dict[str, dict[str, int]]


def inspect(paths: Sequence[str], *, tensors: bool, ignore_index: bool, as_json: bool) -> int:
    """Prints what lies at one path (a folder or a file), or in a list of files. Returns the exit code."""
    path: object = paths[0] if len(paths) == 1 else list(paths)
    checkpoint: object = {"path": path, "index": "ignore" if ignore_index else "advisory"}
    config = config_from_dict({"checkpoint": checkpoint, "loads": {"all": {}}})
    location = config.checkpoint_of("all")
    catalog = read_headers(location, retries=config.reads.retries)
    described = describe(catalog, location.path, tensors=tensors)
    if as_json:
        print_document(described)
    else:
        from loader_service.cli.render import show_checkpoint

        show_checkpoint(described)
    return EXIT_OK


def describe(catalog: Catalog, path: str | Sequence[str], *, tensors: bool = False) -> dict[str, object]:
    """The checkpoint as plain data. Bytes are payload bytes unless named otherwise; offsets are absolute."""
    nbytes = catalog.stops - catalog.starts
    shards = len(catalog.shards)
    counts = np.bincount(catalog.shard_ids, minlength=shards).tolist()
    payload = _sums(catalog.shard_ids, nbytes, shards)
    described: dict[str, object] = {
        "path": path if isinstance(path, str) else list(path),
        "catalog_digest": catalog.digest,
        "files": [
            {
                "name": shard.name,
                "path": shard.path,
                "bytes": shard.identity.size_bytes,
                "header_bytes": shard.header_bytes,
                "payload_bytes": payload[i],
                "tensors": counts[i],
            }
            for i, shard in enumerate(catalog.shards)
        ],
        "tensors": len(catalog),
        "payload_bytes": int(nbytes.sum()),
        "dtypes": _dtypes(catalog, nbytes),
        "namespaces": _namespaces(catalog, nbytes),
        "notes": list(catalog.notes),
    }
    if tensors:
        described["tensor_list"] = _tensor_list(catalog)
    return described


def _dtypes(catalog: Catalog, nbytes: np.ndarray) -> Counts:
    counts = np.bincount(catalog.dtype_ids, minlength=len(DTYPE_LIST)).tolist()
    sums = _sums(catalog.dtype_ids, nbytes, len(DTYPE_LIST))
    return {dtype.code: {"tensors": counts[i], "bytes": sums[i]} for i, dtype in enumerate(DTYPE_LIST) if counts[i] > 0}


def _namespaces(catalog: Catalog, nbytes: np.ndarray) -> Counts:
    """By the first dotted segment of the names, sorted by it."""
    found: Counts = {}
    for name, size in zip(catalog.names, nbytes.tolist(), strict=True):
        entry = found.setdefault(name.partition(".")[0], {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += size
    return dict(sorted(found.items()))


def _tensor_list(catalog: Catalog) -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "dtype": catalog.dtype(i).code,
            "shape": list(catalog.shapes[i]),
            "file": catalog.shards[int(catalog.shard_ids[i])].name,
            "offsets": [int(catalog.starts[i]), int(catalog.stops[i])],
        }
        for i, name in enumerate(catalog.names)
    ]


def _sums(ids: np.ndarray, values: np.ndarray, length: int) -> list[int]:
    """Exact sums by id: bincount's weights are floats, which cannot count every byte of a large checkpoint."""
    sums = np.zeros(length, dtype=np.int64)
    np.add.at(sums, ids, values)
    found: list[int] = sums.tolist()
    return found
