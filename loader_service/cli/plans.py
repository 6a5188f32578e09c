"""`plan`: who would read what. Nothing runs and no ranks meet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader_service.checkpoint.catalog import Catalog
from loader_service.cli.catalogs import read_headers
from loader_service.cli.checking import check_writable, write_text
from loader_service.cli.loads import load_of
from loader_service.cli.output import print_document
from loader_service.config.schema import ServiceConfig
from loader_service.errors import EXIT_OK, ConfigError, LoaderError
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, make_plan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `plan` was called with. `load` None: the file's only one; `ranks` None: as many as `planned_ranks` says.
    `rank`: whose part `tensors` lists; None: every rank's."""

    config: Path
    load: str | None
    ranks: int | None
    html: Path | None
    tensors: bool
    rank: int | None
    as_json: bool


def show_plan(options: PlanOptions) -> int:
    """Prints a load's plan for all ranks, and draws it into the file `html`. Returns the exit code."""
    config, load = load_of(options.config, options.load)
    html = options.html
    if html is not None:
        check_writable(html, option="--html")
    plan = plan_of(config, load, options.ranks)
    if options.rank is not None:
        plan.mesh.coordinates(options.rank)  # a rank that does not exist is refused before anything is printed
    if html is not None:
        write_text(html, _page(config, plan), option="--html")
    if options.as_json:
        _print_json(plan, config, options)
    else:
        _print_tables(plan, config, options)
    return EXIT_OK


def _print_json(plan: LoadPlan, config: ServiceConfig, options: PlanOptions) -> None:
    if options.tensors:
        from loader_service.cli.plan_tensors import print_json

        print_json(plan, config.load(plan.load).rules, options.rank)
    else:
        print_document(plan.as_json())


def _print_tables(plan: LoadPlan, config: ServiceConfig, options: PlanOptions) -> None:
    from loader_service.cli.render import show_load_plan

    show_load_plan(plan)
    if options.tensors:
        from loader_service.cli.plan_tensors import print_lines

        print_lines(plan, config.load(plan.load).rules, options.rank)


def plan_of(config: ServiceConfig, load: str, ranks: int | None) -> LoadPlan:
    """A load's plan, from the checkpoint's headers. `ranks` None: as many as `planned_ranks` says."""
    checkpoint = config.checkpoint_of(load)
    mesh = Mesh.row_major(config.mesh, planned_ranks(config, os.environ) if ranks is None else ranks)
    return _plan(config, load, read_headers(checkpoint, retries=config.reads.retries), mesh)


def _plan(config: ServiceConfig, load: str, catalog: Catalog, mesh: Mesh) -> LoadPlan:
    return make_plan(catalog, load, config.load(load), mesh, coalesce_gap_bytes=config.reads.coalesce_gap_bytes)


def _page(config: ServiceConfig, plan: LoadPlan) -> str:
    """The plan's picture; in it lies the first other load with `key_prefixes` over the same checkpoint."""
    from loader_service.cli.plan_page import page_of
    from loader_service.memory.budget import slot_bytes_of

    draft, notes = None, []
    checkpoint = config.checkpoint_of(plan.load)
    for name, load in config.loads.items():
        if name != plan.load and load.key_prefixes and config.checkpoint_of(name) == checkpoint:
            try:
                draft = _plan(config, name, plan.catalog, plan.mesh)
            except LoaderError as error:
                notes.append(f"Load {name} is not drawn: {error}")
            break
    slot_bytes = slot_bytes_of(config.reads.chunk_bytes, config.staging.capacity_bytes)
    return page_of(plan, slot_bytes=slot_bytes, sharing=config.reads.sharing, draft=draft, notes=notes)


def planned_ranks(config: ServiceConfig, environ: Mapping[str, str]) -> int:
    """How many ranks to plan for: the mesh's product, else WORLD_SIZE, else 1."""
    if config.mesh is not None:
        return math.prod(config.mesh.values())
    text = environ.get("WORLD_SIZE") or "1"
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}, which is no number of ranks: unset it, or pass --ranks")
    return int(text)
