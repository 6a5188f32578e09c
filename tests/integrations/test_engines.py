"""Engines load through the adapters: their own loaders do all else, and ranks that fail, fail together."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import loader_service as ls
from loader_service.integrations import sglang, tensorrt_llm, vllm
from loader_service.integrations.engines import EngineLoad
from tests.docs.documents import ROOT
from tests.integrations import renderings
from tests.integrations.renderings import LoadConfig, RankMapping, SGLangLoadConfig, TakingModel
from tests.support.checkpoints import Checkpoint, assert_same, write_checkpoint
from tests.support.ranks import Rank, run_ranks

ENTRANCES: dict[str, Callable[[], object]] = {
    "vllm": vllm.register,
    "sglang": sglang.register,
    "tensorrt_llm": tensorrt_llm.checkpoint_loader,
}
CUT = {"match": "*.up.weight", "split": {"axis": "tp", "dim": 0}}
BY_STAGE = {"match": "layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 2, 4]}}


@pytest.fixture(autouse=True)
def fresh_adapters() -> Iterator[None]:
    """What the adapters keep of an engine is of this test's rendering."""
    kept = (vllm._register_once, sglang.register, sglang.loader_class, tensorrt_llm._weight_loader_class)
    yield
    for cached in kept:
        cached.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    shapes = {f"layers.{i}.{part}.weight": ("F32", (32, 16)) for i in range(4) for part in ("down", "up")}
    return write_checkpoint(
        tmp_path_factory.mktemp("engines"), {"model.safetensors": {**shapes, "norm": ("F32", (8,))}}
    )


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, (_, shape, _) in checkpoint.tensors.items()}


def assert_loaded(model: TakingModel, checkpoint: Checkpoint) -> None:
    for name, parameter in model.state().items():
        assert_same(parameter, checkpoint.tensor(name), name)


def written(folder: Path, checkpoint: Checkpoint, load: dict[str, object], **sections: object) -> str:
    """A configuration file: the load is both the target and a draft that has layer 3 alone."""
    loads = {"target": load, "draft": {"key_prefixes": ["layers.3"]}}
    path = folder / "loader.yaml"
    path.write_text(yaml.safe_dump({"checkpoint": {"path": str(checkpoint.folder)}, "loads": loads, **sections}))
    return str(path)


# Without any engine


@pytest.mark.parametrize("engine", ENTRANCES)
def test_an_adapter_can_be_imported_without_its_engine_and_then_says_what_is_missing(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(ls.ConfigError, match=rf"{engine}\b.*install"):
        ENTRANCES[engine]()
    with pytest.raises(ls.ConfigError, match="install sglang"):
        monkeypatch.setitem(sys.modules, "sglang", None)
        sglang.loader_class()


def test_the_entry_points_name_what_there_is() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {
        group: EntryPoint("loader_service", named["loader_service"], group).load() for group, named in groups.items()
    }
    assert found == {"vllm.general_plugins": vllm.plug_in, "sglang.srt.plugins": sglang.register}


def test_vllm_goes_on_where_it_knows_no_plug_ins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renderings.vllm(monkeypatch, {})
    monkeypatch.delattr("vllm.model_executor.model_loader.register_model_loader")
    vllm.plug_in()
    assert "register_model_loader" in caplog.text


WRONG: dict[str, tuple[object, str]] = {
    "an unknown key": ({"confg": "a.yaml"}, "'confg'; it takes config, load"),
    "no dictionary": ("loader.yaml", "is 'loader.yaml'"),
    "no text": ({"load": 3}, "load is 3, not a text"),
    "one glob": ({"presharded": "*"}, "not a list of globs"),
    "no switch": ({"row_sources": "yes"}, "not true or false"),
    "no path": ({"config": 3}, "config is 3, not a path"),
    "no folder": ({}, "the model is '/folder', which is no folder of this machine"),
    "no file": ({"config": "no/such.yaml"}, "no/such.yaml"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_extra_configuration_is_refused(case: str) -> None:
    options, words = WRONG[case]
    with pytest.raises(ls.ConfigError, match=re.escape(words)):
        EngineLoad.of("an engine", options, "/folder")


def test_the_draft_has_a_load_of_its_own_where_one_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = {"config": written(tmp_path, checkpoint, {})}
    cases = [(options, False), (options, True), (options | {"draft_load": "draft"}, False)]
    cases += [(options | {"draft_load": "draft"}, True)]
    names = [EngineLoad.of("it", given, "", draft=draft).load for given, draft in cases]
    assert names == ["target", "target", "target", "draft"]


MESHES: dict[str, tuple[dict[str, int] | None, dict[str, int] | None]] = {
    "none": (None, None),
    "axes that the engine has": ({"pp": 2, "tp": 2}, {"pp": 1, "tp": 0}),
    "without the replicas": ({"tp": 2}, {"tp": 0}),
    "axes that it lacks": ({"pp": 2, "world": 2}, None),
}


@pytest.mark.parametrize("case", MESHES)
def test_a_rank_stands_in_the_mesh_where_the_engine_has_it(case: str) -> None:
    mesh, wanted = MESHES[case]
    options = {"config": {"checkpoint": {"path": "/x"}, "loads": {"target": {}}, **({"mesh": mesh} if mesh else {})}}
    load = EngineLoad.of("it", options, "")
    assert load.coords({"dp": (0, 2), "pp": (1, 2), "tp": (0, 2)}) == wanted
    if wanted:
        with pytest.raises(ls.ConfigError, match="mesh: tp is 2, but it runs with tp 4"):
            load.coords({"pp": (1, 2), "tp": (0, 4)})


async def test_what_a_resident_service_keeps_is_not_read(checkpoint: Checkpoint) -> None:
    sections = {"loads": {"target": {}}, "serve": {"keep": ["target"], "socket": f"@engines-{os.getpid()}"}}
    given = {"checkpoint": {"path": str(checkpoint.folder)}, **sections}
    load = EngineLoad.of("it", {"config": given, "attach": True}, "")
    async with ls.ResidentService(load.config, "solo") as service:
        await service.fill()

        def take() -> dict[str, Any]:
            with load.weights("solo", {}) as weights:
                return dict(weights)

        found = await asyncio.to_thread(take)
        assert service.status().attached_total == 1
        (told,) = service.status().worker_loads
    assert told.report is not None
    assert told.report["read_bytes"] == 0
    for name in checkpoint.tensors:
        assert_same(found[name], checkpoint.tensor(name), name)


# vLLM


def vllm_config(**more: Any) -> Any:
    return SimpleNamespace(**{"model": "", "quantization": None, "runner_type": "generate", **more})


def test_vllm_loads_the_models_folder_without_any_configuration(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = renderings.vllm(monkeypatch, {})
    vllm.plug_in()
    vllm.plug_in()  # vLLM may call it again
    loader = loading.get_model_loader(LoadConfig("loader_service"))
    made = vllm_config(model=str(checkpoint.folder), make=lambda: TakingModel(shapes_of(checkpoint)))
    model = loader.load_model(None, made)
    assert_loaded(model, checkpoint)
    assert not model.training
    for parameter in model.parameters():
        parameter.zero_()
    loader.load_weights(model, made)
    assert_loaded(model, checkpoint)
    assert dict(loader.get_all_weights(made, model)).keys() == checkpoint.tensors.keys()  # what a reload asks for


def test_vllm_says_what_is_missing_and_a_draft_gets_its_own_load(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = renderings.vllm(monkeypatch, {"tp": (0, 1), "pp": (0, 1)})
    vllm.register()
    extra = {"config": written(tmp_path, checkpoint, {"skip": ["norm"]}), "draft_load": "draft"}
    loader = loading.get_model_loader(LoadConfig("loader_service", extra))
    with pytest.raises(ValueError, match=r"not initialized.*p8") as missing:
        loader.load_weights(TakingModel(shapes_of(checkpoint)), vllm_config())
    assert missing.type is ValueError  # vLLM's own
    with pytest.raises(KeyError, match="norm"):
        loading.get_model_loader(LoadConfig("loader_service")).load_weights(
            TakingModel({n: s for n, s in shapes_of(checkpoint).items() if n != "norm"}),
            vllm_config(model=str(checkpoint.folder)),
        )
    draft = TakingModel({name: shape for name, shape in shapes_of(checkpoint).items() if name.startswith("layers.3")})
    loader.load_weights(draft, vllm_config(runner_type="draft"))
    assert_loaded(draft, checkpoint)
    draft.secondary_weights = ["another"]  # type: ignore[assignment]
    with pytest.raises(ls.ConfigError, match="TakingModel takes weights from further checkpoints"):
        loader.load_weights(draft, vllm_config())


def test_a_draft_under_pipeline_parallelism_is_the_last_stages_alone() -> None:
    group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group="the stage's")
    for groups, wanted in (({"pp": group, "tp": group}, "the stage's"), ({"tp": group}, None)):
        assert vllm._group(groups, draft=True) == wanted
        assert vllm._group(groups, draft=False) is None


def test_rules_that_cut_are_refused_unless_the_parameter_is_marked(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = renderings.vllm(monkeypatch, {"tp": (1, 2)})
    vllm.register()
    config = written(tmp_path, checkpoint, {"rules": [CUT]}, mesh={"tp": 2})
    monkeypatch.setattr(vllm, "_group", lambda groups, draft: "solo")  # one of two ranks, for its part alone
    shapes = {n: (16, 16) if n.endswith("up.weight") else s for n, s in shapes_of(checkpoint).items()}
    model = TakingModel(shapes)
    for marked, refused in (([], "layers.0.up.weight"), (["layers.[012].*"], "layers.3.up.weight")):
        loader = loading.get_model_loader(LoadConfig("loader_service", {"config": config, "presharded": marked}))
        with pytest.raises(ls.ConfigError, match=rf"'{refused}' is cut by .*vLLM takes whole tensors.*presharded"):
            loader.load_weights(model, vllm_config())
    assert not any(parameter.any() for parameter in model.parameters())
    extra = {"config": config, "presharded": ["*.up.weight"]}
    loading.get_model_loader(LoadConfig("loader_service", extra)).load_weights(model, vllm_config())
    assert_same(model.state()["layers.2.up.weight"], checkpoint.tensor("layers.2.up.weight")[16:])


def test_a_table_is_refused_unless_the_model_takes_row_sources(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = renderings.vllm(monkeypatch, {})
    vllm.register()
    rule = {"match": "norm", "host_resident": {"layout": "per_rank"}}
    config = written(tmp_path, checkpoint, {"rules": [rule]})

    class Reading(TakingModel):
        def load_weights(self, weights: Any) -> Any:
            found = dict(weights)
            source = found.pop("norm")
            rows = torch.empty(source.shape, dtype=source.dtype)
            source.read_rows_into(rows, 0)
            return super().load_weights(iter({**found, "norm": rows}.items()))

    model = Reading(shapes_of(checkpoint))
    with pytest.raises(ls.ConfigError, match=r"'norm' stays in host memory.*row_sources"):
        loading.get_model_loader(LoadConfig("loader_service", {"config": config})).load_weights(model, vllm_config())
    extra = {"config": config, "row_sources": True}
    loading.get_model_loader(LoadConfig("loader_service", extra)).load_weights(model, vllm_config())
    assert_loaded(model, checkpoint)


def _vllm_rank(rank: Rank, checkpoint: Checkpoint, folder: str) -> list[Any]:
    """A target by stages, its bytes, and a second time with a model that fails on rank 1."""
    found: list[Any] = []
    rank.init_process_group()
    with pytest.MonkeyPatch.context() as patch:
        loading = renderings.vllm(patch, {"pp": (rank.rank, 2), "tp": (0, 1), "dp": (0, 1)})
        vllm.register()
        mine = {n: s for n, s in shapes_of(checkpoint).items() if n == "norm" or int(n[7]) // 2 == rank.rank}
        loader = loading.get_model_loader(LoadConfig("loader_service", {"config": f"{folder}/loader.yaml"}))
        model = TakingModel(mine)
        loader.load_weights(model, vllm_config())
        assert_loaded(model, checkpoint)

        class Broken(TakingModel):
            def load_weights(self, weights: Any) -> Any:
                loaded = super().load_weights(weights)
                if rank.rank == 1:
                    raise RuntimeError("the model is broken")
                return loaded

        with pytest.raises((RuntimeError, ls.RankFailure)) as failed:
            loader.load_weights(Broken(mine), vllm_config())
        found.append(f"{type(failed.value).__name__}: {failed.value}")
    import torch.distributed as dist

    dist.destroy_process_group()
    return found


def test_stages_take_their_own_layers_and_a_model_that_fails_fails_on_all_ranks(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    written(tmp_path, checkpoint, {"rules": [BY_STAGE]}, mesh={"pp": 2, "tp": 1})
    first, second = (outcome.get() for outcome in run_ranks(_vllm_rank, 2, checkpoint, str(tmp_path)))
    assert second == ["RuntimeError: the model is broken"]
    assert re.match(r"RankFailure: .*rank 1.*the model is broken", first[0])


# SGLang


def sglang_config(checkpoint: Checkpoint, **more: Any) -> Any:
    made = {"model_path": str(checkpoint.folder), "is_draft_model": False, "own_way": False}
    return SimpleNamespace(**made | {"make": lambda: TakingModel(shapes_of(checkpoint)), **more})


def test_sglang_loads_by_its_plug_in(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = renderings.sglang(monkeypatch, {"tp": (0, 1), "pp": (0, 1)})
    with pytest.raises(ValueError, match="LoadFormat"):
        SGLangLoadConfig("loader_service")
    engine.load_plugins(sglang.register)
    assert engine.choices == ["auto", "loader_service"]
    extra = {"config": written(tmp_path, checkpoint, {}, mesh={"tp": 1}), "draft_load": "draft"}
    loader = engine.get_model_loader(SGLangLoadConfig("loader_service", extra))
    model = loader.load_model(model_config=sglang_config(checkpoint), device_config=None)
    assert_loaded(model, checkpoint)
    draft = {name: shape for name, shape in shapes_of(checkpoint).items() if name.startswith("layers.3")}
    made = sglang_config(checkpoint, is_draft_model=True, make=lambda: TakingModel(draft))
    assert_loaded(loader.load_model(model_config=made, device_config=None), checkpoint)
    assert type(engine.get_model_loader(SGLangLoadConfig())).__name__ == "SGLangModelLoader"


def test_sglang_updates_weights_outside_of_a_load(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = renderings.sglang(monkeypatch, {})
    engine.load_plugins(sglang.register)
    loader = engine.get_model_loader(SGLangLoadConfig("loader_service", load_group=None))
    weights = dict(loader._get_weights_iterator(SimpleNamespace(model_or_path=str(checkpoint.folder))))
    assert weights.keys() == checkpoint.tensors.keys()


def test_sglang_is_told_of_models_that_take_weights_from_elsewhere(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = renderings.sglang(monkeypatch, {})
    loader = engine.get_model_loader(SGLangLoadConfig(sglang.loader_class()))
    with pytest.raises(ls.ConfigError, match="loaded TakingModel in a way of its own"):
        loader.load_model(model_config=sglang_config(checkpoint, own_way=True), device_config=None)

    class Two(TakingModel):
        secondary_weights = (SimpleNamespace(model_or_path="another"),)

    made = sglang_config(checkpoint, make=lambda: Two(shapes_of(checkpoint)))
    with pytest.raises(ls.ConfigError, match="further checkpoint, another"):
        loader.load_model(model_config=made, device_config=None)


def test_sglangs_load_group_says_who_acts_together() -> None:
    marker, group = object(), SimpleNamespace(cpu_group="the stage's")
    for load_group, wanted in ((marker, None), (None, "solo"), (group, "the stage's")):
        loading = sglang._Loading.__new__(sglang._Loading)
        loading.load_config = SimpleNamespace(load_group=load_group)
        assert loading._group() == wanted
    loading.load_config = SimpleNamespace()  # an older one, without load groups
    assert loading._group() is None


# TensorRT-LLM


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Linear(16, 32, bias=False) for _ in range(2))


class Decoder(nn.Module):
    """The checkpoint's layers, as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))


@pytest.mark.parametrize("consumable", [True, False], ids=["its own dictionary", "before it had one"])
def test_tensorrt_llm_loads_modules_on_many_threads_and_frees_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, consumable: bool
) -> None:
    renderings.tensorrt_llm(monkeypatch, consumable=consumable)
    loader = tensorrt_llm.checkpoint_loader()
    weights = loader.load_weights(str(checkpoint.folder), mapping=RankMapping(0, 1))
    assert isinstance(weights, renderings.ConsumableWeightsDict) == consumable
    ours = weights._weights if consumable else weights
    model = Decoder()
    renderings.load_modules(model, weights)
    for name, parameter in model.named_parameters():
        assert_same(parameter.detach(), checkpoint.tensor(name), name)
    assert list(weights.keys()) == ["norm"]  # which nobody has asked for
    assert ours.held_bytes in (0, 32)
    loader.cleanup()
    assert ours._stream.over


def test_tensorrt_llm_leaves_one_load_before_the_next_and_what_was_dropped(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderings.tensorrt_llm(monkeypatch)
    loader = tensorrt_llm.checkpoint_loader(written(tmp_path, checkpoint, {}), draft_load="draft")
    loader = pickle.loads(pickle.dumps(loader.weight_loader))  # as it goes to its worker processes
    target = loader.load_weights("/models/target", RankMapping(0, 1))
    assert len(target.keys()) == 9
    draft = loader.load_weights("/models/draft", RankMapping(0, 1))
    assert target._weights._stream.over
    assert [name for name, _ in draft.items()] == ["layers.3.down.weight", "layers.3.up.weight"]
    stream = draft._weights._stream
    del draft
    gc.collect()
    again = loader.load_weights("/models/target", RankMapping(0, 1))
    assert stream.over
    assert "norm" in again.keys()  # noqa: SIM118 - TensorRT-LLM's dictionary
    loader.cleanup()


def _tensorrt_rank(rank: Rank, checkpoint: Checkpoint, folder: str) -> list[str]:
    """Two loads over MPI ranks, of which the first is refused."""
    import torch.distributed as dist

    wire = dist.TCPStore(*_host_and_port(rank.address), None, rank.rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    calls = iter(range(100))

    def bcast(value: object, root: int) -> Any:
        key = f"bcast {next(calls)}"
        if rank.rank == root:
            wire.set(key, json.dumps(value))
        return json.loads(wire.get(key))

    comm = SimpleNamespace(Get_rank=lambda: rank.rank, Get_size=lambda: 2, bcast=bcast)
    with pytest.MonkeyPatch.context() as patch:
        renderings.tensorrt_llm(patch, comm)
        patch.setattr("socket.gethostname", lambda: "127.0.0.1")
        mapping = RankMapping(rank.rank, 2, tp_size=1, pp_size=2)
        refusing = tensorrt_llm.checkpoint_loader(f"{folder}/loader.yaml", "draft")
        loader = tensorrt_llm.checkpoint_loader(f"{folder}/loader.yaml")
        with pytest.raises(ls.ConfigError, match="TensorRT-LLM takes whole tensors"):
            refusing.load_weights("/models/m", mapping)
        weights = loader.load_weights("/models/m", mapping)
        names = weights.keys()
        for name, tensor in weights.items():
            assert_same(tensor, checkpoint.tensor(name), name)
        loader.cleanup()
        with pytest.raises(ls.ConfigError, match="MPI has 2 ranks, but its mapping 4"):
            loader.load_weights("/models/m", RankMapping(rank.rank, 4, tp_size=2, pp_size=2))
    return names  # type: ignore[no-any-return]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_tensorrt_llms_mpi_ranks_meet(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = Path(written(tmp_path, checkpoint, {"rules": [BY_STAGE]}, mesh={"pp": 2}))
    document = yaml.safe_load(path.read_text())
    document["loads"]["draft"] = {"rules": [{"match": "*", "split": {"axis": "pp", "dim": 0}}]}
    path.write_text(yaml.safe_dump(document))
    for number, outcome in enumerate(run_ranks(_tensorrt_rank, 2, checkpoint, str(tmp_path))):
        assert {name[:8] for name in outcome.get()} == {f"layers.{2 * number}", f"layers.{2 * number + 1}", "norm"}
