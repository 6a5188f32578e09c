"""The examples of the adapters run as they stand, one after the other, and load what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.docs.documents import blocks
from tests.docs.reader import execute

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
    examples = blocks(DOCUMENT, "python")
    plain, on_meta, renamed, whole_model, cut = examples
    weights = load_file(folder / "checkpoint/model.safetensors")
    names: dict[str, object] = {}
    for block in (plain, on_meta, renamed):
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
    execute(cut, DOCUMENT, names)
