"""No time of day is looked at: hosts disagree about it, and it jumps. Deadlines are counted on monotonic clocks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "loader_service"
TIMES_OF_DAY = {
    ("time", name) for name in ("time", "time_ns", "ctime", "gmtime", "localtime", "strftime", "clock_gettime")
} | {(owner, name) for owner in ("datetime", "date") for name in ("now", "utcnow", "today", "fromtimestamp")}

# When it was measured or loaded, for a heading, and when a record was made: nothing is counted from there.
SHOWN = {"cli/bench.py", "cli/load.py", "logs.py"}


def looks_at_the_time_of_day(source: str) -> list[int]:
    """The lines in which it is asked for, or imported by its name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in TIMES_OF_DAY:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and any((node.module, a.name) in TIMES_OF_DAY for a in node.names):
            found.append(node.lineno)
    return found


def test_the_package_never_looks_at_the_time_of_day() -> None:
    findings = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := looks_at_the_time_of_day(path.read_text()))
    }
    assert findings.keys() == SHOWN
    assert all(len(lines) == 1 for lines in findings.values())


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t, time\nuntil = 5 + time.time_ns()",
        "from time import time\n",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime, date\ndate.today()",
    ],
)
def test_a_look_at_the_time_of_day_is_found(source: str) -> None:
    assert looks_at_the_time_of_day(source)


def test_monotonic_clocks_are_not() -> None:
    assert looks_at_the_time_of_day("import time\ntime.monotonic(); time.perf_counter(); time.sleep(1)") == []
