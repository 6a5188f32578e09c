"""`compare`: what two manifests, of what ranks got or of checkpoints, say of the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loader_service.checkpoint.refusal import shown
from loader_service.cli.checkpoint_manifest import checkpoint_manifest, is_of_a_checkpoint
from loader_service.cli.manifest_json import ManifestFile, stored_of
from loader_service.cli.output import print_document
from loader_service.errors import EXIT_CHECKPOINT, EXIT_OK

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_MOST_ROWS: Final = 20
_MOST_CHARACTERS: Final = 200
_ADVICE: Final = "two files that `load --manifest` or `manifest` has written"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says of one tensor; the shape as the file's header counts it."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def as_dict(self) -> dict[str, object]:
        return {"dtype": self.dtype, "shape": list(self.shape), "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two manifests, A and B. `differ` and `missing` (in A alone) are in A's order, `extra` (in B alone) in B's.

    `compared` counts the names that both have.
    """

    compared: int
    differ: tuple[tuple[str, Entry, Entry], ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not (self.differ or self.missing or self.extra)

    def as_dict(self) -> dict[str, object]:
        return {
            "same": self.same,
            "compared": self.compared,
            "differ": [{"name": name, "a": a.as_dict(), "b": b.as_dict()} for name, a, b in self.differ],
            "missing": list(self.missing),
            "extra": list(self.extra),
        }


def compare_manifests(path_a: Path, path_b: Path, *, as_json: bool) -> int:
    """Prints how two manifests differ. Returns the exit code: 0 if they do not, else 3, like a failed `--verify`."""
    found = compare(read_manifest(path_a), read_manifest(path_b))
    if as_json:
        print_document(found.as_dict())
    else:
        _show(found)
    return EXIT_OK if found.same else EXIT_CHECKPOINT


def compare(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> Comparison:
    """How the tensors of two manifests differ."""
    both = [name for name in a if name in b]
    return Comparison(
        compared=len(both),
        differ=tuple((name, a[name], b[name]) for name in both if a[name] != b[name]),
        missing=tuple(name for name in a if name not in b),
        extra=tuple(name for name in b if name not in a),
    )


def read_manifest(path: Path) -> dict[str, Entry]:
    """A manifest's entries in its order. Raises ConfigError where it cannot be read, or is anything else."""
    file = ManifestFile(path, _ADVICE)
    top = file.read()
    if is_of_a_checkpoint(top):
        tensors = checkpoint_manifest(file, top).tensors
        return {name: Entry(tensor.dtype, tensor.shape, tensor.sha256) for name, tensor in tensors.items()}
    return {name: _entry(file, name, value) for name, value in top.items()}


def _entry(file: ManifestFile, name: str, value: object) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "sha256"}:
        raise file.refusal("must be an object with dtype, shape and sha256, and nothing else", tensor=name)
    return Entry(*stored_of(file, name, value))


def _show(found: Comparison) -> None:
    from loader_service.cli.render import show, table

    made = table("Different tensors", "tensor", "<in what", "<A", "<B")
    for name, a, b in found.differ[:_MOST_ROWS]:
        made.add_row(*map(_plain, (shown(name), _respects(a, b), _described(a), _described(b))))
    _say_how_many_more(made, len(found.differ))
    for words, names in (("in A alone", found.missing), ("in B alone", found.extra)):
        for name in names[:_MOST_ROWS]:
            made.add_row(_plain(shown(name)), words)
        _say_how_many_more(made, len(names))
    verdict = "The same" if found.same else "Not the same"
    counts = f"{len(found.differ)} differ; {len(found.missing)} are in A alone, {len(found.extra)} in B alone"
    show(*([] if found.same else [made]), f"{verdict}: of {found.compared} tensors that both have {counts}.")


def _say_how_many_more(made: Table, count: int) -> None:
    if count > _MOST_ROWS:
        made.add_row(f"and {count - _MOST_ROWS} more")


def _respects(a: Entry, b: Entry) -> str:
    """In what two entries differ, in words."""
    found = {"dtype": a.dtype != b.dtype, "shape": a.shape != b.shape, "bytes": a.sha256 != b.sha256}
    return ", ".join(name for name, differs in found.items() if differs)


def _described(entry: Entry) -> str:
    shape = str(list(entry.shape))
    if len(shape) > _MOST_CHARACTERS:
        shape = f"{shape[:_MOST_CHARACTERS]}... ({len(entry.shape)} dimensions)"
    return f"{entry.dtype} {shape} {entry.sha256[:12]}"


def _plain(text: str) -> Text:
    """Text as it stands: in a string rich would see markup and the names of emoji."""
    from rich.text import Text

    return Text(text)
