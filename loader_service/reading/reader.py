"""The one protocol through which the loader touches a disk, and the plain data that it speaks in.

`LocalStorage` is the real one, `FakeStorage` wraps another and adds scripted faults; both pass the same contract suite.
All methods block: they are called from reading threads, never on an event loop. All failures are plain `OSError`s with
an errno: what a failure means is decided once, in `positioned.py` and in the discovery of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

NOT_REGULAR: Final = "not a regular file"  # the text of the OSError (EINVAL) with which a storage refuses to open one


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one state of a file from another: equal identities mean that the file was not changed in between.

    Within one reading, that is: who writes to a file can restore its modification time, and a new one may get the inode
    of one that was removed. `change_ns` (ctime), which also a new link or name changes, is not compared; it is a part
    of `state`, for what is kept from one reading to another.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    change_ns: int = field(default=0, compare=False)

    @property
    def state(self) -> tuple[int, ...]:
        """Equal only if nothing at all has happened to the file in between."""
        return (self.device, self.inode, self.size_bytes, self.mtime_ns, self.change_ns)


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name of a folder. `kind` is told after following links; `link_target` is the link's text, None for no link.

    A link that leads nowhere is `dangling`. A link whose target may not be examined counts as a file, so that opening
    it tells why.
    """

    name: str
    kind: Literal["file", "directory", "dangling", "other"]
    link_target: str | None = None


class OpenFile(Protocol):
    """One open descriptor. Several threads may read from it at once; its owner closes it after the last of them."""

    @property
    def identity(self) -> FileIdentity:
        """The file's identity at the moment when it was opened."""
        ...

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        """One positioned read that fills `views` in order from the byte `offset`.

        At most 1024 views a call. Returns the bytes read: possibly fewer than wanted, 0 only at the end of the file.
        A negative offset is refused with EINVAL (the kernel would read at the current position for -1). Opened
        `direct`, the file system may want offset, addresses and sizes aligned to blocks, and refuse others with EINVAL.
        """
        ...

    def cached_bytes(self, offset: int, nbytes: int) -> int | None:
        """How many of these bytes (in whole pages) the page cache holds; None where the system does not say. Reads
        nothing ahead."""
        ...

    def read_cached(self, view: memoryview, offset: int) -> int:
        """Fills `view` as far as the page cache holds the bytes from `offset` on, without waiting for the disk. Returns
        how many these are: 0 also where the system cannot do that."""
        ...

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Asks the system to forget its cached copy of these bytes; dirty, mapped and partial pages stay. OSError if
        it cannot be asked."""
        ...

    def read_only_what_is_asked(self, only: bool) -> None:
        """Tells the system, for all who read through this descriptor, to bring in nothing beside what is asked for, or
        again what it thinks will be. A hint: where it cannot be given nothing happens."""
        ...

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Brings these bytes into the page cache and hands none over. May return before they are there. OSError with
        EOPNOTSUPP where the system cannot be asked for it, or would take no more than a part."""
        ...

    def close(self) -> None:
        """Gives the descriptor back; a second call does nothing."""
        ...


class Storage(Protocol):
    """Where checkpoints lie."""

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        """The folder's entries, sorted by name, without `.` and `..`."""
        ...

    def identify(self, path: str) -> FileIdentity:
        """The present identity of what the path leads to (links are followed)."""
        ...

    def open(self, path: str, *, direct: bool = False) -> OpenFile:
        """Opens a regular file for reading; anything else is refused (EISDIR, EINVAL) instead of blocking on it.

        `direct`: reads go past the page cache. Raises OSError with EINVAL or EOPNOTSUPP where that cannot be had.
        """
        ...


def describe_change(expected: FileIdentity, found: FileIdentity) -> str:
    """What differs between two identities of one path, for error messages; empty if nothing does."""
    parts = []
    if expected.size_bytes != found.size_bytes:
        parts.append(f"size {expected.size_bytes} -> {found.size_bytes} bytes")
    if expected.mtime_ns != found.mtime_ns:
        parts.append(f"modification time {expected.mtime_ns} -> {found.mtime_ns} ns")
    if expected.inode != found.inode:
        parts.append(f"inode {expected.inode} -> {found.inode}")
    if expected.device != found.device:
        parts.append(f"device {expected.device} -> {found.device}")
    return ", ".join(parts)
