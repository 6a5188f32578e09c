"""How this floor words a refusal: one CheckpointError that carries the file, the tensor and the cause."""

from __future__ import annotations

from typing import Final

from loader_service.errors import CheckpointError

_SHOWN_CHARACTERS: Final = 200


def shown(text: str) -> str:
    """A name as a message may hold it: quoted, control characters and lone surrogates escaped, clipped.

    Names come from the file and are hostile: one may be megabytes long, or hold a terminal's escape codes.
    """
    if len(text) <= _SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:_SHOWN_CHARACTERS]!r}... ({len(text)} characters)"


def shown_list(names: list[str], limit: int = 8) -> str:
    """The first `limit` names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more


def refusal(path: str, cause: str, *, tensor: str | None = None) -> CheckpointError:
    """The error to raise about a file's content. Errors cross ranks, so a monstrous name is clipped in both places."""
    if tensor is None:
        return CheckpointError(f"{path}: {cause}", path=path)
    attribute = tensor if len(tensor) <= _SHOWN_CHARACTERS else shown(tensor)
    return CheckpointError(f"{path}: tensor {shown(tensor)}: {cause}", path=path, tensor=attribute)
