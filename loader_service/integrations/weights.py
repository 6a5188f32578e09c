"""A load as a mapping of names to tensors, for engines that ask by name, from any thread, and say what they have used.

`weights["model.norm.weight"]` waits until it has come, `weights.under("model.layers.3")` has the names of a layer
without the prefix, `weights.mark_consumed("model.layers.3")` frees its memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from types import TracebackType
from typing import Self

from loader_service.agreement.group import GroupChoice
from loader_service.config.schema import ServiceConfig
from loader_service.integrations.weight_stream import Check, WeightStream, drop, join_dropped
from loader_service.reading.reader import Storage
from loader_service.report import LoadReport
from loader_service.service import LoaderService
from loader_service.stream import Weight


class Weights(MutableMapping[str, Weight]):
    """Tensors by name, each until it is consumed: `del`, `pop`, `clear`, `mark_consumed`. For any number of threads.

    Only taking a value waits: `weights[name]`, `get`, `pop`, `items`, `values`. Names are in plan order.
    """

    _stream: WeightStream
    _inside = ""

    def __getitem__(self, name: str) -> Weight:
        """The tensor (or `RowSource`), as soon as it has come. KeyError for a name that this rank does not take, or
        that is consumed; StateError if the load was left before it came; else what ended the load."""
        return self._stream.wait_for(self._inside + name)

    def __setitem__(self, name: str, value: Weight) -> None:
        """Puts a value of the caller's there, in place of what has come or will."""
        self._stream.put(self._inside + name, value)

    def __delitem__(self, name: str) -> None:
        if not self._stream.consume([self._inside + name]):
            raise KeyError(self._inside + name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._stream.has(self._inside + name)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._inside) for name in self._stream.names(self._inside))

    def __len__(self) -> int:
        return len(self._stream.names(self._inside))

    def items(self) -> ItemsView[str, Weight]:
        """(name, tensor), as they come; names that others consume meanwhile are left out."""
        return _Items(self)

    def values(self) -> ValuesView[Weight]:
        return _Values(self)

    def under(self, prefix: str) -> PrefixView:
        """The names below a prefix, without it. Whole dotted segments: `mtp.1` and `mtp.1.` mean the same, and never
        `mtp.10`. It costs nothing, and what is consumed through it is consumed."""
        return PrefixView(self, self._inside + prefix)

    def mark_consumed(self, prefix: str) -> int:
        """Consumes the tensor of that name and all below it, without waiting; how many. Their memory is free as soon as
        nobody else refers to it. What had not come is dropped as it comes, or not read at all."""
        root = self._inside + prefix.removesuffix(".")
        return self._stream.consume([root, *self._stream.names(root + ".")])

    def clear(self) -> None:
        """Consumes all that is left, without waiting."""
        self._stream.consume(self._stream.names(self._inside))


class ConsumableWeights(Weights):
    """The tensors of one load by name, each until it is consumed.

    Opens a service and the load, on a thread of its own: making it is collective, and so is leaving, by `with`, by
    `close`, or by itself once everything has come and no `RowSource` is left. Tensors come in plan order, and only as
    far as somebody waits for one: what came on the way is held until it is consumed, and no more is read beyond that
    than `staging.capacity_bytes`. Only where ranks of the node share that memory (`reads.sharing`), more is taken while
    nobody asks for long, since others may wait for its slots.

    `group`, `coords` and `storage` are a service's. `check` is called with the open load and this rank before anything
    is read; what it raises is raised here. An error of the load is raised by every thread that waits, or asks later,
    and by `close`. With the last reference gone the load is left as by a `break`, in the background; the next one of
    this process waits for that.
    """

    def __init__(
        self,
        config: ServiceConfig,
        load: str,
        group: GroupChoice = None,
        coords: Mapping[str, int] | None = None,
        *,
        check: Check | None = None,
        storage: Storage | None = None,
        attach: bool = False,
    ) -> None:
        join_dropped()
        self._stream = WeightStream(LoaderService(config, group, coords, storage=storage, attach=attach), load, check)
        self._dropping = weakref.finalize(self, drop, self._stream)
        self._dropping.atexit = False  # streams end before the process does, and are waited for
        try:
            self._stream.start()
        except BaseException:  # also an interrupt, while it is still opening
            self._dropping()
            raise

    @property
    def held_bytes(self) -> int:
        """Bytes of tensors that have come and are not consumed."""
        return self._stream.held_bytes()

    @property
    def report(self) -> LoadReport:
        """The load's: so far while it is open, finally once it was left."""
        assert self._stream.load is not None
        return self._stream.load.report

    def close(self) -> None:
        """Leaves the load, as by a `break` if something has not come, and waits for that. Threads that still wait for a
        tensor get a StateError. Raises what ended the load on all ranks."""
        self._leave(None)
        if self._stream.error is not None:
            raise self._stream.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
            return
        self._leave(exc)
        exc.__traceback__ = traceback  # without the frames of the thread that told the other ranks

    def _leave(self, error: BaseException | None) -> None:
        self._stream.leave(error)
        self._dropping()  # also where the wait for its end is interrupted
        self._stream.join()


class PrefixView(Weights):
    """The part of a mapping below a prefix, under names without it."""

    def __init__(self, whole: Weights, prefix: str) -> None:
        self._whole = whole  # lives as long as a view of it
        self._stream = whole._stream  # noqa: SLF001 - a part of it
        self._inside = prefix.removesuffix(".") + "."


class _Items(ItemsView[str, Weight]):
    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        for name in self._weights:
            with contextlib.suppress(KeyError):
                yield name, self._weights[name]


class _Values(ValuesView[Weight]):
    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._weights = weights

    def __iter__(self) -> Iterator[Weight]:
        return (value for _, value in _Items(self._weights))
