"""Runs every benchmark in a short form and prints the tables: `python -m benchmarks`, a few minutes."""

from __future__ import annotations

import subprocess
import sys

import torch

SHORT_FORMS = (
    ("benchmarks.catalog", ("--rounds", "5")),
    ("benchmarks.growth", ("--rounds", "2", "--tensors", "1000", "10000", "100000", "--one-shard", "50000")),
    ("benchmarks.small", ("--rounds", "3", "--tensors", "20000")),
    ("benchmarks.stream", ("--rounds", "3", "--gib", "1")),
    ("benchmarks.host_tables", ("--rounds", "3", "--ranks", "4")),
    ("benchmarks.draft", ("--short",)),
    ("benchmarks.agreement", ("--short",)),
)


ON_A_DEVICE = (("benchmarks.device", ("--rounds", "3", "--gib", "1")),)


def main() -> int:
    """The first exit code that is not 0, after all have run: a missed target does not hide the other tables."""
    codes = []
    for module, arguments in SHORT_FORMS + (ON_A_DEVICE if torch.cuda.is_available() else ()):
        print(f"\n== python -m {' '.join((module, *arguments))}\n", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", module, *arguments, *sys.argv[1:]], check=False).returncode)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
