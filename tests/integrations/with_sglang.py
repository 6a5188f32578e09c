"""SGLang itself, on a CPU: its plug-ins, its `LoadConfig` and its default loader with ours before it, for a model that
stands in for its own. Run as a program: `folder`."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

CANNOT_RUN = 77  # its modules want libraries that come with a GPU


class Taking(torch.nn.Module):
    def load_weights(self, weights: Any) -> None:
        self.taken = dict(weights)


def main(folder: str) -> None:
    try:
        loading: Any = importlib.import_module("sglang.srt.model_loader.loader")
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        print(f"SGLang cannot be imported here: {error!r}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    assert "loader_service" in importlib.import_module("sglang.srt.arg_groups.choices").LOAD_FORMAT_CHOICES
    config = importlib.import_module("sglang.srt.configs.load_config").LoadConfig("loader_service")
    loader = loading.get_model_loader(config, None)
    assert isinstance(loader, loading.DefaultModelLoader)
    loading._initialize_model = lambda *_: Taking()
    loading._get_quantization_config = lambda *_: None
    model_config = SimpleNamespace(model_path=folder, is_draft_model=False, dtype=torch.bfloat16, revision=None)
    model = loader.load_model(model_config=model_config, device_config=SimpleNamespace(device="cpu"))
    wanted = load_file(f"{folder}/model.safetensors")
    anew = dict(loader._get_weights_iterator(loading.DefaultModelLoader.Source.init_new(model_config, model)))
    for taken in (model.taken, anew):
        assert taken.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in taken.items())
    print(f"{len(wanted)} tensors are the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
