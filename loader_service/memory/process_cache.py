"""The raw weight cache of this process: one for all services in it."""

from __future__ import annotations

import os
import threading

from loader_service.memory.cache import WeightCache


class _OfProcess:
    """This process's cache, made at its first use."""

    lock = threading.Lock()
    cache: WeightCache | None = None
    watches_forks = False

    @classmethod
    def get(cls) -> WeightCache:
        with cls.lock:
            if cls.cache is None:
                if not cls.watches_forks:
                    os.register_at_fork(after_in_child=cls.forget)
                    cls.watches_forks = True
                cls.cache = WeightCache()
            return cls.cache

    @classmethod
    def forget(cls) -> None:
        """In a forked child: what it keeps would stay in memory after the parent has let go of it, and another thread
        of the parent may have held the locks."""
        cls.lock, cls.cache = threading.Lock(), None


def weight_cache() -> WeightCache:
    """The cache of this process. A forked child has one of its own, empty at first."""
    return _OfProcess.get()


def clear_weight_cache() -> None:
    """Empties the raw weight cache of this process: memory that no tensor refers to goes back to the system.

    Open loads and tensors that were handed over are not affected. Blocks, up to 0.2 s a GiB.
    """
    weight_cache().clear()
