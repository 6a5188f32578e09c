"""Why a measured load says little of what bounds it: it was over too soon, or its rounds differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import quantiles

LEAST_S = 1.0  # of a load: less is a matter of milliseconds that anything can bring
_ROUNDS_WITH_QUARTILES = 4


def doubts(seconds: float, rounds_s: Sequence[float], *, margin: float) -> Iterator[str]:
    """A sentence a reason. `seconds` are those of the load that is judged, `rounds_s` those of all rounds; these may
    differ by the part `margin`."""
    if seconds < LEAST_S:
        yield (
            f"{seconds:.2f} s is too short to tell what bounds this load: a larger one, of {LEAST_S:.0f} s or more, "
            "tells more."
        )
    least_s, most_s = _spread_s(rounds_s)
    if most_s > (1 + margin) * least_s:
        yield (
            f"Rounds differ by {100 * (most_s / least_s - 1):.0f} % ({least_s:.2f} to {most_s:.2f} s), more than a "
            f"verdict can bear ({100 * margin:.0f} %): more rounds or a larger load tell more."
        )


def _spread_s(rounds_s: Sequence[float]) -> tuple[float, float]:
    """Between which times rounds lie: all of them or, from four on, the middle half, so that more rounds tell more."""
    known = [seconds for seconds in rounds_s if seconds > 0]
    if len(known) >= _ROUNDS_WITH_QUARTILES:
        least_s, _, most_s = quantiles(known, method="inclusive")
        return least_s, most_s
    return min(known, default=0.0), max(known, default=0.0)
