"""The examples of the adapters run as they stand, one after the other, and load what they say."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import loader_service as ls
from loader_service.integrations import sglang, tensorrt_llm, vllm
from loader_service.integrations.engines import EngineLoad
from tests.docs.documents import blocks
from tests.docs.reader import execute
from tests.integrations import renderings

DOCUMENT = "docs/integrations.md"
transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the document assumes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "checkpoint").mkdir()
    weights = {"up.weight": torch.randn(256, 64), "down.weight": torch.randn(64, 256)}
    save_file(weights, tmp_path / "checkpoint/model.safetensors")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **small))
    made.save_pretrained(tmp_path / "llama")
    return tmp_path


def test_the_examples_run_and_load_everything(folder: Path) -> None:
    plain, on_meta, renamed, whole_model, _, by_name, cut = blocks(DOCUMENT, "python")
    weights = load_file(folder / "checkpoint/model.safetensors")
    names: dict[str, object] = {}
    for block in (plain, on_meta, renamed, by_name):
        execute(block, DOCUMENT, names)
        model = names["model"]
        assert isinstance(model, torch.nn.Module)
        assert model.state_dict().keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    execute(whole_model, DOCUMENT, names)
    model = names["model"]
    assert isinstance(model, transformers.LlamaForCausalLM)
    stored = load_file(folder / "llama/model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    execute(cut, DOCUMENT, names | {"config": None})


def test_the_example_of_tensorrt_llm_gives_it_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def llm(*, model: str, checkpoint_loader: Any) -> dict[str, torch.Tensor]:
        weights = checkpoint_loader.load_weights(model, mapping=renderings.RankMapping(0, 1))
        found = dict(weights.items())
        checkpoint_loader.cleanup()
        return found

    renderings.tensorrt_llm(monkeypatch)
    renderings.install(monkeypatch, {"tensorrt_llm": {"LLM": llm}})
    (folder / "loader.yaml").write_text(yaml.safe_dump({"checkpoint": {"path": "llama"}, "loads": {"target": {}}}))
    (block,) = (block for block in blocks(DOCUMENT, "python") if "tensorrt_llm" in block.text)
    names: dict[str, Any] = {}
    try:
        execute(block, DOCUMENT, names)
    finally:
        tensorrt_llm._weight_loader_class.cache_clear()
    assert names["llm"].keys() == load_file(folder / "llama/model.safetensors").keys()


def test_the_commands_name_loads_of_the_configuration_shown() -> None:
    (shown,) = blocks(DOCUMENT, "yaml")
    document = yaml.safe_load(shown.text)
    ls.config_from_dict(document)
    commands = [shlex.split(block.text.replace("\\\n", " ")) for block in blocks(DOCUMENT, "sh")]
    assert [words[words.index("--load-format") + 1] for words in commands] == [vllm.LOAD_FORMAT] * 3
    assert vllm.LOAD_FORMAT == sglang.LOAD_FORMAT
    extras = [words[words.index("--model-loader-extra-config") + 1] for words in commands[1:]]
    for extra in map(json.loads, extras):
        assert extra.pop("config") == "/models/loader.yaml"
        for draft in (False, True):
            assert EngineLoad.of("it", {**extra, "config": document}, "", draft=draft).load in document["loads"]
