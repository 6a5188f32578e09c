"""What an index decides between copies, what it only gets wrong, and what nobody decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from loader_service.checkpoint.catalog import build_catalog
from loader_service.checkpoint.index import IndexFile
from loader_service.errors import CheckpointError
from tests.checkpoint.building import bytes_of, catalog_of, shard_with_header

A, B, C = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"


def held(shards: Mapping[str, Sequence[str]], weight_map: Mapping[str, str] | None) -> dict[str, str]:
    """name -> the shard that the catalog takes it from."""
    catalog = catalog_of(shards, weight_map)
    return {name: catalog.shards[i].name for name, i in zip(catalog.names, catalog.shard_ids, strict=True)}


def notes(shards: Mapping[str, Sequence[str]], weight_map: Mapping[str, str]) -> str:
    return "\n".join(catalog_of(shards, weight_map).notes)


def test_an_index_that_agrees_with_the_headers_says_nothing() -> None:
    shards = {A: ["x"], B: ["y", "z"]}
    assert catalog_of(shards, {"x": A, "y": B, "z": B}).notes == ()
    assert catalog_of(shards).notes == ()


def test_an_index_that_only_names_more_than_the_headers_hold_says_so() -> None:
    assert "names 1 tensor ('z'), which no shard holds" in notes({A: ["x"], B: ["y"]}, {"x": A, "y": B, "z": B})


def test_a_second_weight_set_that_the_index_does_not_list_is_left_out_and_reported() -> None:
    shards = {A: ["x"], B: ["y"], C: ["x", "y"]}
    weight_map = {"x": A, "y": B}
    assert held(shards, weight_map) == weight_map
    assert [shard.name for shard in catalog_of(shards, weight_map).shards] == [A, B]
    assert f"{C}: left out" in notes(shards, weight_map)


def test_the_index_may_prefer_the_consolidated_set() -> None:
    shards = {A: ["x"], B: ["y"], C: ["x", "y"]}
    assert held(shards, {"x": C, "y": C}) == {"x": C, "y": C}
    assert notes(shards, {"x": C, "y": C}).count("left out") == 2


def test_a_half_precision_twin_is_decided_by_the_index_either_way() -> None:
    twins = {"model.safetensors": ["x", "y"], "model.fp16.safetensors": ["x", "y"]}
    for name in twins:
        assert held(twins, {"x": name, "y": name}) == {"x": name, "y": name}


def test_the_copy_in_the_shard_that_the_index_names_wins() -> None:
    shards = {A: ["x", "p"], B: ["x", "q"]}
    for winner in (A, B):
        weight_map = {"x": winner, "p": A, "q": B}
        assert held(shards, weight_map) == weight_map
        assert f"the index prefers '{winner}'" in notes(shards, weight_map)


def test_a_dropped_copy_keeps_the_other_rows_ranges() -> None:
    catalog = catalog_of({A: ["p", "x", "q"], B: ["x"]}, {"p": A, "x": B, "q": A})
    base = catalog.shards[0].header_bytes
    assert catalog.names == ["p", "q", "x"]
    assert catalog.starts[:2].tolist() == [base, base + 8]
    assert catalog.shard_ids.tolist() == [0, 0, 1]


def test_an_unlisted_shard_with_other_names_is_kept_and_reported() -> None:
    shards = {A: ["x"], "extra.safetensors": ["x", "mtp.0.w"]}
    assert held(shards, {"x": A}) == {"x": A, "mtp.0.w": "extra.safetensors"}
    text = notes(shards, {"x": A})
    assert "extra.safetensors: kept" in text
    assert "mtp.0.w" in text
    assert "its copy of 1 tensor ('x') does not count" in text


def test_a_listed_shard_beats_an_unlisted_one_for_a_name_that_the_index_omits() -> None:
    shards = {A: ["x", "omitted"], "extra.safetensors": ["omitted", "other"]}
    assert held(shards, {"x": A})["omitted"] == A


def test_a_key_that_the_index_omits_is_no_obstacle() -> None:
    assert held({A: ["x", "y"]}, {"x": A}) == {"x": A, "y": A}
    assert "omits 1 tensor ('y')" in notes({A: ["x", "y"]}, {"x": A})


def test_a_key_that_the_index_misplaces_is_taken_from_where_it_is() -> None:
    shards = {A: ["x"], B: ["y"]}
    assert held(shards, {"x": B, "y": B, "z": A})["x"] == A
    text = notes(shards, {"x": B, "y": B, "z": A})
    assert f"'x' lies in '{A}', not in '{B}'" in text
    assert "names 1 tensor ('z'), which no shard holds" in text


def test_long_lists_in_notes_are_counted_not_listed() -> None:
    names = [f"t{i}" for i in range(1000)]
    (note,) = catalog_of({A: names}, {"t0": A}).notes
    assert "999 tensors" in note
    assert len(note) < 200


@pytest.mark.parametrize(
    ("shards", "weight_map", "words"),
    [
        pytest.param(
            {A: ["x"], B: ["y"], C: ["x", "y"]},
            None,
            ["2 tensors ('x', 'y')", "no index", "'model-*-of-00002.safetensors' (2 files)", f"'{C}' (1 file)"],
            id="two-sets-without-an-index",
        ),
        pytest.param(
            {"model.safetensors": ["x"], "model.fp16.safetensors": ["x"]},
            None,
            ["'model.safetensors'", "'model.fp16.safetensors'"],
            id="twins-without-an-index",
        ),
        pytest.param({A: ["x", "p"], B: ["x", "q"]}, {"p": A, "q": B}, ["does not decide"], id="index-omits-the-name"),
        pytest.param(
            {A: ["x", "p"], B: ["x", "q"], C: ["r"]},
            {"x": C, "p": A, "q": B, "r": C},
            ["does not decide"],
            id="index-names-a-third-shard",
        ),
        pytest.param(
            {"u.safetensors": ["x"], "v.safetensors": ["x"], A: ["p"]},
            {"p": A},
            ["does not decide"],
            id="both-unlisted",
        ),
    ],
)
def test_copies_that_nothing_decides_between_are_refused_with_the_files(
    shards: dict[str, list[str]], weight_map: dict[str, str] | None, words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        catalog_of(shards, weight_map)
    for word in (*words, "under checkpoint.path"):
        assert word in caught.value.message


def test_an_index_may_name_shards_that_are_not_there() -> None:
    """Of a folder they are refused before: here whoever joins headers decides."""
    catalog = catalog_of({A: ["x"]}, {"x": "elsewhere.safetensors"})
    assert catalog.names == ["x"]
    assert any("elsewhere.safetensors" in note for note in catalog.notes)


def test_ignoring_the_index_is_as_if_there_were_none() -> None:
    index = IndexFile("/i", [["x"]], [[A]], frozenset({A}))
    pairs = [shard_with_header(A, bytes_of(["x"])), shard_with_header(C, bytes_of(["x"]))]
    assert build_catalog(pairs, index, "advisory").names == ["x"]
    with pytest.raises(CheckpointError, match="no index"):
        build_catalog(pairs, index, "ignore")


def test_an_unlisted_shard_without_tensors_is_kept_silently() -> None:
    for weight_map in ({"x": A, "y": A}, {"x": A}):
        catalog = catalog_of({A: ["x", "y"], "empty.safetensors": []}, weight_map)
        assert [shard.name for shard in catalog.shards] == ["empty.safetensors", A]
        assert not any("empty" in note for note in catalog.notes)
