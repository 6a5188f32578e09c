"""The adapters with the engines themselves, where they are installed: vLLM and SGLang on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from tests.docs.documents import ROOT
from tests.integrations.with_sglang import CANNOT_RUN
from tests.support.ranks import free_port

BY_STAGE = {"match": "model.layers.*", "assign": {"axis": "pp", "index": r"layers\.(\d+)\.", "boundaries": [0, 2, 4]}}


def needs(engine: str, group: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(engine) is not None and "loader_service" in entry_points(group=group).names
    return pytest.mark.skipif(not there, reason=f"needs {engine}, and loader-service installed beside it")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128, "head_dim": 16}
    config = transformers.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def run(program: str, calls: Sequence[Sequence[str]]) -> list[str]:
    """Runs a program of this folder once for each list of arguments, at the same time; what each printed last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.integrations.{program}"]
    started = [
        subprocess.Popen([*command, *args], cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True)
        for args in calls
    ]
    ended = [process.communicate(timeout=300) for process in started]
    for process, (_, errors) in zip(started, ended, strict=True):
        if process.returncode == CANNOT_RUN:
            pytest.skip(errors.strip().splitlines()[-1])
        assert process.returncode == 0, errors[-5000:]
    return [output.strip().splitlines()[-1] for output, _ in ended]


@needs("vllm", "vllm.general_plugins")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "pp"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tensor parallel", "pipeline parallel"])
def test_vllm_makes_the_model_that_its_default_loader_makes(llama: Path, ranks: int, pp: int) -> None:
    document = {"checkpoint": {"path": str(llama)}, "loads": {"target": {}}}
    document |= {"mesh": {"pp": pp, "tp": ranks // pp}}
    document |= {"loads": {"target": {"rules": [BY_STAGE] if pp > 1 else []}}}
    path = llama.parent / "loader.yaml"
    path.write_text(yaml.safe_dump(document))
    extra, port = json.dumps({"config": str(path)}), str(free_port())
    for said in run("with_vllm", [[str(rank), str(ranks), str(pp), port, str(llama), extra] for rank in range(ranks)]):
        assert said.startswith("LlamaForCausalLM: ")


@needs("sglang", "sglang.srt.plugins")
@pytest.mark.timeout(400)
def test_sglang_finds_the_load_format_and_loads_by_it(llama: Path) -> None:
    (said,) = run("with_sglang", [[str(llama)]])
    assert said == "39 tensors are the same"
