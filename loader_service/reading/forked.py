"""What a forked child makes anew: threads, which a fork does not copy, and locks that one of them may have held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class StartsAnew(Protocol):
    """Something with threads or locks of its own."""

    def start_anew(self) -> None:
        """Called in a forked child, before anything else runs there."""
        ...


_all: weakref.WeakSet[StartsAnew] = weakref.WeakSet()


def starts_anew_in_children(one: StartsAnew) -> None:
    """Has `start_anew` called in every process that is forked from this one, as long as the object lives."""
    _all.add(one)


def _in_child() -> None:
    for one in tuple(_all):
        one.start_anew()


os.register_at_fork(after_in_child=_in_child)
