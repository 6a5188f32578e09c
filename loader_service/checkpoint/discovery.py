"""Finds a checkpoint's shards and its index, reads their headers in parallel, and joins them into a catalog.

The only part of this floor that reads: through a `Storage` for listings and the index, through a `HandleCache` for
headers. Of a shard it reads the first 8 bytes and then exactly the header that they announce, never a byte of payload.
What was kept of an earlier reading of the same files takes the place of opening them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Literal, Protocol

from loader_service.checkpoint.catalog import Catalog, Shard, build_catalog
from loader_service.checkpoint.header import LENGTH_BYTES, ParsedHeader, header_length, parse_header
from loader_service.checkpoint.index import (
    DEFAULT_INDEX_NAME,
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    IndexFile,
    absent_shards_error,
    parse_index,
)
from loader_service.checkpoint.missing import missing_error, no_shards_error
from loader_service.checkpoint.refusal import refusal, shown, shown_list
from loader_service.checkpoint.slices import Text, let_go, memory_for
from loader_service.errors import CheckpointError, LoaderError, ReadError
from loader_service.reading.handles import HandleCache
from loader_service.reading.positioned import read_fully
from loader_service.reading.reader import DirectoryEntry, FileIdentity, Storage
from loader_service.reading.threads import ReadPool

IndexMode = Literal["advisory", "ignore"]

SHARD_SUFFIX: Final = ".safetensors"
_TRANSIENT: Final = frozenset({errno.EIO, errno.ESTALE, errno.EINTR})


class Kept(Protocol):
    """Whole headers and indexes that were read before, by path and the file's state."""

    def get(self, path: str, state: Hashable) -> bytes | None: ...

    def keep(self, path: str, state: Hashable, raw: bytes) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A file of a checkpoint, not opened yet. `name` is its base name, `path` absolute, links unresolved."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Discovered:
    """What lies under a checkpoint's path: shards sorted by name, the index if it counts, notes on what was seen."""

    shards: tuple[FoundShard, ...]
    index: IndexFile | None
    notes: tuple[str, ...]


def discover(
    path: str | tuple[str, ...], storage: Storage, *, index: IndexMode, kept: Kept | None = None
) -> Discovered:
    """Finds the shards under `path`: a folder, one `.safetensors` file, or a list of files (absolute paths). Blocks.

    Of a folder, the files named `*.safetensors` count, links to files included; dotfiles, folders and anything else are
    passed over, subfolders are not searched. The index is looked for in folders only.

    Raises CheckpointError where there is no checkpoint, where a link is dangling, and where the index is malformed or
    names absent shards (all are listed); ReadError where the folder or the index cannot be read.
    """
    if not isinstance(path, str):
        return Discovered(_listed_shards(path), None, ())
    _checked_name(posixpath.basename(path), path)
    try:
        entries = storage.list_directory(path)
    except NotADirectoryError:
        return _single_file(path)
    except OSError as error:
        raise _listing_error(path, error, storage) from error
    shards, notes = _folder_shards(path, entries)
    found = _find_index(path, entries, storage, notes, kept) if index == "advisory" else None
    if found is not None:
        absent = sorted(found.shards.difference(shard.name for shard in shards))
        if absent:
            raise absent_shards_error(found, absent)
    if not shards:
        raise no_shards_error(path, entries, storage)
    return Discovered(tuple(shards), found, tuple(notes))


def read_catalog(
    config_path: str | tuple[str, ...],
    index_mode: IndexMode,
    *,
    handles: HandleCache,
    storage: Storage,
    threads: ReadPool,
    retries: int,
    kept: Kept | None = None,
) -> Catalog:
    """Discovers the checkpoint and reads, validates and joins all headers. Blocks; called off the event loop.

    Each of `threads` reads and parses one header at a time, so no more than a thread's share of header bytes is held at
    once. Every shard is opened anew, so that the identities are those of now, and a second call after a failure reads
    everything again. Only what is `kept` of a file whose identity is still the same is taken instead, and validated
    like the rest; what is read and valid is kept there.

    Raises ReadError where a header cannot be read, CheckpointError for everything else that discovery and validation
    refuse, a missing file included. The first failing shard in the order of names decides; the message counts and names
    the others. Both kinds may be transient (a shard that is being replaced): whoever acts for a group may call again.
    """
    discovered = discover(config_path, storage, index=index_mode, kept=kept)
    headers_from = _Headers(handles, storage, retries, kept)
    reading = [
        threads.submit(headers_from.header_or_failure, shard, label="the read of its header", path=shard.path)
        for shard in discovered.shards
    ]
    outcomes = [future.result() for future in reading]
    failed = [
        (shard, outcome)
        for shard, outcome in zip(discovered.shards, outcomes, strict=True)
        if isinstance(outcome, LoaderError)
    ]
    if failed:
        raise _first_failure(failed, len(outcomes))
    headers = [outcome for outcome in outcomes if not isinstance(outcome, LoaderError)]
    catalog = build_catalog(headers, discovered.index, index_mode, notes=discovered.notes)
    reading.clear()
    outcomes.clear()
    let_go(headers)
    if discovered.index is not None:
        discovered.index.clear()
    return catalog


def is_touched(catalog: Catalog, storage: Storage) -> bool:
    """Whether something has happened to a file of a catalog that its identity does not tell: what is kept of the file
    is then not what would be read. That its identity is another is found where a load verifies its files. Blocks."""
    for shard in catalog.shards:
        with contextlib.suppress(OSError):  # reading says why
            found = storage.identify(shard.path)
            if found == shard.identity and found.state != shard.identity.state:
                return True
    return False


def _listed_shards(paths: tuple[str, ...]) -> tuple[FoundShard, ...]:
    if not paths:
        raise CheckpointError("the checkpoint is an empty list of files: name at least one")
    by_name: dict[str, str] = {}
    for path in paths:
        name = _checked_name(posixpath.basename(path), path)
        if name in by_name:
            words = f"{path} and {by_name[name]} have the same file name: shards are told apart by it; rename one"
            raise CheckpointError(words, path=path)
        by_name[name] = path
    return tuple(FoundShard(name, by_name[name]) for name in sorted(by_name))


def _single_file(path: str) -> Discovered:
    name = posixpath.basename(path)
    if not name.endswith(SHARD_SUFFIX):
        raise refusal(path, "is neither a folder nor a file named *.safetensors")
    return Discovered((FoundShard(name, path),), None, ())


def _checked_name(name: str, path: str) -> str:
    """Names of shards are printed, hashed and sent to other ranks: they must be text."""
    if "\0" in path:
        raise CheckpointError(f"the path {shown(path)} holds a NUL character", path=shown(path))
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"the file name {shown(path)} is not UTF-8: rename it", path=shown(path)) from None
    return name


def _folder_shards(folder: str, entries: Sequence[DirectoryEntry]) -> tuple[list[FoundShard], list[str]]:
    shards: list[FoundShard] = []
    notes: list[str] = []
    dangling: list[DirectoryEntry] = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if not entry.name.endswith(SHARD_SUFFIX) or entry.name.startswith("."):
            continue
        path = posixpath.join(folder, _checked_name(entry.name, posixpath.join(folder, entry.name)))
        if entry.kind == "file":
            shards.append(FoundShard(entry.name, path))
        elif entry.kind == "dangling":
            dangling.append(entry)
        else:
            notes.append(f"{entry.name}: passed over: it is {'a folder' if entry.kind == 'directory' else 'no file'}")
    if dangling:
        links = ", ".join(f"{entry.name} -> {entry.link_target}" for entry in dangling)
        first = posixpath.join(folder, dangling[0].name)
        words = f"{folder}: {len(dangling)} shard{'s are' if len(dangling) > 1 else ' is'} a dangling link ({links})"
        raise CheckpointError(f"{words}: fetch the targets again or remove the links", path=first)
    return shards, notes


def _find_index(
    folder: str, entries: Sequence[DirectoryEntry], storage: Storage, notes: list[str], kept: Kept | None
) -> IndexFile | None:
    names = sorted(
        entry.name
        for entry in entries
        if entry.kind in ("file", "dangling") and entry.name.endswith(INDEX_SUFFIX) and not entry.name.startswith(".")
    )
    if not names:
        return None
    if DEFAULT_INDEX_NAME in names:
        name = DEFAULT_INDEX_NAME
    elif len(names) == 1:
        name = names[0]
    else:
        words = f"{len(names)} indexes and none is {DEFAULT_INDEX_NAME}: {shown_list(names)}"
        raise refusal(folder, f"{words}; keep one, or set `index: ignore`")
    others = [other for other in names if other != name]
    if others:
        notes.append(f"the index is {name}; passed over: {shown_list(others)}")
    path = posixpath.join(folder, name)
    known = _kept_of(path, storage, kept)
    if known is not None:
        return parse_index(known[1], path)
    identity, raw = _read_whole(path, storage)
    index = parse_index(raw, path)
    if kept is not None:
        kept.keep(path, identity.state, bytes(raw))
    return index


def _kept_of(path: str, storage: Storage, kept: Kept | None) -> tuple[FileIdentity, bytes] | None:
    """The file's state now, and what is kept of it in that state. Nothing is opened."""
    if kept is None:
        return None
    try:
        identity = storage.identify(path)
    except OSError:  # opening it says why
        return None
    raw = kept.get(path, identity.state)
    return None if raw is None else (identity, raw)


def _read_whole(path: str, storage: Storage) -> tuple[FileIdentity, Text]:
    try:
        file = storage.open(path)
        try:
            identity = file.identity
            size_bytes = identity.size_bytes
            if size_bytes > MAX_INDEX_BYTES:
                raise refusal(path, f"the index has {size_bytes} bytes, more than {MAX_INDEX_BYTES} are not read")
            data = memory_for(size_bytes)
            done = 0
            while done < size_bytes:
                got = file.read_into([data[done:]], done)
                if not got:
                    raise refusal(path, f"the index ended at byte {done} of {size_bytes}: it changed while it was read")
                done += got
            return identity, data
        finally:
            file.close()
    except OSError as error:
        raise _reading_error(path, error, storage, "the index") from error


class _Headers:
    """Reads and parses one header at a time in each of several threads, or takes what is kept of it."""

    def __init__(self, handles: HandleCache, storage: Storage, retries: int, kept: Kept | None) -> None:
        self._handles = handles
        self._storage = storage
        self._retries = retries
        self._kept = kept
        # Reads overlap, parsing does not: threads that fight over the interpreter took 10 to 25 % longer on 48 headers.
        self._one_at_a_time = Lock()

    def header_or_failure(self, shard: FoundShard) -> tuple[Shard, ParsedHeader] | LoaderError:
        """Returns failures instead of raising them: all shards are tried, so that a message can count the bad ones."""
        try:
            known = _kept_of(shard.path, self._storage, self._kept)
            if known is not None:
                return self._parsed(shard, *known)
            self._handles.invalidate(shard.path)
            return self._read(shard)
        except OSError as error:
            failure = _reading_error(shard.path, error, self._storage, "its header")
            failure.__cause__ = error
        except LoaderError as error:
            failure = error
        self._handles.invalidate(shard.path)
        return failure

    def _read(self, shard: FoundShard) -> tuple[Shard, ParsedHeader]:
        path, handles, retries = shard.path, self._handles, self._retries
        identity = _opened_for_its_header(path, handles, retries)
        file_bytes = identity.size_bytes
        first = bytearray(min(LENGTH_BYTES, file_bytes))
        read_fully(handles, path, identity, 0, [memoryview(first)], retries=retries)
        # Length and file size are checked here, before memory is taken for what the file claims to hold.
        raw = memory_for(header_length(bytes(first), file_bytes=file_bytes, path=path))
        raw[:LENGTH_BYTES] = first
        read_fully(handles, path, identity, LENGTH_BYTES, [raw[LENGTH_BYTES:]], retries=retries)
        with handles.borrow(path, identity) as file:
            file.read_only_what_is_asked(False)
        parsed = self._parsed(shard, identity, raw)
        if self._kept is not None:
            self._kept.keep(path, identity.state, bytes(raw))
        return parsed

    def _parsed(self, shard: FoundShard, identity: FileIdentity, raw: Text) -> tuple[Shard, ParsedHeader]:
        with self._one_at_a_time:
            header = parse_header(raw, file_bytes=identity.size_bytes, path=shard.path)
        return Shard(shard.name, shard.path, identity, header.header_bytes, header.sha256), header


def _opened_for_its_header(path: str, handles: HandleCache, retries: int) -> FileIdentity:
    """The identity of the file as opened now. Opening may fail for a moment, like reading, and is tried as often.

    Behind a header the kernel would read ahead payload, six times as much as headers have, that few loads want."""
    left = retries
    while True:
        try:
            with handles.borrow(path, None) as file:
                file.read_only_what_is_asked(True)
                return file.identity
        except OSError as error:
            if error.errno not in _TRANSIENT or not left:
                raise
            left -= 1


def _first_failure(failed: Sequence[tuple[FoundShard, LoaderError]], total: int) -> LoaderError:
    first = failed[0][1]
    if len(failed) == 1:
        return first
    others = shown_list([shard.name for shard, _ in failed[1:]])
    words = f"{first.message} ({len(failed)} of {total} headers failed; the others: {others})"
    joined = type(first)(words, path=first.path, tensor=first.tensor, errno=first.errno)
    joined.__cause__ = first
    return joined


_ADVICE = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine is out of file handles (fs.file-max)",
}


def _listing_error(path: str, error: OSError, storage: Storage) -> LoaderError:
    if error.errno == errno.ENOENT:
        return missing_error(path, storage)
    advice = _ADVICE.get(error.errno or 0, "check the path, its rights and the mount")
    words = f"{path}: the folder cannot be listed: {_reason(error)}; {advice}"
    return ReadError(words, path=path, errno=error.errno)


def _reading_error(path: str, error: OSError, storage: Storage, what: str) -> LoaderError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return missing_error(path, storage)
    if error.errno in (errno.EISDIR, errno.EINVAL):
        return CheckpointError(f"{path}: is not a regular file ({_reason(error)})", path=path, errno=error.errno)
    advice = _ADVICE.get(error.errno or 0, "check the file's rights and the mount, then load again")
    words = f"{path}: {what} cannot be read: {_reason(error)}; {advice}"
    return ReadError(words, path=path, errno=error.errno)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno is not None else str(error)
