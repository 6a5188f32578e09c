"""Ranks and their coordinates."""

from __future__ import annotations

import pytest

from loader_service.errors import ConfigError
from loader_service.planning.mesh import Mesh


def test_ranks_are_row_major_in_the_order_written() -> None:
    mesh = Mesh.row_major({"pp": 2, "tp": 4}, 8)
    assert [mesh.coordinates(rank) for rank in range(8)] == [(pp, tp) for pp in range(2) for tp in range(4)]
    assert mesh.coord_along(5, ("pp",)) == (1, 2)
    assert mesh.coord_along(5, ("tp",)) == (1, 4)


def test_without_a_mesh_all_ranks_lie_along_world() -> None:
    mesh = Mesh.row_major(None, 3)
    assert mesh.axes == ("world",)
    assert [mesh.coord_along(rank, ("world",)) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("dp", "tp"), [0, 1, 2, 3, 0, 1, 2, 3]),
        (("tp", "dp"), [0, 2, 1, 3, 0, 2, 1, 3]),
        (("tp", "pp"), [0, 2, 0, 2, 1, 3, 1, 3]),
    ],
    ids=["as in the mesh", "swapped", "not adjacent"],
)
def test_a_list_of_axes_is_one_with_the_last_varying_fastest(axes: tuple[str, ...], expected: list[int]) -> None:
    mesh = Mesh.row_major({"pp": 2, "dp": 2, "tp": 2}, 8)
    assert [mesh.coord_along(rank, axes) for rank in range(8)] == [(place, 4) for place in expected]
    assert mesh.size_along(axes) == 4


def test_sizes_must_multiply_to_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"pp: 2, tp: 4 is 8 ranks but there are 4"):
        Mesh.row_major({"pp": 2, "tp": 4}, 4)


def test_coords_override_the_order_of_ranks() -> None:
    coords = [{"tp": 1, "pp": 0}, {"tp": 0, "pp": 0}, {"tp": 0, "pp": 1}, {"tp": 1, "pp": 1}]
    mesh = Mesh.with_coords({"pp": 2, "tp": 2}, coords)
    assert [mesh.coordinates(rank) for rank in range(4)] == [(0, 1), (0, 0), (1, 0), (1, 1)]
    assert mesh.empty_positions == 0


def test_replicas_may_share_a_position_and_positions_may_stay_empty() -> None:
    mesh = Mesh.with_coords({"tp": 3}, [{"tp": 0}, {"tp": 1}, {"tp": 0}, {"tp": 1}])
    assert mesh.world_size == 4
    assert mesh.empty_positions == 1
    assert mesh.coord_along(2, ("tp",)) == (0, 3)


def test_a_rank_whose_coords_are_not_known_yet_cannot_be_asked_about() -> None:
    mesh = Mesh.with_coords({"tp": 2}, [None, {"tp": 0}])
    assert mesh.coordinates(1) == (0,)
    assert mesh.empty_positions == 0
    with pytest.raises(ConfigError, match="coords of rank 0 are not known"):
        mesh.coordinates(0)


@pytest.mark.parametrize(
    ("coords", "words"),
    [
        ({"pp": 0}, r"name the axes \['pp'\] but the mesh has \['tp'\]"),
        ({"tp": 2}, "tp is 2, but that axis has the numbers 0 to 1"),
        ({"tp": -1}, "tp is -1"),
        ({}, "give one number for each axis"),
    ],
)
def test_coords_that_do_not_fit_the_mesh_name_the_rank(coords: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Mesh.with_coords({"tp": 2}, [{"tp": 0}, coords])
    assert caught.value.rank == 1


@pytest.mark.parametrize("rank", [-1, 8])
def test_there_is_no_rank_beyond_the_mesh(rank: int) -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 7"):
        Mesh.row_major({"pp": 2, "tp": 4}, 8).coordinates(rank)
