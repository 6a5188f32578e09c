"""The example configurations are valid, and their globs match the names that such checkpoints have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader_service.cli.demo_checkpoint import demo_layout
from loader_service.config.schema import AssignRule, LoadConfig, ServiceConfig, SplitRule, check_world_size
from loader_service.config.yaml_file import load_config
from loader_service.planning.cuts import Cut
from loader_service.planning.glob import compile_glob

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
Shapes = dict[str, tuple[int, ...]]


def _with_scales(weights: Shapes) -> Shapes:
    """Each weight, and beside it one scale for each block of 128 x 128."""
    scales = {f"{name}_scale_inv": tuple(-(-size // 128) for size in shape) for name, shape in weights.items()}
    return {**weights, **scales}


def _mlp(prefix: str, rows: int, hidden: int) -> Shapes:
    shapes = {"gate_proj": (rows, hidden), "up_proj": (rows, hidden), "down_proj": (hidden, rows)}
    return _with_scales({f"{prefix}.{name}.weight": shape for name, shape in shapes.items()})


def _dense() -> Shapes:
    hidden = 4096
    shapes: Shapes = {"model.embed_tokens.weight": (32003, hidden), "lm_head.weight": (32003, hidden)}
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.qkv_proj.weight": (6144, hidden),
            f"{prefix}.self_attn.qkv_proj.bias": (6144,),
            f"{prefix}.self_attn.o_proj.weight": (hidden, 4096),
            f"{prefix}.mlp.gate_up_proj.weight": (2 * 14336, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, 14336),
        }
    return {**shapes, "model.norm.weight": (hidden,)}


def _latent_attention(prefix: str) -> Shapes:
    return {
        f"{prefix}.input_layernorm.weight": (7168,),
        **_with_scales(
            {
                f"{prefix}.self_attn.q_a_proj.weight": (1536, 7168),
                f"{prefix}.self_attn.q_b_proj.weight": (24576, 1536),
                f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
                f"{prefix}.self_attn.kv_b_proj.weight": (32768, 512),
                f"{prefix}.self_attn.o_proj.weight": (7168, 16384),
            }
        ),
    }


def _deepseek() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (129280, 7168), "lm_head.weight": (129280, 7168)}
    shapes |= {
        "model.layers.1.engram.embed.weight": (100_003, 512),
        "model.layers.1.engram.embed.weight_scale_inv": (100_003, 4),
    }
    shapes |= {"model.norm.weight": (7168,), "mtp.0.eh_proj.weight": (7168, 14336)}
    for layer in (0, 1, 60):
        shapes |= _latent_attention(f"model.layers.{layer}")
    shapes |= _mlp("model.layers.0.mlp", 18432, 7168)
    for prefix in ("model.layers.1", "model.layers.60", "mtp.0", "mtp.1"):
        shapes |= _mlp(f"{prefix}.mlp.shared_experts", 2048, 7168)
        for expert in (0, 7, 255):
            shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", 2048, 7168)
    for stage in (0, 1):
        shapes |= _latent_attention(f"mtp.{stage}")
    return shapes


def _pipeline() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (151_669, 4096), "model.norm.weight": (4096,)}
    for layer in (0, 25, 26, 47):
        prefix = f"model.layers.{layer}"
        attention = {"q_proj": (8192, 4096), "k_proj": (512, 4096), "v_proj": (512, 4096), "o_proj": (4096, 8192)}
        shapes |= _with_scales({f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()})
        shapes |= {f"{prefix}.mlp.gate.weight": (128, 4096), f"{prefix}.input_layernorm.weight": (4096,)}
        shapes |= _mlp(f"{prefix}.mlp.shared_expert", 1408, 4096)
        for expert in (0, 1, 127):
            shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", 1408, 4096)
    return shapes


def _demo() -> Shapes:
    return {tensor.name: tensor.shape for tensor in demo_layout()}


CHECKPOINTS = {"demo": _demo, "dense-tp": _dense, "deepseek-v4": _deepseek, "moe-pp-ep": _pipeline}
RANKS = {"demo": 2, "dense-tp": 8, "deepseek-v4": 8, "moe-pp-ep": 16}


def _example(name: str) -> tuple[ServiceConfig, Shapes]:
    return load_config(CONFIGS / f"{name}.yaml"), CHECKPOINTS[name]()


def _taken(load: LoadConfig, shapes: Shapes) -> list[str]:
    skipped = {name for pattern in load.skip for name in shapes if compile_glob(pattern).matches(name)}
    prefixes = tuple(prefix.removesuffix(".") + "." for prefix in load.key_prefixes or ())
    return [name for name in shapes if name not in skipped and (not prefixes or name.startswith(prefixes))]


def _decisions(load: LoadConfig, name: str) -> Iterator[AssignRule | SplitRule]:
    """What applies to a name: for each axis the first matching rule that names it."""
    decided: set[str] = set()
    for rule in load.rules:
        if compile_glob(rule.match).matches(name):
            parts = [part for part in (rule.assign, rule.split) if part is not None and not decided & set(part.axis)]
            yield from parts
            decided |= {axis for part in parts for axis in part.axis}


def test_every_example_is_tested_here() -> None:
    assert [file.stem for file in FILES] == sorted(CHECKPOINTS)


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_an_example_is_valid_and_its_mesh_is_for_the_ranks_it_names(name: str) -> None:
    config, _ = _example(name)
    check_world_size(config, RANKS[name], coords_given=False)
    assert "target" in config.loads


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_glob_and_prefix_of_an_example_matches_a_name(name: str) -> None:
    config, shapes = _example(name)
    for load in config.loads.values():
        taken = _taken(load, shapes)
        assert taken
        for pattern in load.skip:
            assert any(compile_glob(pattern).matches(tensor) for tensor in shapes), pattern
        for prefix in load.key_prefixes or ():
            assert any(tensor.startswith(prefix) for tensor in shapes), prefix
        for rule in load.rules:
            assert any(compile_glob(rule.match).matches(tensor) for tensor in taken), rule.match


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_rule_of_an_example_decides_something(name: str) -> None:
    config, shapes = _example(name)
    for load in config.loads.values():
        used = {id(part) for tensor in _taken(load, shapes) for part in _decisions(load, tensor)}
        for rule in load.rules:
            assert {id(part) for part in (rule.assign, rule.split) if part is not None} <= used, rule.match


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_index_of_an_example_finds_a_number_in_all_names_of_its_rule(name: str) -> None:
    config, shapes = _example(name)
    for load in config.loads.values():
        for rule in load.rules:
            if rule.assign is not None and rule.assign.index is not None:
                for tensor in filter(compile_glob(rule.match).matches, shapes):
                    match = re.search(rule.assign.index, tensor)
                    assert match is not None, tensor
                    limit = rule.assign.boundaries[-1] if rule.assign.boundaries else rule.assign.count or 10**6
                    assert int(match[1]) < limit


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_split_of_an_example_is_possible_and_leaves_no_rank_without(name: str) -> None:
    config, shapes = _example(name)
    for load in config.loads.values():
        for tensor in _taken(load, shapes):
            for split in (part for part in _decisions(load, tensor) if isinstance(part, SplitRule)):
                if len(shapes[tensor]) > split.dim and shapes[tensor][split.dim] > 1:
                    _check_split(config, split, tensor, shapes[tensor][split.dim])


def _ranks(config: ServiceConfig, split: SplitRule) -> int:
    return math.prod((config.mesh or {})[axis] for axis in split.axis)


def _cuts(split: SplitRule) -> list[tuple[int, Cut]]:
    """The proportion and the cut of each section."""

    def of(value: int | tuple[int, ...] | None, section: int) -> int | None:
        return value[section] if isinstance(value, tuple) else value

    proportions = split.sections or (1,)
    return [
        (proportion, Cut(align=of(split.align, i), pad_to=of(split.pad_to, i), units=of(split.units, i)))
        for i, proportion in enumerate(proportions)
    ]


def _check_split(config: ServiceConfig, split: SplitRule, tensor: str, size: int) -> None:
    ranks, sections = _ranks(config, split), _cuts(split)
    total = sum(proportion for proportion, _ in sections)
    for proportion, cut in sections:
        length, rest = divmod(size * proportion, total)
        assert not rest, tensor
        assert cut.problem(length, ranks) is None, tensor
        assert all(start < stop for start, stop in (cut.interval(length, ranks, r) for r in range(ranks))), tensor


@pytest.mark.parametrize("name", ["deepseek-v4", "demo", "moe-pp-ep"])
def test_a_weight_and_its_block_scales_are_taken_by_the_same_ranks_and_cut_alike(name: str) -> None:
    config, shapes = _example(name)
    checked = 0
    for load in config.loads.values():
        for tensor in _taken(load, shapes):
            if f"{tensor}_scale_inv" in shapes:
                weight, scale = list(_decisions(load, tensor)), list(_decisions(load, f"{tensor}_scale_inv"))
                assert [part for part in weight if isinstance(part, AssignRule)] == [
                    part for part in scale if isinstance(part, AssignRule)
                ], tensor
                checked += _cut_alike(config, shapes, tensor, weight, scale)
    assert checked >= 10


def _cut_alike(
    config: ServiceConfig,
    shapes: Shapes,
    tensor: str,
    weight: list[AssignRule | SplitRule],
    scale: list[AssignRule | SplitRule],
) -> int:
    ours = [part for part in weight if isinstance(part, SplitRule)]
    theirs = [part for part in scale if isinstance(part, SplitRule)]
    assert [(part.axis, part.dim) for part in ours] == [(part.axis, part.dim) for part in theirs], tensor
    for split, scale_split in zip(ours, theirs, strict=True):
        size, blocks = shapes[tensor][split.dim], shapes[f"{tensor}_scale_inv"][split.dim]
        elements = 1 if size == blocks else 128  # a row table has one scale a row and group of columns
        ((_, cut),), ((_, scale_cut),) = _cuts(split), _cuts(scale_split)
        ranks = _ranks(config, split)
        for r in range(ranks):
            start, stop = scale_cut.interval(blocks, ranks, r)
            assert cut.interval(size, ranks, r) == (start * elements, min(size, stop * elements)), tensor
    return len(ours)


def test_the_demo_load_and_its_draft_share_no_tensor_and_leave_only_the_undeclared_stage() -> None:
    config, shapes = _example("demo")
    target, draft = (set(_taken(config.loads[name], shapes)) for name in ("target", "draft"))
    assert not target & draft
    assert {name.split(".")[1] for name in set(shapes) - target - draft} == {"2"}


def test_the_demo_configuration_reads_the_checkpoint_that_the_demo_makes() -> None:
    config, _ = _example("demo")
    assert config.checkpoint is not None
    assert config.checkpoint.path == str(CONFIGS.parent / ".demo" / "checkpoint")
