"""`manifest`: checksums of a whole checkpoint, and whether the files of a cache are what it calls them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loader_service import logs
from loader_service.checkpoint.catalog import Catalog
from loader_service.cli.catalogs import read_headers
from loader_service.cli.checking import check_writable, write_text
from loader_service.cli.checkpoint_manifest import CheckpointManifest
from loader_service.cli.hashing import hash_checkpoint
from loader_service.cli.manifest_json import dump
from loader_service.cli.output import print_document, print_text
from loader_service.cli.progress import hashing_progress
from loader_service.config.yaml_file import config_from_dict
from loader_service.errors import EXIT_OK, CheckpointError
from loader_service.sizes import format_rate, format_size

log = logs.logger("loader_service.manifest")

_OUT: Final = "--out"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_NAMED: Final = 8


def make_manifest(paths: Sequence[str], out: Path | None, *, ignore_index: bool, as_json: bool) -> int:
    """Reads all files at one path (a folder or a file), or a list of them, once. Prints the manifest, or writes it to
    `out` and prints what was done. Returns the exit code.

    Raises CheckpointError, and writes nothing, where a file is not what a Hugging Face cache calls it.
    """
    if out is not None:
        check_writable(out, option=_OUT)
    path: object = paths[0] if len(paths) == 1 else list(paths)
    checkpoint: object = {"path": path, "index": "ignore" if ignore_index else "advisory"}
    config = config_from_dict({"checkpoint": checkpoint, "loads": {"all": {}}})
    started_s = time.monotonic()
    catalog = read_headers(config.checkpoint_of("all"), retries=config.reads.retries)
    manifest = _hashed(catalog, retries=config.reads.retries)
    seconds = time.monotonic() - started_s
    compared = check_blobs(catalog, manifest)
    if out is None:
        print_text(dump(manifest.as_dict()))
        if compared:
            log.info("%d of %d files are named by their SHA-256, and all are right", compared, len(catalog.shards))
        return EXIT_OK
    write_text(out, dump(manifest.as_dict()) + "\n", option=_OUT)
    _tell(out, manifest, compared, seconds, as_json=as_json)
    return EXIT_OK


def _hashed(catalog: Catalog, *, retries: int) -> CheckpointManifest:
    progress = hashing_progress()
    total_bytes = sum(shard.identity.size_bytes for shard in catalog.shards)
    told_bytes = 0

    def tick(done_bytes: int) -> None:
        nonlocal told_bytes
        progress.advance(done_bytes - told_bytes)
        told_bytes = done_bytes
        progress.tick()

    progress.begin(total_bytes)
    with progress:
        return hash_checkpoint(catalog, retries=retries, tick=tick)


def blob_sha256(path: str) -> str | None:
    """The SHA-256 that a Hugging Face cache says a file has: its snapshots are links to `blobs/<SHA-256>`. None for
    what is no such link. Small files are blobs with a shorter name, of another kind of hash."""
    if not Path(path).is_symlink():
        return None
    blob = Path(os.path.realpath(path))
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


def check_blobs(catalog: Catalog, manifest: CheckpointManifest) -> int:
    """How many files have a blob's name, all of them the right one. Raises CheckpointError with those that do not."""
    named = [(shard, blob) for shard in catalog.shards if (blob := blob_sha256(shard.path)) is not None]
    wrong = [shard for shard, blob in named if manifest.files[shard.name].sha256 != blob]
    if not wrong:
        return len(named)
    first = wrong[0]
    more = f"; so are {', '.join(shard.name for shard in wrong[1:_MOST_NAMED])}" if len(wrong) > 1 else ""
    more += f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    raise CheckpointError(
        f"{first.path}: its SHA-256 is {manifest.files[first.name].sha256}, and that of the blob in the cache must be "
        f"{blob_sha256(first.path)}: it is damaged{more}; remove the blob and fetch the file again",
        path=first.path,
    )


def _tell(out: Path, manifest: CheckpointManifest, compared: int, seconds: float, *, as_json: bool) -> None:
    total_bytes = sum(file.size_bytes for file in manifest.files.values())
    files, tensors = len(manifest.files), len(manifest.tensors)
    if as_json:
        print_document(
            {
                "manifest": str(out),
                "files": files,
                "tensors": tensors,
                "bytes": total_bytes,
                "blobs_compared": compared,
                "seconds": seconds,
                "gib_per_s": total_bytes / (1 << 30) / seconds,
            }
        )
        return
    blobs = f"; {compared} of the files are blobs of a cache, and have the SHA-256 of their names" if compared else ""
    print_text(
        f"{out}: {tensors} tensors in {files} files, {format_size(total_bytes)} read in {seconds:.2f} s, "
        f"{format_rate(total_bytes / seconds)}{blobs}."
    )
