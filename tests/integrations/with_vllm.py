"""One rank of vLLM itself, on a CPU: a model that it makes and loads by its default loader, and by ours. Run as a
program, in a process of its own, since vLLM changes the process it is in: `rank world_size pp port folder extra`."""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from typing import Any

import torch


def main(rank: int, world_size: int, pp: int, port: str, folder: str, extra: dict[str, Any]) -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    torch.accelerator.empty_cache = lambda: None  # it raises where there is none
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()  # its wheels are CUDA's
    importlib.import_module("vllm.plugins").load_general_plugins()
    config, loading = (
        importlib.import_module("vllm.config"),
        importlib.import_module("vllm.model_executor.model_loader"),
    )
    state = importlib.import_module("vllm.distributed.parallel_state")
    tp = world_size // pp

    def made(load_format: str, extra: dict[str, Any]) -> Any:
        executor = "mp" if world_size > 1 else None
        return config.VllmConfig(
            model_config=config.ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
            ),
            parallel_config=config.ParallelConfig(
                tensor_parallel_size=tp, pipeline_parallel_size=pp, distributed_executor_backend=executor
            ),
            device_config=config.DeviceConfig(device="cpu"),
            load_config=config.LoadConfig(load_format=load_format, model_loader_extra_config=extra),
        )

    states: list[dict[str, torch.Tensor]] = []
    for load_format, options in (("auto", {}), ("loader_service", extra)):
        engine = made(load_format, options)
        with config.set_current_vllm_config(engine):
            if not states:
                meeting = f"tcp://127.0.0.1:{port}"
                state.init_distributed_environment(world_size, rank, meeting, rank, "gloo")
                state.initialize_model_parallel(tp, pp)
            loader = loading.get_model_loader(engine.load_config)
            model = loader.load_model(vllm_config=engine, model_config=engine.model_config)
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if load_format != "auto":
                _load_again(loader, model, engine.model_config, states[-1])
            if load_format != "auto" and pp > 1 and rank == world_size - 1:  # as a draft is: by the last stage alone
                draft = copy.copy(engine.model_config)
                draft.runner_type = "draft"
                loader.load_weights(model, draft)
    theirs, ours = states
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    print(f"{type(model).__name__}: {len(ours)} tensors are the same")


def _load_again(loader: Any, model: torch.nn.Module, model_config: Any, wanted: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loader.load_weights(model, model_config)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert len(dict(loader.get_all_weights(model_config, model))) > 0


if __name__ == "__main__":
    rank, world_size, pp, port, folder, extra = sys.argv[1:]
    main(int(rank), int(world_size), int(pp), port, folder, json.loads(extra))
