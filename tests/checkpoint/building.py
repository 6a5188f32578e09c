"""Catalogs made in memory: headers from the given tensors, identities made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loader_service.checkpoint.catalog import Catalog, Shard, build_catalog
from loader_service.checkpoint.header import ParsedHeader, header_length, parse_header
from loader_service.checkpoint.index import IndexFile
from loader_service.reading.reader import FileIdentity
from tests.support.shards import shard_bytes


def shard_with_header(
    name: str, file: bytes, folder: str = "/checkpoint", mtime_ns: int = 1
) -> tuple[Shard, ParsedHeader]:
    path = f"{folder}/{name}"
    length = header_length(file[:8], file_bytes=len(file), path=path)
    header = parse_header(file[:length], file_bytes=len(file), path=path)
    identity = FileIdentity(1, abs(hash(path)) % 1000, len(file), mtime_ns)
    return Shard(name, path, identity, header.header_bytes, header.sha256), header


def bytes_of(names: Sequence[str], dtype: str = "U8", size: int = 4) -> bytes:
    """A shard with one tensor of `size` bytes by each name, in this order."""
    return shard_bytes({name: (dtype, [size], bytes(size)) for name in names})


def catalog_of(
    shards: Mapping[str, Sequence[str]], weight_map: Mapping[str, str] | None = None, folder: str = "/checkpoint"
) -> Catalog:
    """A catalog of shards by name, each with the tensors named; `weight_map` None: no index."""
    path = f"{folder}/model.safetensors.index.json"
    index = None
    if weight_map is not None:
        index = IndexFile(path, [[*weight_map]], [[*weight_map.values()]], frozenset(weight_map.values()))
    return build_catalog([shard_with_header(name, bytes_of(names), folder) for name, names in shards.items()], index)
