"""What all loads of one service share, and who owns it: the group, open files, threads, staging memory, catalogs.

Runs on the service's loop. Blocking work (listing folders, reading headers, making a plan) goes to threads; a read
that does not return is named by a watchdog and fails the load, whatever phase it is in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from loader_service import logs
from loader_service.agreement.group import Group, GroupChoice, join_group
from loader_service.agreement.node import BOOT_ID_PATH, node_name
from loader_service.bridge import uninterrupted
from loader_service.checkpoint.catalog import Catalog, Shard
from loader_service.checkpoint.discovery import Kept, is_touched, read_catalog
from loader_service.config.schema import CheckpointConfig, ServiceConfig, check_world_size
from loader_service.errors import ReadError, StateError, name_of, text_of
from loader_service.filling import CachedBytes, HeldBytes, Resources
from loader_service.keeping.attachment import Attachment
from loader_service.memory.admission import Room, memory_rooms
from loader_service.memory.budget import slot_bytes_of
from loader_service.memory.pinning import CudaPinner, Pinner
from loader_service.memory.pool import StagingPool
from loader_service.memory.process_cache import weight_cache
from loader_service.planning.mesh import Mesh
from loader_service.planning.plan import LoadPlan, RankPlan, make_plan
from loader_service.reading.file_range import Access, Drop
from loader_service.reading.handles import HandleCache
from loader_service.reading.local import LocalStorage
from loader_service.reading.positioned import verify_identity
from loader_service.reading.ranges import RangeReader
from loader_service.reading.reader import FileIdentity, Storage
from loader_service.reading.threads import ReadPool, thread_count
from loader_service.report import PolicyOutcome
from loader_service.rows import RowReader

log = logs.logger("loader_service.engine")

T = TypeVar("T")
RowReaderT = TypeVar("RowReaderT", bound=RowReader)

HEADER_THREADS = 8  # headers are small and latency-bound
SERVICE_CLOSED = "the service was closed"


class OpenLoad(Protocol):
    """The load that is open in a service, as far as closing the service needs it."""

    name: str

    async def leave(self, error: BaseException | None = None) -> None: ...


class Engine:
    """The shared parts of one service on one rank. `start` joins the group, `stop` ends everything it owns.

    `storage` and `pinner` are what touches the disk and the accelerator; tests pass the in-package fakes. `attach`:
    bytes come from the node's resident services, as far as they keep them. `ranks`: plans are for so many, instead of
    those that act here; `headers` is where headers are kept then.
    """

    def __init__(
        self,
        config: ServiceConfig,
        group: GroupChoice,
        coords: Mapping[str, int] | None,
        *,
        storage: Storage | None = None,
        pinner: Pinner | None = None,
        attach: bool = False,
        ranks: int | None = None,
        headers: Kept | None = None,
    ) -> None:
        self.config = config
        self.attachment = Attachment(config) if attach else None
        self._ranks = ranks
        self._headers = headers
        self.coords = dict(coords) if coords is not None else None
        self.storage: Storage = storage if storage is not None else LocalStorage()
        self.node = ""
        self._group_spec = group
        self._group: Group | None = None
        self.pinner: Pinner = pinner if pinner is not None else CudaPinner()
        self._pool: StagingPool | None = None
        self._catalogs: dict[CheckpointConfig, Catalog] = {}
        self._plans: dict[tuple[str, Mesh], LoadPlan] = {}
        self._all_coords: list[Mapping[str, int]] | None = None
        self.handles = HandleCache(self.storage)
        self.threads = ReadPool(HEADER_THREADS)
        self._workers = ReadPool(1, name="loader-plan")
        self.open_load: OpenLoad | None = None
        # How much memory is free; tests say it themselves.
        self.memory_rooms: Callable[[], tuple[Room, ...]] = memory_rooms
        self.entering = asyncio.Lock()  # loads and tables meet the other ranks in the order of the calls
        self.table_turn = asyncio.Lock()  # one host table at a time is filled, in the same order
        self.collective_tasks: set[asyncio.Task[object]] = set()
        self._watching: asyncio.Task[None] | None = None  # the services that this one is attached to
        self._reading_headers = asyncio.Lock()  # a plan asked for meanwhile waits for the same catalog

    @property
    def group(self) -> Group:
        if self._group is None:
            raise StateError("the service is not open: use `async with LoaderService(...)` or `with ...blocking(...)`")
        return self._group

    @property
    def ranks(self) -> int:
        """How many ranks plans are for."""
        return self.group.world_size if self._ranks is None else self._ranks

    def check_no_open_load(self) -> None:
        """Raises StateError while a load is open: one at a time in a service."""
        if self.open_load is not None:
            raise StateError(
                f"load '{self.open_load.name}' is still open in this service: leave it first, or use a second service"
            )

    def subject(self, load: str | None = None, phase: str | None = None) -> logs.Subject:
        """What is logged of this rank, and of a load."""
        group = self._group
        return logs.Subject(load, group.rank if group else None, group.world_size if group else None, phase)

    async def start(self) -> None:
        """Joins the group and checks that the configuration fits its size; nothing of the checkpoint is touched."""
        self.node = await self.in_thread(node_name, what=BOOT_ID_PATH)
        self.threads.resize(min(HEADER_THREADS, await self.in_thread(lambda: self.handles.limit, what="/proc/self/fd")))
        self._group = join_group(self._group_spec, settings=self.config.agreement)
        check_world_size(self.config, self.ranks, coords_given=self.coords is not None)
        if self.coords is not None and self.config.mesh is not None:
            Mesh.with_coords(self.config.mesh, [self.coords])  # raises for a place that the mesh does not have

    async def close(self, error: BaseException | None) -> None:
        """Leaves what is still open (a table that is being filled, a load), then ends everything that the service owns,
        also when cancelled."""
        try:
            if tables := tuple(self.collective_tasks):
                for task in tables:
                    task.cancel(SERVICE_CLOSED)
                await asyncio.wait(tables)
            if self.open_load is not None:
                await self.open_load.leave(error)
        finally:
            with logs.working_on(self.subject()):
                await uninterrupted(self._end())

    async def _end(self) -> None:
        """Ends threads, memory and files. Waits at most `agreement.grace_s` for reads that are still in flight."""
        if self._watching is not None:
            self._watching.cancel()
        if self.attachment is not None:
            self.attachment.close()
        if self._group is not None:
            self._group.close()
        self._group_spec = None  # the caller's, who may end it now; this object may wait for the garbage collector
        grace_s = self.config.agreement.grace_s
        if self._pool is not None:
            await self._pool.close(grace_s)
        ended = [asyncio.wrap_future(threads.stop()) for threads in (self.threads, self._workers)]
        await asyncio.wait(ended, timeout=grace_s)
        for read in (*self.threads.stuck(), *self.threads.in_flight()):
            log.warning("left behind: %s, %s, has not returned for %.1f s", read.path, read.label, read.age_s)
        closing = ReadPool(1, name="loader-close")
        closed = asyncio.wrap_future(closing.submit(self.handles.close))
        await asyncio.wait([closed], timeout=grace_s)
        if closed.done() and (error := closed.exception()) is not None:  # a storage's own; the bytes are not wrong
            log.warning("files could not be closed: %s: %s", name_of(error), text_of(error))
        closing.stop()

    async def in_thread(
        self,
        work: Callable[[], T],
        *,
        what: str,
        on_progress: Callable[[str], None] | None = None,
        progress: Callable[[], str] | None = None,
    ) -> T:
        """Runs blocking work beside the loop; fails if a read behind it, or the work itself (`what`), does not return.

        `progress` says how far the work has come: how many files were opened, unless given. While that changes it is
        not stuck; `on_progress` is told it again and again.
        """
        future = self._workers.submit(work)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if nobody waits then
        limit_s = self.config.reads.stuck_after_s
        if progress is None:
            progress = self._files_opened
        came_to, moved_s = progress(), time.monotonic()
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=min(1.0, limit_s / 4))
            if done:
                error = waiting.exception()
                if error is not None and not issubclass(type(error), Exception):  # SystemExit, whoever raised it there
                    raise ReadError(f"{name_of(error)} in {what}: {text_of(error)}") from error
                return waiting.result()
            now_at = progress()
            if on_progress is not None:
                on_progress(now_at)
            reads = self.threads.in_flight()
            stuck = next((read for read in reads if read.age_s > limit_s), None)
            if reads or came_to != now_at:
                came_to, moved_s = now_at, time.monotonic()
            if stuck is None and time.monotonic() - moved_s <= limit_s:
                continue
            if stuck is not None:
                self.threads.abandon(stuck.future)
                what = f"{stuck.path}: {stuck.label}"
            if not self._workers.abandon(future):
                future.cancel()
            raise ReadError(
                f"{what} has not returned for {limit_s:g} s (reads.stuck_after_s): check the storage",
                path=stuck.path if stuck is not None else None,
            )

    def _files_opened(self) -> str:
        return f"{self.handles.opens} files opened to read headers"

    async def after_the_rest(self, work: Callable[[], None], *, within_s: float) -> None:
        """Blocking work for which whatever `in_thread` still does must have ended; given up after `within_s`."""
        await asyncio.wait([asyncio.wrap_future(self._workers.submit(work))], timeout=within_s)

    async def catalog(
        self, load: str, *, fresh: bool = False, on_progress: Callable[[str], None] | None = None
    ) -> Catalog:
        """The load's checkpoint; read once a service, again if `fresh` (every rank then reads its headers again)."""
        location = self.config.checkpoint_of(load)
        async with self._reading_headers:
            await self._attach(on_progress)
            what = f"looking at {location.path if isinstance(location.path, str) else location.path[0]}"
            catalog = None if fresh else self._catalogs.get(location)
            if catalog is not None and self._kept_headers is not None:
                touched = partial(is_touched, catalog, self.storage)
                if await self.in_thread(touched, what=what, on_progress=on_progress):
                    catalog = None
            if catalog is None:
                read = partial(self._read_catalog, location, fresh=fresh)
                catalog = await self.in_thread(read, what=what, on_progress=on_progress)
                self._catalogs[location] = catalog
        return catalog

    async def _attach(self, on_progress: Callable[[str], None] | None) -> None:
        """Attaches to the node's resident services, unless this is done, and they are there."""
        attachment = self.attachment
        if attachment is None or attachment.is_attached:
            return
        await self.in_thread(
            attachment.connect,
            what=f"attaching to {attachment.where}",
            on_progress=on_progress,
            progress=lambda: attachment.progress,
        )
        if self._watching is None or self._watching.done():
            watching = attachment.watch(lambda: self._workers.submit(attachment.let_go_of_ended))
            self._watching = asyncio.ensure_future(watching)

    @property
    def _kept_headers(self) -> Kept | None:
        if self.attachment is not None and self.attachment.headers is not None:
            return self.attachment.headers
        if self._headers is not None:
            return self._headers
        return weight_cache().headers if self.config.cache.on else None

    def _read_catalog(self, location: CheckpointConfig, *, fresh: bool) -> Catalog:
        kept = self._kept_headers
        if kept is not None and fresh:
            kept.clear()
        return read_catalog(
            location.path,
            location.index,
            handles=self.handles,
            storage=self.storage,
            threads=self.threads,
            retries=self.config.reads.retries,
            kept=kept,
        )

    def verify(self, shard: Shard) -> None:
        """Raises CheckpointError unless the file is still the one whose header was read. Blocks."""
        self.verify_file(shard.path, shard.identity)

    def verify_file(self, path: str, identity: FileIdentity) -> None:
        """As `verify`, of any file."""
        verify_identity(self.handles, path, identity, retries=self.config.reads.retries)

    async def held(self, plan: RankPlan) -> HeldBytes | None:
        """What of a load is in memory: kept by the node's resident services or, where they keep nothing of it, in the
        raw weight cache, in which no room was made for it yet. None: neither."""
        shards, capacity_bytes = plan.catalog.shards, self.config.cache.capacity_bytes
        if (attachment := self.attachment) is not None:
            kept = await self.in_thread(lambda: attachment.bytes_of(plan), what="mapping what the service keeps")
            if kept is not None and kept.kept_bytes:
                return kept
        if not capacity_bytes:
            return None
        claim = partial(CachedBytes, weight_cache(), plan, shards, capacity_bytes)
        return await self.in_thread(claim, what="looking into the raw weight cache")

    def forget_catalog(self, load: str) -> None:
        """After a failed load: files may have changed, so the next one reads the headers again, as on all ranks."""
        if load in self.config.loads:
            weight_cache().headers.clear()
            self._catalogs.pop(self.config.checkpoint_of(load), None)

    def set_coords(self, listed: Sequence[object] | None) -> None:
        """Takes every rank's coordinates. None: no rank gave any, so that they are row-major; ranks agree on which."""
        if listed is not None:
            self._all_coords = [coords for coords in listed if isinstance(coords, dict)]

    def mesh(self) -> Mesh:
        """Rank -> coordinates. With `coords=` the other ranks' are known once they have met in a load."""
        config, group = self.config, self.group
        if self._all_coords is not None:
            return Mesh.with_coords(config.mesh, self._all_coords)
        if self.coords is None:
            return Mesh.row_major(config.mesh, self.ranks)
        own = self.coords
        return Mesh.with_coords(config.mesh, [own if rank == group.rank else None for rank in range(group.world_size)])

    async def plan(self, load: str, catalog: Catalog | None = None) -> LoadPlan:
        """Every rank's plan of a load, from the catalog that the ranks agreed on or, locally, the service's own."""
        if catalog is None:
            catalog = await self.catalog(load)
        mesh = self.mesh()
        plan = self._plans.get((load, mesh))
        if plan is None or plan.catalog is not catalog:  # read again: the same digest, other files' identities
            config = self.config
            plan = await self.in_thread(
                lambda: make_plan(
                    catalog, load, config.loads[load], mesh, coalesce_gap_bytes=config.reads.coalesce_gap_bytes
                ),
                what=f"planning load '{load}'",
            )
            self._plans[load, mesh] = plan
        return plan

    def range_reader(self, *, drop: Drop, access: Access | None = None, by_tensor: bool = False) -> RangeReader:
        """A way of reading for one load, or for tables: as `reads.access` says, unless `access` is decided already."""
        reads = self.config.reads
        how: Access = access or reads.access
        return RangeReader(self.handles, access=how, retries=reads.retries, drop=drop, by_tensor=by_tensor)

    @property
    def pool(self) -> StagingPool:
        """The service's staging memory; nothing is allocated before a load needs it."""
        if self._pool is None:
            reads, staging = self.config.reads, self.config.staging
            slot_bytes = slot_bytes_of(reads.chunk_bytes, staging.capacity_bytes)
            self._pool = StagingPool(staging.capacity_bytes, slot_bytes=slot_bytes, pin=staging.pin, pinner=self.pinner)
        return self._pool

    def row_reader(self, kind: type[RowReaderT], *, may_drop: bool) -> RowReaderT:
        """A reader for host-resident tables, over the service's files and threads. `may_drop`: no other rank wants the
        same bytes, so that the page cache need not keep what is read."""
        reads = self.config.reads
        drops: dict[str, Drop] = {"auto": "what it brought in", "always": "everything", "never": "nothing"}
        drop: Drop = drops[reads.drop_page_cache] if may_drop else "nothing"
        ranges = self.attachment.range_reader(self.handles, drop=drop) if self.attachment is not None else None
        if ranges is None:
            ranges = self.range_reader(drop=drop, by_tensor=True)
        return kind(ranges, self.threads, chunk_bytes=reads.chunk_bytes, stuck_after_s=reads.stuck_after_s)

    def size_threads(self, ranks_by_node: Mapping[str, int]) -> PolicyOutcome:
        """Sets the number of reading threads, by what is configured and how many ranks each node has."""
        reads = self.config.reads
        here = ranks_by_node.get(self.node, 1)
        threads, reason = thread_count(reads.threads, reads.threads_per_node, here, self.handles.limit)
        self.handles.check_threads(threads)
        self.threads.resize(threads)
        return PolicyOutcome(str(reads.threads), str(threads), reason)

    def resources(
        self, ranks_by_node: Mapping[str, int], *, access: Access | None = None
    ) -> tuple[Resources, dict[str, PolicyOutcome]]:
        """Threads, memory and a way of reading for a load, and the policies in effect. `ranks_by_node`: how many ranks
        each node has; `access`: instead of `reads.access`."""
        reads = self.config.reads
        threads = self.size_threads(ranks_by_node)
        policies = {
            "drop_page_cache": PolicyOutcome(reads.drop_page_cache, "never", "what was read stays cached"),
            "threads": threads,
            "pin": self.pool.pin_outcome,
        }
        ranges = self.range_reader(drop="nothing", access=access)
        return Resources(ranges, self.threads, self.threads.threads, self.pool), policies
