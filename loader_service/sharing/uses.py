"""Which blocks of shared memory a consumer is at: taken in order, with several uses each, and given back once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

_END: Final = 1 << 62


class BlockUses:
    """The uses of one consumer, begun in plan order. Pure bookkeeping, for one thread.

    `blocks`, ascending, are those that are kept for this consumer; `done` is called once for each, in any order: when
    it has gone past the block and no use of it is left. So a block that it never uses is given back, too.
    """

    def __init__(self, blocks: Iterable[int], done: Callable[[int], None]) -> None:
        self._ahead = deque(blocks)
        self._uses: dict[int, int] = {}
        self._done = done

    def begin(self, block: int) -> None:
        """One more use of `block`; all before it will not be begun again."""
        self._pass(block)
        self._uses[block] = self._uses.get(block, 0) + 1

    def end(self, block: int) -> None:
        """A use that was begun is over."""
        self._uses[block] -= 1
        self._settle(block)

    def finish(self) -> None:
        """No use will be begun any more."""
        self._pass(_END)

    def _pass(self, block: int) -> None:
        while self._ahead and self._ahead[0] < block:
            passed = self._ahead.popleft()
            self._uses.setdefault(passed, 0)
            self._settle(passed)

    def _settle(self, block: int) -> None:
        going_on = bool(self._ahead) and self._ahead[0] <= block
        if self._uses[block] == 0 and not going_on:
            del self._uses[block]
            self._done(block)
