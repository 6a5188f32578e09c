"""The whole matrix: every fault at every moment in every phase to every kind of rank, in random schedules and weather.

One checker judges them all (`invariants.check`). LOADER_SCHEDULES sets how many random schedules each case gets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from loader_service.agreement.messages import PHASES
from tests.agreement import cases
from tests.agreement.cases import ANYTIME, BEFORE_ONLY, MOMENTS, STARTS_AFTER_S, WEATHER, WITNESSES, Case, Moment
from tests.agreement.invariants import check

SCHEDULES = int(os.environ.get("LOADER_SCHEDULES", "1"))


def schedules(fault: str, moment: Moment) -> Iterator[Case]:
    chance = random.Random(f"{fault} {moment}")
    phases = PHASES if fault not in STARTS_AFTER_S else PHASES[:1]
    for seed in range(SCHEDULES):
        for phase in phases:
            world_size = chance.choice((2, 3, 4, 5))
            for victim in sorted({0, 1, world_size - 1}):
                weather, hosted = chance.choice(tuple(WEATHER)), chance.random() < 0.4
                witnesses = chance.choice(tuple(WITNESSES))
                yield Case(fault, moment, phase, victim, world_size, weather, hosted, seed, witnesses)


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        *(pytest.param(fault, moment, id=f"{fault}-{moment}") for fault in ANYTIME for moment in MOMENTS),
        *(pytest.param(fault, "before", id=fault) for fault in (*BEFORE_ONLY, *STARTS_AFTER_S)),
    ],
)
def test_nobody_hangs_and_all_see_one_end_with_the_right_cause(fault: str, moment: Moment) -> None:
    for case in schedules(fault, moment):
        try:
            check(cases.run(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
