"""A load into a plain module: what `load_state_dict` would do, with no second copy, and nothing silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import loader_service as ls
from loader_service.integrations.fit import loads_itself
from loader_service.integrations.module import LoadedModule, load_module
from tests.e2e.seats import Seat, all_of, make_seats
from tests.support.checkpoints import assert_same

Loading = Callable[..., LoadedModule]
State = dict[str, torch.Tensor]


def _blocking(config: ls.ServiceConfig, module: nn.Module, **options: Any) -> LoadedModule:
    with ls.LoaderService.blocking(config, "solo") as service:
        return load_module(service, "target", module, **options)


def _awaited(config: ls.ServiceConfig, module: nn.Module, **options: Any) -> LoadedModule:
    async def work() -> LoadedModule:
        async with ls.LoaderService(config, "solo") as service:
            return await load_module(service, "target", module, **options)

    return asyncio.run(work())


@pytest.fixture(params=[_blocking, _awaited], ids=["blocking", "async"])
def loading(request: pytest.FixtureRequest) -> Loading:
    return request.param  # type: ignore[no-any-return]


class Net(nn.Module):
    """Parameters of which some are read in place and some are copied, a buffer, a buffer in no checkpoint, a tie."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, 512)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(512, 700, bias=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def saved(module: nn.Module) -> State:
    """A module's state as a checkpoint has it: one name of a tie, that which comes first."""
    seen: set[int] = set()
    return {
        name: tensor.clone()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if not (id(tensor) in seen or seen.add(id(tensor)))  # type: ignore[func-returns-value]
    }


def checkpoint(folder: Path, state: State, load: Mapping[str, object] | None = None, **more: Any) -> ls.ServiceConfig:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    loads = {"target": dict(load or {})}
    return ls.config_from_dict({"checkpoint": {"path": str(folder)}, "loads": loads, **more})


def made(seed: int, make: Callable[[], nn.Module] = Net, *, meta: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        return make()


def places(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}


def assert_state(module: nn.Module, wanted: State) -> None:
    state = module.state_dict()
    for name, tensor in wanted.items():
        assert_same(state[name], tensor, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_memory_is_filled_where_it_lies(tmp_path: Path, loading: Loading, dtype: torch.dtype) -> None:
    state = saved(made(1).to(dtype))
    module = made(2).to(dtype)
    before, parameters = places(module), list(module.parameters())
    found = loading(checkpoint(tmp_path, state), module)
    assert_state(module, state)
    assert places(module) == before
    assert all(now is then for now, then in zip(module.parameters(), parameters, strict=True))
    assert (found.missing_keys, found.unexpected_keys, found.converted, found.left_on_meta) == ((), (), (), ())
    assert found.report.complete
    assert found.report.payload_bytes == sum(tensor.nbytes for tensor in state.values())


REPORTS: dict[str, Callable[[State], State]] = {
    "all": lambda state: state,
    "one missing": lambda state: {name: tensor for name, tensor in state.items() if name != "layers.1.bias"},
    "a buffer missing": lambda state: {name: tensor for name, tensor in state.items() if name != "steps"},
    "one unexpected": lambda state: {**state, "layers.2.bias": torch.zeros(5)},
    "a buffer of no checkpoint": lambda state: {**state, "angles": torch.zeros(4)},
    "both": lambda state: {"layers.0.wheight" if name == "layers.0.weight" else name: t for name, t in state.items()},
    "nothing of it": lambda state: {"other": torch.zeros(3)},
}


@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
@pytest.mark.parametrize("case", REPORTS)
def test_missing_and_unexpected_are_those_of_load_state_dict(tmp_path: Path, case: str, meta: bool) -> None:
    state = REPORTS[case](saved(made(1)))
    wanted = made(2).load_state_dict(state, strict=False)
    config = checkpoint(tmp_path, state)
    module = made(2, meta=meta)
    found = _blocking(config, module, strict=False)
    assert sorted(found.missing_keys) == sorted(wanted.missing_keys)
    assert sorted(found.unexpected_keys) == sorted(wanted.unexpected_keys)
    own = module.state_dict()
    assert_state(module, {name: tensor for name, tensor in state.items() if name in own})
    assert set(found.left_on_meta) == ({*wanted.missing_keys, "angles"} if meta else set())


@pytest.mark.parametrize("case", [case for case in REPORTS if case != "all"])
def test_strict_refuses_them_before_a_byte_is_read(tmp_path: Path, case: str) -> None:
    state = REPORTS[case](saved(made(1)))
    module = made(2)
    with pytest.raises(RuntimeError) as torchs:
        made(2).load_state_dict(state)
    before = saved(module)
    with pytest.raises(ls.DestinationError, match="nothing was read") as caught:
        _blocking(checkpoint(tmp_path, state), module)
    for words in ("Missing key", "Unexpected key"):
        assert (words in str(caught.value)) == (words in str(torchs.value))
    assert caught.value.tensor is not None
    assert f'"{caught.value.tensor}"' in str(torchs.value)
    assert_state(module, before)


def test_what_a_module_lacks_is_not_read_where_it_is_filled_in_place(tmp_path: Path) -> None:
    state = saved(made(1))
    config = checkpoint(tmp_path, {**state, "zz.large": torch.zeros(1 << 20)})
    found = _blocking(config, made(2), strict=False)
    assert found.unexpected_keys == ("zz.large",)
    assert found.report.read_bytes == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_another_shape_is_refused_before_a_byte_is_read(tmp_path: Path, strict: bool, meta: bool) -> None:
    state = {**saved(made(1)), "layers.0.weight": torch.zeros(64, 65)}
    module = made(2, meta=meta)
    before = None if meta else saved(module)
    with pytest.raises(ls.DestinationError, match=r"nothing was read.*'layers.0.weight' size mismatch.*64, 65.*64, 64"):
        _blocking(checkpoint(tmp_path, state), module, strict=strict)
    if before is not None:
        assert_state(module, before)


def test_a_tensor_that_is_made_of_others_is_refused(tmp_path: Path) -> None:
    module = made(2)
    assert isinstance(module, Net)
    module.frozen = nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)), requires_grad=False)  # type: ignore[no-untyped-call]
    with pytest.raises(ls.DestinationError, match=r"'frozen' is a TwoTensor, made of other tensors"):
        _blocking(checkpoint(tmp_path, saved(made(1))), module)


@pytest.mark.parametrize(
    ("stored", "own"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_another_dtype_is_converted_as_load_state_dict_does(
    tmp_path: Path, loading: Loading, stored: torch.dtype, own: torch.dtype
) -> None:
    state = saved(made(1).to(stored))
    wanted, module = made(2).to(own), made(2).to(own)
    wanted.load_state_dict(state)
    before = places(module)
    found = loading(checkpoint(tmp_path, state, staging={"capacity_bytes": "1MiB"}), module)
    assert_state(module, saved(wanted))
    assert places(module) == before
    assert set(found.converted) == set(state) - {"steps"}
    assert found.report.peak_staging_bytes <= 1 << 20  # pieces, not a second copy


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_numbers_that_need_scales_are_not_converted(tmp_path: Path, stored: torch.dtype) -> None:
    state = saved(made(1))
    state["layers.0.weight"] = state["layers.0.weight"].to(stored)
    module = made(2)
    with pytest.raises(ls.DestinationError, match=r"'layers.0.weight'.*scales"):
        _blocking(checkpoint(tmp_path, state), module, strict=False)
    assert torch.equal(module.state_dict()["layers.0.weight"], made(2).state_dict()["layers.0.weight"])


def test_a_module_on_meta_gets_the_checkpoints_tensors(tmp_path: Path, loading: Loading) -> None:
    state = saved(made(1).to(torch.bfloat16))
    module = made(2, meta=True)
    found = loading(checkpoint(tmp_path, state), module)
    assert_state(module, state)
    trains = {name: tensor.requires_grad for name, tensor in made(2).named_parameters()}
    assert {name: tensor.requires_grad for name, tensor in module.named_parameters()} == trains
    assert isinstance(module.embed, nn.Embedding)
    assert isinstance(module.embed.weight, nn.Parameter)
    assert found.left_on_meta == ("angles",)


def test_a_module_on_meta_takes_owned_tensors_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(made(1))
    config = checkpoint(tmp_path, state)
    for other in ("batches", "into"):
        monkeypatch.delattr(ls.BlockingLoad, other)
    module = made(2, meta=True)
    _blocking(config, module)
    assert_state(module, state)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_may_be_on_meta_in_part(tmp_path: Path, stored: torch.dtype) -> None:
    state = saved(made(1).to(stored))
    module = made(2)
    assert isinstance(module, Net)
    with torch.device("meta"):
        module.head = nn.Linear(512, 700, bias=False)
    before = module.embed.weight.data_ptr()
    found = _blocking(checkpoint(tmp_path, state), module)
    assert_same(module.head.weight.detach(), state["head.weight"])
    assert_same(module.embed.weight.detach(), state["embed.weight"].float())
    assert module.embed.weight.data_ptr() == before
    assert found.left_on_meta == ()


def test_the_weight_cache_is_not_written_to_through_a_module(tmp_path: Path) -> None:
    state = saved(made(1))
    config = checkpoint(tmp_path, state, cache={"capacity_bytes": "64MiB"})
    try:
        module = made(2, meta=True)
        _blocking(config, module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        again = made(2, meta=True)
        assert _blocking(config, again).report.read_bytes == 0
        assert_state(again, state)
    finally:
        ls.clear_weight_cache()


def _same_memory() -> nn.Module:
    module = Net()
    module.head.weight = nn.Parameter(module.embed.weight.data)
    return module


TIES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "one parameter": (lambda: Net(tied=True), False),
    "one parameter on meta": (lambda: Net(tied=True), True),
    "two of the same memory": (_same_memory, False),
}


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("held", ["embed.weight", "head.weight"])
def test_a_tie_is_filled_by_whichever_name_the_checkpoint_has(tmp_path: Path, tie: str, held: str) -> None:
    make, meta = TIES[tie]
    state = saved(made(1, lambda: Net(tied=True)))
    state[held] = state.pop("embed.weight")
    module = made(2, make, meta=meta)
    found = _blocking(checkpoint(tmp_path, state), module)
    assert found.missing_keys == ()
    assert isinstance(module, Net)
    for tensor in (module.embed.weight, module.head.weight):
        assert_same(tensor.detach(), state[held])
    assert module.embed.weight.data_ptr() == module.head.weight.data_ptr()
    assert (module.embed.weight is module.head.weight) == (tie != "two of the same memory")


@pytest.mark.parametrize("tie", TIES)
def test_of_a_tie_with_two_different_tensors_the_last_is_taken_as_load_state_dict_does(
    tmp_path: Path, tie: str
) -> None:
    make, meta = TIES[tie]
    state = saved(made(1))
    wanted, module = made(2, make), made(2, make, meta=meta)
    wanted.load_state_dict(state)
    _blocking(checkpoint(tmp_path, state), module)
    assert_state(module, dict(wanted.state_dict()))


def test_names_are_mapped_or_left_out(tmp_path: Path) -> None:
    state = saved(made(1))
    stored = {f"model.{name}": tensor for name, tensor in state.items()} | {"mtp.0.weight": torch.zeros(3)}
    module = made(2)
    found = _blocking(
        checkpoint(tmp_path, stored),
        module,
        rename=lambda name: name.removeprefix("model.") if name.startswith("model.") else None,
    )
    assert_state(module, state)
    assert found.unexpected_keys == ()


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    state = {**saved(made(1)), "zz": torch.zeros(3)}
    with pytest.raises(ls.DestinationError, match="`rename` gives it to both 'frozen' and 'zz'"):
        _blocking(
            checkpoint(tmp_path, state), made(2), strict=False, rename=lambda name: "frozen" if name == "zz" else name
        )


def test_prefixes_save_bytes(tmp_path: Path) -> None:
    state = saved(made(1))
    stored = {f"{stage}.{name}": tensor.clone() for stage in ("mtp.0", "mtp.10") for name, tensor in state.items()}
    module = made(2)
    config = checkpoint(tmp_path, stored, {"key_prefixes": ["mtp.0"]})
    found = _blocking(config, module, rename=lambda name: name.removeprefix("mtp.0."))
    assert_state(module, state)
    assert found.report.read_bytes == sum(tensor.nbytes for tensor in state.values())


TABLE = {"rules": [{"match": "embed.*", "host_resident": {"layout": "per_rank"}}]}


def test_a_table_is_handed_back_for_a_part_on_meta(tmp_path: Path) -> None:
    state = saved(made(1))
    module = made(2)
    assert isinstance(module, Net)
    with torch.device("meta"):
        module.embed = nn.Embedding(700, 512)
    with ls.LoaderService.blocking(checkpoint(tmp_path, state, TABLE), "solo") as service:
        found = load_module(service, "target", module)
        (source,) = found.tables.values()
        rows = torch.empty(700, 512)
        source.read_rows_into(rows, 0)
    assert list(found.tables) == ["embed.weight"]
    assert_same(rows, state["embed.weight"])
    assert (found.missing_keys, found.left_on_meta) == ((), ("embed.weight",))
    assert_state(module, {name: tensor for name, tensor in state.items() if name != "embed.weight"})


def test_a_table_that_the_module_has_memory_for_is_refused(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, saved(made(1)), TABLE)
    with pytest.raises(ls.DestinationError, match=r"'embed.weight' stays in host memory by a rule.*meta"):
        _blocking(config, made(2), strict=False)


class Normed(nn.Module):
    """Has a part with a state dict's version in it, and one whose hook renames what older checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.old = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied_too = nn.Linear(8, 8, bias=False)
        self.tied_too.weight = self.tied.weight


class Overriding(nn.Linear):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


@pytest.mark.parametrize(
    ("make", "itself"),
    [
        (lambda: nn.BatchNorm1d(3), True),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), True),
        (lambda: Overriding(3, 3), True),
        (lambda: nn.TransformerEncoderLayer(8, 2), False),
        (Net, False),
    ],
    ids=["override", "hook", "override of the whole", "layer", "plain"],
)
def test_what_loads_for_itself_is_recognised(make: Callable[[], nn.Module], itself: bool) -> None:
    assert loads_itself(nn.Sequential(nn.Linear(2, 2), make())) == itself


@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_a_module_that_loads_for_itself_is_handed_a_state_dict(tmp_path: Path, loading: Loading, meta: bool) -> None:
    torch.manual_seed(1)
    state = saved(Normed())
    state["old.weight_g"] = state.pop("old.parametrizations.weight.original0")
    state["old.weight_v"] = state.pop("old.parametrizations.weight.original1")
    del state["norm.num_batches_tracked"]
    wanted, module = made(2, Normed), made(2, Normed, meta=meta)
    report = wanted.load_state_dict(state, strict=False)
    assert report.missing_keys == ["tied_too.weight"]
    found = loading(checkpoint(tmp_path, state), module)
    assert (found.missing_keys, found.unexpected_keys) == ((), ())
    own = {name for name in module.state_dict() if not (meta and name == "norm.num_batches_tracked")}
    assert_state(module, {name: tensor for name, tensor in wanted.state_dict().items() if name in own})
    assert isinstance(module, Normed)
    assert module.tied.weight is module.tied_too.weight


def test_a_module_that_loads_for_itself_keeps_the_dtypes_of_what_has_memory(tmp_path: Path) -> None:
    state = saved(made(1, Normed).to(torch.bfloat16))
    module = made(2, Normed)
    with torch.device("meta"):
        module.conv = nn.Conv2d(3, 4, 2)
    found = _blocking(checkpoint(tmp_path, state), module)
    assert_state(module, {name: state[name].float() for name in found.converted})
    assert_same(module.conv.weight.detach(), state["conv.weight"])
    assert "norm.weight" in found.converted
    assert "conv.weight" not in found.converted


def test_strict_also_holds_for_a_module_that_loads_for_itself(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in saved(made(1, Normed)).items() if name != "conv.bias"}
    with pytest.raises(ls.DestinationError, match=r'Missing key.*"conv\.bias"'):
        _blocking(checkpoint(tmp_path, state), made(2, Normed))
    with pytest.raises(ls.DestinationError, match="size mismatch"):
        _blocking(checkpoint(tmp_path, {**state, "conv.bias": torch.zeros(5)}), made(2, Normed), strict=False)


# Rules that cut, on two ranks

SPLIT = {"rules": [{"match": "layers.*.weight", "split": {"axis": "tp", "dim": 0}}]}


class Half(nn.Module):
    """A rank's part of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 4, bias=False) for _ in range(2))


@pytest.fixture
def cut(tmp_path: Path) -> tuple[State, ls.ServiceConfig]:
    torch.manual_seed(3)
    state = {f"layers.{i}.weight": torch.randn(8, 6) for i in range(2)}
    return state, checkpoint(tmp_path, state, SPLIT, mesh={"tp": 2})


@pytest.mark.parametrize(
    "marked", [{"layers.0.weight"}, "layers.0.weight and not layers.1.weight"], ids=["one", "none"]
)
async def test_a_split_is_refused_on_all_ranks_before_a_byte_is_read(
    cut: tuple[State, ls.ServiceConfig], tmp_path: Path, marked: Any
) -> None:
    _, config = cut
    seats = make_seats(2)

    async def work(seat: Seat) -> None:
        async with seat.service(config) as service:
            await load_module(service, "target", Half(), presharded=marked)

    refused = "layers.1.weight" if isinstance(marked, set) else "layers.0.weight"
    for result in await all_of(seats, work):
        assert isinstance(result, ls.ConfigError)
        for text in (
            f"'{refused}'",
            "loads.target.rules[0].split",
            "(4, 6)",
            "(8, 6)",
            "presharded",
            "Take the rule",
        ):
            assert text in str(result), text
        assert result.tensor == refused
    header_end = header_bytes(tmp_path / "model.safetensors")
    assert all(call.offset < header_end for seat in seats for call in seat.storage.reads)


def header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.parametrize("marked", [{"layers.0.weight", "layers.1.weight"}, lambda name: name.endswith(".weight")])
async def test_a_part_goes_where_the_parameter_is_marked(cut: tuple[State, ls.ServiceConfig], marked: Any) -> None:
    state, config = cut
    halves = [Half(), Half()]

    async def work(seat: Seat) -> LoadedModule:
        async with seat.service(config) as service:
            return await load_module(service, "target", halves[seat.rank], presharded=marked)

    for result in await all_of(make_seats(2), work):
        assert isinstance(result, LoadedModule), result
    for name, whole in state.items():
        assert_same(torch.cat([half.state_dict()[name] for half in halves]), whole)


def test_a_split_that_leaves_everything_is_none(tmp_path: Path) -> None:
    state = saved(made(1))
    module = made(2)
    _blocking(checkpoint(tmp_path, state, SPLIT, mesh={"tp": 1}), module)
    assert_state(module, state)
