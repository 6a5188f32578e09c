"""A load straight into a plain `torch.nn.Module`: `load_module(service, "target", module)`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import overload

import torch

from loader_service.batches import Batch
from loader_service.errors import DestinationError
from loader_service.integrations.fit import Rename, Target, fit, loads_itself
from loader_service.integrations.splits import Presharded, refuse_splits
from loader_service.report import LoadReport
from loader_service.rows import RowSource
from loader_service.service import BlockingLoaderService, LoaderService
from loader_service.stream import BlockingLoad, Load

SHOWN_NAMES = 10

_HOW_TO_MARK = ", or, where the module's tensor is this rank's part already, name it in `presharded`"


@dataclass(frozen=True)
class LoadedModule:
    """What became of a module. All names are the module's.

    `missing_keys` and `unexpected_keys` are those of `load_state_dict`, but for names that are tied to a loaded one:
    they are not missing. `converted` were loaded from another dtype. `left_on_meta` have no memory: buffers that no
    checkpoint holds, and what was missing. `tables` are host-resident and were not read: sources until the service
    closes. `report` is the load's.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    converted: tuple[str, ...]
    left_on_meta: tuple[str, ...]
    tables: Mapping[str, RowSource]
    report: LoadReport


@dataclass(frozen=True)
class _Options:
    strict: bool
    rename: Rename | None
    presharded: Presharded
    device: torch.device


@overload
def load_module(
    service: LoaderService,
    load_name: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    presharded: Presharded = (),
    device: torch.device | str = "cpu",
) -> Awaitable[LoadedModule]: ...
@overload
def load_module(
    service: BlockingLoaderService,
    load_name: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    presharded: Presharded = (),
    device: torch.device | str = "cpu",
) -> LoadedModule: ...
def load_module(
    service: LoaderService | BlockingLoaderService,
    load_name: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    presharded: Presharded = (),
    device: torch.device | str = "cpu",
) -> LoadedModule | Awaitable[LoadedModule]:
    """Opens a load and fills the module's parameters and persistent buffers; collective. To be awaited with the async
    service, a plain call with the blocking one.

    Tensors that have memory are filled in place; another dtype is converted, as `load_state_dict` does. Those on the
    meta device get tensors of the checkpoint's dtype on `device`, as with `assign=True`, and stay tied. A module with
    hooks or a `_load_from_state_dict` of its own gets a whole state dict, beside what it has.

    `rename` gives the module's name for one of the checkpoint's, None to leave it out. `presharded` are names of the
    checkpoint, or a function of one, whose tensor in the module is this rank's part; `split` rules on others are a
    ConfigError. `strict`: DestinationError if anything is missing or unexpected. That, shapes, and dtypes that cannot
    be converted are found before a byte is read; only a module that loads for itself tells afterwards. After another
    error the module's contents are undefined.
    """
    options = _Options(strict, rename, presharded, torch.device(device))
    if isinstance(service, BlockingLoaderService):
        return _load(service, load_name, module, options)
    return _aload(service, load_name, module, options)


def _load(service: BlockingLoaderService, load_name: str, module: torch.nn.Module, options: _Options) -> LoadedModule:
    with service.open(load_name) as load:
        work = _Work(load, service, module, options)
        if work.in_place:
            load.into(work.destinations())
        elif work.owned:
            for name, tensor in load:
                work.take(name, tensor)
        else:
            work.make_memory()
            for batch in load.batches():
                work.take_batch(batch)
        work.finish()
    return work.result()


async def _aload(service: LoaderService, load_name: str, module: torch.nn.Module, options: _Options) -> LoadedModule:
    async with service.open(load_name) as load:
        work = _Work(load, service, module, options)
        if work.in_place:
            await load.into(work.destinations())
        elif work.owned:
            async for name, tensor in load:
                work.take(name, tensor)
        else:
            work.make_memory()
            async for batch in load.batches():
                work.take_batch(batch)
        work.finish()
    return work.result()


class _Work:
    """One load into one module, of either face: checks, then takes what comes, then puts it where it belongs.

    `in_place`: every tensor is filled where it lies. `owned`: none is, each becomes the module's as it comes. Else
    pieces are copied, which converts them, so that no more memory than staging's is needed on top.
    """

    def __init__(
        self,
        load: Load | BlockingLoad,
        service: LoaderService | BlockingLoaderService,
        module: torch.nn.Module,
        options: _Options,
    ) -> None:
        refuse_splits(load, service.rank, "a module", options.presharded, how_to_mark=_HOW_TO_MARK)
        plan = load.plan.for_rank(service.rank)
        names = [plan.name(i) for i in range(len(plan)) if i not in plan.tables]
        self._load = load
        self._module = module
        self._options = options
        self._specs = {name: load.spec(name) for name in names}
        self._fit = fit(module, self._specs, load.tables, options.rename)
        self._by_itself = loads_itself(module)
        self._shared_memory = service.config.cache.on
        self._taken: dict[str, torch.Tensor] = {}
        targets = self._fit.targets.values()
        on_meta = [target.tensor.is_meta for target in targets]
        self.owned = self._by_itself or (len(on_meta) > 0 and all(on_meta))
        self.in_place = not self.owned and not self._fit.converted and not any(on_meta)
        if self._by_itself:  # it says itself what is missing, once it was handed all
            self._check(self._fit.problems, (), ())
        else:
            problems = (*self._fit.problems, *self._fit.mismatches)
            self._check(problems, self._fit.missing, self._fit.unexpected)
        self._missing, self._unexpected = self._fit.missing, self._fit.unexpected

    def destinations(self) -> dict[str, torch.Tensor]:
        return {name: target.tensor.detach() for name, target in self._fit.targets.items()}

    def make_memory(self) -> None:
        """Somewhere for every piece: the module's own tensors, and new ones for those that have none."""
        for name, target in self._fit.targets.items():
            spec = self._specs[name]
            new = target.tensor.is_meta
            device = self._options.device
            self._taken[name] = (
                torch.empty(spec.shape, dtype=spec.dtype, device=device) if new else target.tensor.detach()
            )

    def take(self, name: str, value: torch.Tensor | RowSource) -> None:
        """A tensor that owns its memory; with the raw weight cache others see that memory too, so it is copied."""
        wanted = name in (self._fit.renamed if self._by_itself else self._fit.targets)
        if isinstance(value, torch.Tensor) and wanted:
            moved = value.to(self._options.device)
            self._taken[name] = moved.clone() if self._shared_memory and moved is value else moved

    def take_batch(self, batch: Batch) -> None:
        with batch, torch.no_grad():
            for piece in batch:
                if (destination := self._taken.get(piece.name)) is not None:
                    destination[piece.index].copy_(piece.tensor)

    def finish(self) -> None:
        if self._by_itself:
            self._hand_over()
            return
        for name, target in self._fit.targets.items():
            if target.tensor.is_meta:
                _assign(self._module, target, self._taken[name])

    def result(self) -> LoadedModule:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        renamed = self._fit.renamed
        return LoadedModule(
            missing_keys=self._missing,
            unexpected_keys=self._unexpected,
            converted=self._fit.converted,
            left_on_meta=tuple(name for name, tensor in tensors if tensor.is_meta),
            tables={renamed[name]: source for name, source in self._load.tables.items() if name in renamed},
            report=self._load.report,
        )

    def _hand_over(self) -> None:
        """For a module that loads for itself: it gets a state dict, and says what is missing."""
        fit, module = self._fit, self._module
        state = {fit.renamed[name]: tensor for name, tensor in self._taken.items()}
        tensors = dict(module.state_dict(keep_vars=True))
        state |= {name: state[name].to(tensors[name].dtype) for name in fit.converted}
        on_meta = any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors.values())
        try:
            missing, unexpected = module.load_state_dict(state, strict=False, assign=on_meta)
        except RuntimeError as error:
            raise DestinationError(f"load '{self._load.name}': {error}") from error
        for name, target in fit.targets.items():
            if on_meta and len(target.names) > 1:
                _assign(module, target, module.state_dict(keep_vars=True)[fit.renamed[name]])
        filled = {name for target in fit.targets.values() for name in target.names}
        self._missing = tuple(name for name in missing if name not in filled and name not in fit.held)
        self._unexpected = tuple(unexpected)
        self._check((), self._missing, self._unexpected)

    def _check(
        self, problems: tuple[tuple[str, str], ...], missing: tuple[str, ...], unexpected: tuple[str, ...]
    ) -> None:
        """Raises DestinationError for problems, and where `strict` for names without a counterpart."""
        texts = [f"'{name}' {problem}" for name, problem in problems]
        if self._options.strict:
            texts = [*_listed("Missing", missing), *_listed("Unexpected", unexpected), *texts]
        if not texts:
            return
        shown = "; ".join(texts[:SHOWN_NAMES])
        more = f"; and {len(texts) - SHOWN_NAMES} more" if len(texts) > SHOWN_NAMES else ""
        first = next(iter((*(name for name, _ in problems), *missing, *unexpected)))
        when = "" if self._taken else "nothing was read, since "
        raise DestinationError(
            f"load '{self._load.name}': {when}it does not fit {type(self._module).__name__}: {shown}{more}",
            tensor=first,
        )


def _listed(what: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(f'"{name}"' for name in names[:SHOWN_NAMES])
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return [f"{what} key(s): {shown}{more}"]


def _assign(module: torch.nn.Module, target: Target, tensor: torch.Tensor) -> None:
    """Puts a tensor in the place of one without memory, under all of its names, so that it stays tied."""
    if isinstance(target.tensor, torch.nn.Parameter):
        trains = target.tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        tensor = torch.nn.Parameter(tensor, requires_grad=trains)
    for name in target.names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, tensor)
