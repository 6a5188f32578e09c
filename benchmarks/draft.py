"""Loads a draft out of 3 of 48 shards, and a whole checkpoint on 4 ranks of one node, against other ways and the disk.

The draft's tensors are about a third of the bytes of the shards that hold them. Beside it: a load of everything, one of
those 3 shards whole, and `json.loads` of the 48 headers alone. Then 4 processes take everything by `batches()`: each
for itself, through the page cache that they fill by turns, or out of memory that they share; beside them one process.
Every side runs in fresh processes, in another order each round, with page cache and memory in a known state; before the
first round each runs once with all of its bytes compared with the files'.

    python -m benchmarks.draft --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import limits
from benchmarks.common import (
    GIB,
    MIB,
    add_common_arguments,
    files_of,
    layered_tensors,
    machine,
    make_checkpoint,
    print_table,
    working_folder,
)
from benchmarks.draft_runs import Series, run_rounds
from benchmarks.draft_sides import CAPACITY_BYTES, DraftCheckpoint, Side, make_draft_checkpoint
from benchmarks.host_tables import scaled_bytes

GIBS, DRAFT_GIBS = 3.0, 2.5
SHORT_GIBS = 1.0
ROUNDS, SHORT_ROUNDS = 5, 3
RANKS = 4
RANK_SHARDS = 4
PREFIX = "mtp"

DRAFT, PASSED_ON = "draft, owned", "draft, batches"
FULL, WHOLE = "everything, owned", "its 3 shards, owned"
RING, PARSE = "limit: O_DIRECT ring", "json.loads of the headers"
ONE_DIRECT, ONE_BUFFERED = "1 rank, direct", "1 rank, buffered"
NATIVE, STRIPED, STAGED = "4 ranks, none", "4 ranks, page_cache", "4 ranks, staging"

MOST_READ = 1.05  # bytes of payload read for each that is handed over
MOST_DRAFT = 1.3  # of its bytes at the disk's limit, headers apart
MOST_STAGED = 1.05  # of one rank's time
MOST_STAGED_CPU_S = 0.2  # a GiB of the checkpoint
MOST_STRIPED = 1.15  # of one rank's time, buffered


# What is measured


def draft_series(made: DraftCheckpoint, caches: Sequence[str]) -> list[Series]:
    """Loads of one rank, the ring over the draft's shards, the headers alone."""
    everything = tuple(made.files)
    full = Side(FULL, "owned", everything, payload_bytes=made.payload_bytes, tensors=made.tensors)
    whole = replace(full, label=WHOLE, files=tuple(made.draft_files))
    whole = replace(whole, payload_bytes=made.draft_shards_bytes, tensors=made.draft_shards_tensors)
    draft = replace(full, label=DRAFT, prefixes=(PREFIX,))
    draft = replace(draft, payload_bytes=made.draft_bytes, tensors=made.draft_tensors)
    loads = [draft, replace(draft, label=PASSED_ON, work="batches"), whole, full]
    series = [Series(side, cache) for cache in caches for side in loads]
    if "cold" in caches and limits.can_read_direct(everything[0]):
        series.append(Series(Side(RING, "ring", tuple(made.draft_files)), "cold"))
    return [*series, Series(Side(PARSE, "parse", everything), "warm")]


def rank_series(files: Sequence[Path], payload_bytes: int, tensors: int) -> list[Series]:
    """Everything on each rank, cold. Without O_DIRECT nothing of `RING` and `ONE_DIRECT` is to be had."""
    takes = Side("", "batches", tuple(files), payload_bytes=payload_bytes, tensors=tensors)
    sides = [
        replace(takes, label=ONE_BUFFERED, reads={"access": "buffered"}),
        replace(takes, label=NATIVE, ranks=RANKS, reads={"sharing": "none", "access": "buffered"}),
        replace(takes, label=STRIPED, ranks=RANKS, reads={"sharing": "page_cache"}),
        replace(takes, label=STAGED, ranks=RANKS, reads={"sharing": "staging"}),
    ]
    if limits.can_read_direct(files[0]):
        sides = [Side(RING, "ring", tuple(files)), replace(takes, label=ONE_DIRECT, reads={"access": "direct"}), *sides]
    return [Series(side, "cold") for side in sides]


# What it says


@dataclass(frozen=True, slots=True)
class Target:
    """A median, or a ratio of medians, that must not be exceeded."""

    text: str
    value: float
    most: float

    @property
    def met(self) -> bool:
        return self.value <= self.most

    def __str__(self) -> str:
        return f"{self.text}: {self.value:.3f}, target {self.most:g} ({'met' if self.met else 'MISSED'})"


def draft_targets(all_series: Sequence[Series]) -> list[Target]:
    """Those whose sides were measured."""
    found = []
    by_where = {(each.cache, each.side.label): each for each in all_series}
    for (cache, label), each in by_where.items():
        if each.side.prefixes:
            read = max(run.read_bytes / run.handed_bytes for run in each.runs)
            found.append(Target(f"{cache}, {label}: most bytes read for each that is handed over", read, MOST_READ))
    ring = by_where.get(("cold", RING))
    for label in (DRAFT, PASSED_ON):
        if (draft := by_where.get(("cold", label))) is not None and ring is not None:
            limit_s = draft.side.payload_bytes / limit_of(ring)
            beside_s = draft.median("total_s") - draft.median("header_s")
            text = f"cold, {label}: of its bytes at the disk's limit ({limit_s:.3f} s), header phase apart"
            found.append(Target(text, beside_s / limit_s, MOST_DRAFT))
    return found


def limit_of(ring: Series) -> float:
    """Bytes a second."""
    return ring.median("handed_bytes") / ring.median("seconds")


def rank_targets(all_series: Sequence[Series]) -> list[Target]:
    """Those whose sides were measured."""
    by_label = {each.side.label: each for each in all_series}
    found = []
    for mine, other, most in (
        (STAGED, ONE_DIRECT, MOST_STAGED),
        (STRIPED, ONE_BUFFERED, MOST_STRIPED),
        (STRIPED, NATIVE, 1.0),
    ):
        if mine in by_label and other in by_label:
            ratio = by_label[mine].median("whole_s") / by_label[other].median("whole_s")
            found.append(Target(f"cold, {mine}: of {other}, seconds for all bytes", ratio, most))
    if (staged := by_label.get(STAGED)) is not None:
        cpu_s = staged.median("cpu_s") / (staged.side.payload_bytes / GIB)
        found.append(Target(f"cold, {STAGED}: CPU s for each GiB of the checkpoint", cpu_s, MOST_STAGED_CPU_S))
    return found


def print_draft(all_series: Sequence[Series]) -> None:
    columns = (
        "",
        "seconds",
        "of everything",
        "of 3 shards",
        "headers ms",
        "MiB",
        "read for each",
        "from disk",
        "CPU s",
    )
    loads = [each for each in all_series if each.side.tensors]
    for cache in dict.fromkeys(each.cache for each in loads):
        group = [each for each in loads if each.cache == cache]
        beside_s = [
            next(each.median("total_s") for each in group if each.side.label == label) for label in (FULL, WHOLE)
        ]
        print(f"\n{cache}, one rank\n")
        print_table(columns, [_draft_row(each, beside_s) for each in group])
    parse = next(each for each in all_series if each.side.label == PARSE)
    parse_s, texts_bytes = parse.median("seconds"), parse.median("handed_bytes")
    phases = [
        f"{each.cache} {each.median('header_s') * 1e3:.0f} ms ({each.median('header_s') / parse_s:.2f} x)"
        for each in loads
        if each.side.label == DRAFT
    ]
    print(
        f"\nheaders, {texts_bytes / MIB:.1f} MiB: `json.loads` alone {parse_s * 1e3:.0f} ms; the draft's header phase "
    )
    print(f"with finding, reading, validating and joining them {', '.join(phases)}")
    for ring in (each for each in all_series if each.side.work == "ring"):
        print(f"limit of the disk: {limit_of(ring) / GIB:.2f} GiB/s, an O_DIRECT ring over the draft's 3 shards, cold")


def _draft_row(each: Series, beside_s: Sequence[float]) -> list[str]:
    return [
        each.side.label,
        each.spread("total_s", 3),
        *(f"{each.median('total_s') / seconds:.2f} x" for seconds in beside_s),
        f"{each.median('header_s') * 1e3:.0f}",
        f"{each.median('handed_bytes') / MIB:.0f}",
        f"{each.median('read_bytes') / each.median('handed_bytes'):.3f}",
        f"{each.median('disk_bytes') / MIB:.0f}",
        f"{each.median('cpu_s') + each.median('setup_cpu_s'):.2f}",
    ]


def print_ranks(all_series: Sequence[Series]) -> None:
    columns = (
        "",
        "seconds",
        "for all",
        "set-up",
        "in all",
        "CPU s",
        "a GiB",
        "set-up",
        "GiB from disk",
        "early",
        "MiB",
    )
    print("\ncold, everything on each rank, one byte a page looked at\n")
    print_table(columns, [_rank_row(each) for each in all_series])
    print()
    for each in all_series:
        if each.side.work != "ring":
            phases = {name: statistics.median(run.phases[name] for run in each.runs) for name in each.runs[0].phases}
            figures = ", ".join(f"{name} {phases[name] * 1e3:.0f}" for name in ("config", "catalog", "plan", "open"))
            print(f"{each.side.label}: {each.runs[-1].how}; set-up ms: {figures}")


def _rank_row(each: Series) -> list[str]:
    loads = each.side.work != "ring"
    return [
        each.side.label,
        each.spread("seconds"),
        each.spread("whole_s"),
        each.spread("setup_s") if loads else "",
        f"{each.median('total_s'):.2f}",
        each.spread("cpu_s"),
        f"{each.median('cpu_s') / (each.median('handed_bytes') / each.side.ranks / GIB):.2f}",
        f"{each.median('setup_cpu_s'):.2f}" if loads else "",
        f"{each.median('disk_bytes') / GIB:.2f}",
        f"{each.median('early_bytes') / GIB:.2f}" if loads else "",
        f"{each.median('peak_bytes') / MIB:.0f}",
    ]


# Command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, rounds=ROUNDS)
    parser.set_defaults(rounds=None)
    parser.add_argument("--gib", type=float, help=f"what each of the ranks takes (default {GIBS:g})")
    parser.add_argument(
        "--draft-gib", type=float, default=DRAFT_GIBS, help=f"the checkpoint with a draft (default {DRAFT_GIBS:g})"
    )
    parser.add_argument("--part", choices=("draft", "ranks"), help="only this part (default: both)")
    parser.add_argument("--cache", choices=("cold", "warm"), help="of the draft's loads (default: both)")
    parser.add_argument(
        "--short", action="store_true", help=f"{SHORT_GIBS:g} GiB for each rank and {SHORT_ROUNDS} rounds: 3 minutes"
    )
    return parser


def measure_draft(parent: Path, gibs: float, caches: Sequence[str], rounds: int) -> tuple[list[Series], str]:
    """All rounds, and what was measured, in words."""
    folder = parent / f"loader-bench-draft-{gibs:g}"
    payload_bytes, note = scaled_bytes(int(gibs * GIB), folder)
    made = make_draft_checkpoint(folder, payload_bytes)
    all_series = draft_series(made, caches)
    run_rounds(all_series, rounds)
    for each in all_series:
        if each.side.prefixes and (others := files_beside(each, made)):
            each.wrong.append(f"not those that hold the draft were read, or those were not: {others}")
    text = f"{made.payload_bytes / GIB:.2f} GiB ({note}) in {made.tensors:,} tensors and {len(made.files)} shards; "
    text += (
        f"a draft of {made.draft_bytes / MIB:.0f} MiB in {made.draft_tensors:,} tensors, in {len(made.draft_files)} "
    )
    return all_series, f"{text}shards with {made.draft_shards_bytes / MIB:.0f} MiB"


def files_beside(each: Series, made: DraftCheckpoint) -> str:
    """Shards that were read and do not hold the draft, or hold it and were not read."""
    right = {path.name for path in made.draft_files}
    return ", ".join(sorted({name for run in each.runs for name in right.symmetric_difference(run.files_read)}))


def measure_ranks(parent: Path, gibs: float, rounds: int) -> tuple[list[Series], str]:
    """The same for ranks that each take everything. The checkpoint is the streaming benchmark's."""
    folder = parent / f"loader-bench-stream-{gibs:g}"
    wanted_bytes, note = scaled_bytes(int(gibs * GIB), folder)
    tensors = layered_tensors(wanted_bytes)
    payload_bytes = make_checkpoint(folder, tensors, RANK_SHARDS)
    all_series = rank_series(files_of(folder), payload_bytes, len(tensors))
    run_rounds(all_series, rounds)
    return all_series, f"{payload_bytes / GIB:.2f} GiB ({note}) in {len(tensors):,} tensors and {RANK_SHARDS} shards"


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where a target is missed, or bytes are wrong."""
    arguments = _parser().parse_args(argv)
    short = arguments.short
    rounds = arguments.rounds or (SHORT_ROUNDS if short else ROUNDS)
    gibs = arguments.gib or (SHORT_GIBS if short else GIBS)
    caches = [arguments.cache] if arguments.cache else ["cold", "warm"]
    drafts, ranks, texts, targets = list[Series](), list[Series](), dict[str, str](), list[Target]()
    with working_folder(arguments.folder) as parent:
        if arguments.part != "ranks":
            drafts, texts["draft"] = measure_draft(parent, arguments.draft_gib, caches, rounds)
            targets += draft_targets(drafts)
        if arguments.part != "draft":
            ranks, texts["ranks"] = measure_ranks(parent, gibs, rounds)
            targets += rank_targets(ranks)
    wrong = [f"{each.where}, {text}" for each in (*drafts, *ranks) for text in each.wrong]
    if arguments.json:
        document = {"machine": machine(), "rounds": rounds, "checkpoints": texts, "wrong": wrong}
        document |= {"targets": [str(target) for target in targets]}
        document |= {"draft": [each.as_dict() for each in drafts], "ranks": [each.as_dict() for each in ranks]}
        print(json.dumps(document, indent=2))
    else:
        print(f"{rounds} rounds, staging {CAPACITY_BYTES / MIB:.0f} MiB a rank; {machine()}")
        if drafts:
            print(f"\n{texts['draft']}")
            print_draft(drafts)
        if ranks:
            print(f"\n{texts['ranks']}")
            print_ranks(ranks)
        print("\nbytes: " + ("the files', on every side" if not wrong else f"WRONG: {'; '.join(wrong)}"))
        print("\n".join(map(str, targets)))
    return 1 if wrong or not all(target.met for target in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
