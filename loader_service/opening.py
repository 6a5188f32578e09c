"""What ranks agree on before bytes are read, for loads and tables alike: configuration, catalog, plan."""

from __future__ import annotations

from loader_service import logs
from loader_service.agreed import catalog_record, config_record, plan_record
from loader_service.agreement.messages import JSON, Phase, PhaseRecord, Verdict
from loader_service.agreement.session import Session
from loader_service.checkpoint.catalog import Catalog
from loader_service.engine import Engine
from loader_service.errors import CheckpointError, ReadError, record_of
from loader_service.neighbours import Neighbours
from loader_service.planning.plan import LoadPlan

log = logs.logger("loader_service.load")


class Opening:
    """The first three phases of one session on its rank. `fallbacks` gets what was done otherwise than asked."""

    def __init__(self, engine: Engine, load: str, session: Session, fallbacks: list[str]) -> None:
        self._fallbacks = fallbacks
        self._engine = engine
        self._load = load
        self._session = session
        self._enters = False

    async def config(self, others: Neighbours, table: str | None = None, serve: JSON = None) -> Verdict:
        """Agrees on the configuration. `table`, if one is filled, is agreed on too, and so is what services `serve`; of
        the cards that `others` show each rank hears all.

        Calls meet the other ranks in their order. After a failure here the next one waits for `let_next_enter`.
        """
        engine = self._engine
        await engine.entering.acquire()
        self._enters = True
        card = await others.card()
        record = config_record(
            engine.config,
            self._load,
            node=engine.node,
            world_size=engine.ranks,
            coords=engine.coords,
            table=table,
            serve=serve,
            card=card,
        )
        verdict = await self._session.exchange(Phase.CONFIG, record)
        engine.set_coords([facts.get("coords") for facts in verdict.facts] if engine.coords is not None else None)
        self.let_next_enter()
        return verdict

    def let_next_enter(self) -> None:
        """After a failure, once its end is known: a rank that comes late would else take this session for one that the
        others have left behind, and what this call wants into the next one. Does nothing a second time."""
        if self._enters:
            self._enters = False
            self._engine.entering.release()

    async def catalog(self) -> Catalog:
        """Reads the headers; if any rank could not, all ranks read theirs again, once, together."""
        on_progress = self._session.report_progress  # a rank whose storage is slow is not late
        try:
            catalog = await self._engine.catalog(self._load, on_progress=on_progress)
        except (CheckpointError, ReadError) as error:
            failure = record_of(error, rank=self._engine.group.rank, phase=Phase.CATALOG.value)
            verdict = await self._session.exchange(Phase.CATALOG, PhaseRecord(outcome="retry", failure=failure))
        else:
            verdict = await self._session.exchange(Phase.CATALOG, catalog_record(catalog))
        if verdict.action == "retry":
            self._fallbacks.append("headers: read again by all ranks, since a rank could not read one")
            catalog = await self._engine.catalog(self._load, fresh=True, on_progress=on_progress)
            await self._session.exchange(Phase.CATALOG, catalog_record(catalog))
        return catalog

    async def plan(self, catalog: Catalog) -> LoadPlan:
        """Plans, this rank's part too; to be agreed on then."""
        plan = await self._engine.plan(self._load, catalog)
        await self._engine.in_thread(
            lambda: plan.for_rank(self._engine.group.rank).streamed, what=f"planning load '{self._load}'"
        )
        return plan

    async def agree_on_plan(self, plan: LoadPlan, told: JSON = None) -> Verdict:
        """Agrees on the plan; of `told` each rank hears all."""
        verdict = await self._session.exchange(Phase.PLAN, plan_record(plan, told))
        for warning in plan.warnings:
            log.warning("load '%s': %s", self._load, warning)
        if plan.read_all:
            self._fallbacks.append("key_prefixes: no name matches, so the load was done as if none were declared")
        return verdict
