"""The recipes in configs/recipes/, for names and shapes of models as transformers writes them.

Every tensor is decided by the rule that is meant for it, and each rank takes what engines give it. Their arithmetic is
written out here: heads stay whole, few key/value heads are repeated, a vocabulary is padded to a multiple of 64.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from loader_service.cli import app

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RECIPES = Path(__file__).parents[2] / "configs/recipes"
Shapes = dict[str, tuple[int, ...]]
Part = list[list[int]]
"""Of each dimension the elements [start, stop)."""

WHOLE = re.compile(
    r"norm\.weight$|_norm|layernorm|\.mlp\.gate\.|block_sparse_moe\.gate\.|shared_expert_gate|o_proj\.bias|down_proj\.bias"
    r"|q_a_proj|kv_a_proj|eh_proj"
)


@dataclass(frozen=True)
class Model:
    """A model's configuration, and on how many ranks its recipe is tried."""

    recipe: str
    load: str
    kind: str
    ranks: int
    keys: Mapping[str, object]

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.load}-{self.ranks}"


LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN2 = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN3 = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN2_MOE = {**QWEN2, "num_experts": 8, "mlp_only_layers": [0], "moe_intermediate_size": 2560, "vocab_size": 151936}
QWEN3_MOE = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16}
DEEPSEEK = {"n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = [
    Model("dense", "target", "Llama", 8, {**LLAMA, "vocab_size": 128256}),
    Model("dense", "target", "Llama", 16, {**LLAMA, "vocab_size": 128256}),
    Model("dense", "target", "Llama", 4, {**LLAMA, "vocab_size": 32003, "attention_bias": True, "mlp_bias": True}),
    Model("dense", "target", "Mistral", 2, {**LLAMA, "vocab_size": 32768}),
    Model("dense", "target", "Qwen2", 4, {**QWEN2, "vocab_size": 152064}),
    Model("dense", "target", "Qwen3", 8, {**QWEN3, "head_dim": 128, "vocab_size": 151936}),
    Model("mixtral", "expert_parallel", "Mixtral", 4, LLAMA),
    Model("mixtral", "tensor_parallel", "Mixtral", 16, LLAMA),
    Model("qwen-moe", "expert_parallel", "Qwen2Moe", 4, QWEN2_MOE),
    Model("qwen-moe", "tensor_parallel", "Qwen2Moe", 2, QWEN2_MOE),
    Model("qwen-moe", "expert_parallel", "Qwen3Moe", 8, QWEN3_MOE),
    Model("qwen-moe", "tensor_parallel", "Qwen3Moe", 8, QWEN3_MOE),
    Model("deepseek-v3", "target", "DeepseekV3", 8, DEEPSEEK),
    Model("deepseek-v3", "draft", "DeepseekV3", 8, DEEPSEEK),
]


def config_of(model: Model) -> Any:
    return getattr(transformers, f"{model.kind}Config")(num_hidden_layers=2, **model.keys)


def published_names(model: Model, config: Any) -> Shapes:
    """Names and shapes as files have them; modules hold experts fused."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        made = getattr(transformers, f"{model.kind}ForCausalLM")(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(made, made.state_dict()).items()}
    return deepseek_as_published(shapes) if model.recipe == "deepseek-v3" else shapes


def deepseek_as_published(shapes: Shapes) -> Shapes:
    """With what transformers leaves out: the layer that predicts more tokens, and scales of blocks of 128 x 128."""
    layer, hidden = "model.layers.61.", 7168
    more = {name.replace("model.layers.1.", layer): shape for name, shape in shapes.items() if ".layers.1." in name}
    more |= {f"{layer}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    more |= {f"{layer}{name}.weight": shapes["lm_head.weight"] for name in ("embed_tokens", "shared_head.head")}
    more[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
    shapes = {**shapes, **more}
    scaled = [name for name in shapes if "_proj" in name and "eh_proj" not in name]
    return {**shapes, **{f"{name}_scale_inv": tuple(-(-size // 128) for size in shapes[name]) for name in scaled}}


def recipe_for(model: Model, config: Any, checkpoint: Path) -> dict[str, Any]:
    """The recipe, filled in as its first lines say."""
    document: dict[str, Any] = yaml.safe_load((RECIPES / f"{model.recipe}.yaml").read_text())
    document |= {"checkpoint": {"path": str(checkpoint)}, "mesh": {"tp": model.ranks}}
    for rule in document["loads"][model.load]["rules"]:
        if "units" in rule.get("split", {}):
            few = re.search(r"\.[kv]_proj", rule["match"])
            rule["split"]["units"] = config.num_key_value_heads if few else config.num_attention_heads
        if "count" in rule.get("assign", {}):
            rule["assign"]["count"] = config.n_routed_experts
    return document


def write_headers(path: Path, shapes: Shapes) -> None:
    """A file of the right size that holds no payload."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def taken_by_an_engine(model: Model, config: Any, name: str, shape: tuple[int, ...], rank: int) -> Part | None:
    """What a rank holds of a tensor; None for nothing."""
    ranks, blocks = model.ranks, "scale_inv" in name
    whole = [[0, size] for size in shape]

    def part(dim: int, unit: int, units: int) -> Part:
        """Units rank * units // ranks and so on of dimension `dim`; fewer units than ranks are repeated."""
        repeats = max(1, ranks // units)
        first, count = rank // repeats * max(1, units // ranks), max(1, units // ranks)
        return [*whole[:dim], [first * unit, (first + count) * unit], *whole[dim + 1 :]]

    expert = re.search(r"\.experts\.(\d+)\.", name)
    if expert and model.load != "tensor_parallel":
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 16
        return whole if int(expert[1]) // (experts // ranks) == rank else None
    if WHOLE.search(name):
        return whole
    heads, few = config.num_attention_heads, config.num_key_value_heads
    if re.search(r"\.(q|q_b|kv_b)_proj\.", name):
        return part(0, shape[0] // heads, heads) if not blocks else part(0, shape[0] // ranks, ranks)
    if re.search(r"\.[kv]_proj\.", name):
        return part(0, shape[0] // few, few)
    if ".o_proj." in name:
        return part(1, shape[1] // heads, heads) if not blocks else part(1, shape[1] // ranks, ranks)
    if re.search(r"(gate_proj|up_proj|\.w1|\.w3)\.", name):
        return part(0, shape[0] // ranks, ranks)
    if re.search(r"(down_proj|\.w2)\.", name):
        return part(1, shape[1] // ranks, ranks)
    assert name.endswith(("embed_tokens.weight", "head.weight")), name
    rows = -(-shape[0] // 64) * 64 // ranks
    return [[min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows)], whole[1]]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_each_rank_takes_of_a_model_what_engines_give_it(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model)
    shapes = published_names(model, config)
    write_headers(tmp_path / "model.safetensors", shapes)
    document = recipe_for(model, config, tmp_path / "model.safetensors")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    assert app.run(["plan", str(tmp_path / "recipe.yaml"), "--load", model.load, "--tensors", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    of_load = {name: shape for name, shape in shapes.items() if (".61." in name) == (model.load == "draft")}
    assert {tensor["name"] for tensor in plan["tensors"]} == of_load.keys()
    for tensor in plan["tensors"]:
        name = tensor["name"]
        assert len(tensor["rules"]) == (0 if WHOLE.search(name) and ".experts." not in name else 1), tensor
        got = {rank: [dim[0] for dim in part["slices"]] for part in tensor["parts"] for rank in part["ranks"]}
        expected = {rank: taken_by_an_engine(model, config, name, shapes[name], rank) for rank in range(model.ranks)}
        assert got == {rank: part for rank, part in expected.items() if part is not None}, name
        assert tensor["rules"] == [] or meant_for(tensor["rules"][0]["match"], name), tensor
    if model.kind != "Qwen3Moe" and model.load != "draft":
        assert plan["warnings"] == [], "every rule decides something"


def meant_for(match: str, name: str) -> bool:
    """The rule's glob ends in the part of the model that the tensor belongs to; experts have rules of their own."""
    words = set(re.findall(r"(?:experts|[a-z_]+_proj|embed_tokens|head|w\d|scale_inv)", match))
    return words <= set(re.findall(r"(?:experts|[a-z_]+_proj|embed_tokens|head|w\d|scale_inv)", name))


def documents() -> Iterator[tuple[str, str]]:
    for path in sorted(RECIPES.glob("*.yaml")):
        yield from ((path.stem, load) for load in yaml.safe_load(path.read_text())["loads"])


def test_every_recipe_is_tried() -> None:
    assert set(documents()) == {(model.recipe, model.load) for model in MODELS}
