from __future__ import annotations

import pytest

from loader_service.memory.budget import Budget


def budget(**state: int) -> Budget:
    return Budget(100, 10, **state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, "new"),
        ({"leased": 9}, "new"),
        ({"leased": 10}, None),
        ({"leased": 9, "idle": 1}, "idle"),
        ({"reserved_bytes": 90}, "new"),
        ({"reserved_bytes": 91}, None),
        ({"reserved_bytes": 85, "idle": 1}, "idle"),
        ({"leased": 9, "freeing": 1}, None),
        ({"reserved_bytes": 5000}, None),
    ],
    ids=str,
)
def test_a_lease_takes_an_idle_slot_or_a_new_one_while_it_fits(state: dict[str, int], expected: str | None) -> None:
    after = budget(**state)
    before_bytes = after.held_bytes
    assert after.try_lease() == expected
    assert after.leased == state.get("leased", 0) + (expected is not None)
    assert after.held_bytes == before_bytes + (10 if expected == "new" else 0)


@pytest.mark.parametrize(
    ("state", "nbytes", "granted", "to_free"),
    [
        ({}, 0, True, 0),
        ({}, 100, True, 0),
        ({"leased": 1}, 91, False, 0),
        ({"leased": 1}, 90, True, 0),
        ({"idle": 3}, 70, True, 0),
        ({"idle": 3}, 71, False, 1),
        ({"idle": 3}, 100, False, 3),
        ({"idle": 3, "freeing": 2}, 100, False, 3),
        ({"idle": 3, "freeing": 2}, 61, False, 0),
        ({"idle": 3, "leased": 2}, 81, False, 0),
        ({"idle": 3, "leased": 2}, 80, False, 3),
        ({"freeing": 1}, 95, False, 0),
        ({}, 101, True, 0),
        ({"idle": 2}, 1000, False, 2),
        ({"freeing": 1}, 1000, False, 0),
        ({"leased": 1, "idle": 2}, 1000, False, 0),
        ({"reserved_bytes": 1, "idle": 2}, 1000, False, 0),
        ({"reserved_bytes": 1000}, 0, False, 0),
        ({"reserved_bytes": 1000}, 1, False, 0),
    ],
    ids=str,
)
def test_a_reservation_is_granted_while_it_fits_or_alone_and_frees_no_more_idle_slots_than_it_needs(
    state: dict[str, int], nbytes: int, granted: bool, to_free: int
) -> None:
    after = budget(**state)
    assert after.try_reserve(nbytes) == granted
    assert after.reserved_bytes == state.get("reserved_bytes", 0) + nbytes * granted
    if not granted:
        held_bytes = after.held_bytes
        assert after.idle_to_free(nbytes) == to_free
        assert after.idle == state.get("idle", 0) - to_free
        assert after.held_bytes == held_bytes


def test_the_peak_is_of_all_bytes_held_idle_ones_too() -> None:
    after = budget(idle=2)
    after.try_reserve(30)
    assert after.peak_bytes == 50
    after.reserved_bytes = 0
    after.idle = 0
    after.try_lease()
    assert (after.peak_bytes, after.out_bytes) == (50, 10)
