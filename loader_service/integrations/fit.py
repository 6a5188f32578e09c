"""Pure: which tensor of a checkpoint goes where in a module, and what is wrong with that, before a byte is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from loader_service.filling import TensorSpec
from loader_service.memory.tensors import why_unwritable

Rename: TypeAlias = Callable[[str], str | None]

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")

_HELD = (
    "stays in host memory by a rule, but the module has memory for it, which would stay as it is: make that part of "
    "the module on the meta device, or take `host_resident` out of the rule"
)


@dataclass(frozen=True)
class Target:
    """A tensor of the module and all names that it has there: several if it is tied."""

    names: tuple[str, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Fit:
    """What a load is to a module. `targets` are what is filled, by the checkpoint's name; `renamed` are all names that
    come, with the module's for each.

    All else has the module's names: `held` are host-resident, `converted` differ in dtype, `problems` and `mismatches`
    are what cannot be, each with a reason; a module that loads for itself may still make something of the mismatches.
    """

    targets: Mapping[str, Target]
    renamed: Mapping[str, str]
    held: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    converted: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    mismatches: tuple[tuple[str, str], ...]


def fit(
    module: torch.nn.Module,
    specs: Mapping[str, TensorSpec],
    tables: Iterable[str],
    rename: Rename | None,
) -> Fit:
    """Lays the streamed tensors `specs` and the host-resident `tables` of a rank beside a module's state."""
    everything = module.state_dict(keep_vars=True)
    state = {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}
    identity = {name: _identity(tensor) for name, tensor in state.items()}
    problems: list[tuple[str, str]] = []
    renamed = _renamed([*specs, *tables], rename, problems)
    streamed = {name: target for name, target in renamed.items() if name in specs}
    source = {target: name for name, target in streamed.items()}
    held = frozenset(target for name, target in renamed.items() if name not in specs)

    # Of several names of one tensor the last that comes is taken, which is what load_state_dict ends up with.
    chosen = {identity[name]: name for name in state if name in source}
    together: dict[object, list[str]] = {}
    for name, same in identity.items():
        together.setdefault(same, []).append(name)
    targets = {source[name]: Target(tuple(together[same]), state[name]) for same, name in chosen.items()}

    mismatches = [(renamed[n], why) for n, t in targets.items() if (why := _mismatch(specs[n], t.tensor)) is not None]
    differ = [renamed[n] for n, t in targets.items() if not t.tensor.is_meta and t.tensor.dtype != specs[n].dtype]
    problems += [(renamed[n], why) for n, t in targets.items() if (why := _unlike(specs[n], t.tensor)) is not None]
    problems += [(name, _HELD) for name in sorted(held) if name in state and not state[name].is_meta]
    filled = {name for target in targets.values() for name in target.names}
    return Fit(
        targets=targets,
        renamed=renamed,
        held=held,
        missing=tuple(name for name in everything if name not in filled and name not in held),
        unexpected=tuple(target for target in source if target not in state),
        converted=tuple(differ),
        problems=tuple(problems),
        mismatches=tuple(mismatches),
    )


def loads_itself(module: torch.nn.Module) -> bool:
    """Whether some part of the module has its own way of taking a state dict, which only `load_state_dict` knows."""
    plain = torch.nn.Module
    return any(
        type(part)._load_from_state_dict is not plain._load_from_state_dict  # noqa: SLF001 - what modules override
        or type(part).load_state_dict is not plain.load_state_dict
        or any(getattr(part, hooks) for hooks in _HOOKS)
        for part in module.modules()
    )


def _renamed(names: Iterable[str], rename: Rename | None, problems: list[tuple[str, str]]) -> dict[str, str]:
    """The module's name for each of the checkpoint's; those that `rename` leaves out are not there."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        target = rename(name) if rename is not None else name
        if target is None:
            continue
        if target in taken:
            problems.append((target, f"`rename` gives it to both '{taken[target]}' and '{name}'"))
        taken[target] = name
        found[name] = target
    return found


def _identity(tensor: torch.Tensor) -> object:
    """Equal for names of the same elements of the same memory."""
    if tensor.is_meta or tensor.numel() == 0 or why_unwritable(tensor) is not None:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _mismatch(spec: TensorSpec, tensor: torch.Tensor) -> str | None:
    if tuple(tensor.shape) != spec.shape:
        part = "" if spec.shape == spec.full_shape else f", this rank's part of {spec.full_shape}"
        return f"size mismatch: the checkpoint's shape is {spec.shape}{part}, the module's {tuple(tensor.shape)}"
    if hasattr(tensor, "__tensor_flatten__"):  # what a wrapper has, whose elements lie in other tensors
        return f"is a {type(tensor).__name__}, made of other tensors: load into those, before they are wrapped"
    return None if tensor.is_meta else why_unwritable(tensor)


def is_small_float(dtype: torch.dtype) -> bool:
    """Whether numbers of the type (FP8, FP4, scales in E8M0) are stored to be scaled."""
    return dtype.is_floating_point and dtype.itemsize < 2


def _unlike(spec: TensorSpec, tensor: torch.Tensor) -> str | None:
    if tensor.is_meta or tensor.dtype == spec.dtype or _is_convertible(spec.dtype, tensor.dtype):
        return None
    return (
        f"the checkpoint's {spec.dtype} is not converted to {tensor.dtype}, since such numbers may mean nothing "
        f"without their scales: give the module a tensor of {spec.dtype}, or leave the name out with `rename`"
    )


def _is_convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Between numbers that mean themselves: floating-point of 16 bits and more, integers, complex ones."""
    kinds = [(dtype.is_floating_point, dtype.is_complex) for dtype in (stored, wanted)]
    return kinds[0] == kinds[1] and not is_small_float(stored) and not is_small_float(wanted)
