"""Who takes part: from `group=` of the service, or from the launcher's environment, to a `Group` that makes sessions.

torch is imported only where there is something of torch to use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from loader_service.agreement.carriers import SoloCarrier
from loader_service.agreement.messages import Describe, Phase
from loader_service.agreement.protocol import LEADER, AgreementSettings, Limits
from loader_service.agreement.session import Session
from loader_service.agreement.store_carrier import StoreCarrier
from loader_service.agreement.store_clients import ClientPool, Meeting, Store, pool_at
from loader_service.errors import ConfigError, StateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]  # public, but not in its __all__

_PREFIX = "loader_service"
_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANK_VARIABLES = {"WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where ranks meet that have no process group: for Ray, MPI and multiprocessing executors.

    `store_or_address` is a torch.distributed `Store`, or "host:port". At an address rank 0 starts the store's server,
    which then lives as long as its process, unless `served` says that somebody else (an agent) serves there already.
    `nonce` names the meeting: the same on all its ranks, another one for each other group of ranks in the same store.
    An IPv6 address stands in brackets: "[::1]:29500".
    """

    store_or_address: TorchStore | Store | str
    rank: int
    world_size: int
    nonce: str
    served: bool = False

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("world_size", self.world_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"Rendezvous: {name} is {value!r}, which is no number")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"Rendezvous: rank {self.rank} is not one of {self.world_size} ranks (0 to n-1)")
        if not isinstance(self.nonce, str) or not self.nonce:
            raise ConfigError(f"Rendezvous: the nonce is {self.nonce!r}; it must be a text that names the meeting")
        if isinstance(self.store_or_address, str):
            _split_address(self.store_or_address)


GroupChoice: TypeAlias = "ProcessGroup | Rendezvous | Literal['solo'] | None"


class Group:
    """The ranks that act together, as one of them sees them. Sessions follow one another, in one order on all ranks.

    Nothing is connected before the first session starts. The store counts each rank's sessions of one process group
    (or nonce), so that keys never meet again: every rank must enter its loads there in the same order, one at a time.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        limits: Limits,
        *,
        meeting: Meeting | None = None,
        host_rank: int | None = None,
        meets_at: str = "",
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._limits = limits
        self._meeting = meeting
        self._host_rank = host_rank
        self._meets_at = meets_at
        self._let_go = let_go

    def session(self, name: str, describe: Mapping[Phase, Describe] | None = None) -> Session:
        """A new session for one load. `describe` names the first difference between two bodies, by phase (leader)."""
        carrier: SoloCarrier | StoreCarrier = SoloCarrier()
        if self._meeting is not None:
            carrier = StoreCarrier(
                meeting=self._meeting,
                rank=self.rank,
                world_size=self.world_size,
                heartbeat_s=self._limits.heartbeat_s,
                host_rank=self._host_rank,
                where=self._meets_at,
            )
        return Session(
            name, carrier, rank=self.rank, world_size=self.world_size, limits=self._limits, describe=describe
        )

    def close(self) -> None:
        """Drops the connections. A store's server that this process started goes on: later services meet there."""
        if self._meeting is not None:
            self._meeting.close()
        self._let_go()


def join_group(group: GroupChoice, *, settings: AgreementSettings, environ: Mapping[str, str] = os.environ) -> Group:
    """The group that `group` names. Returns at once and connects nothing yet.

    None: torch.distributed's default group if it is initialised, else this process alone; but a ConfigError if a
    launcher has started several ranks that nobody has connected. "solo": alone, whatever else. A ProcessGroup: its
    members only. A Rendezvous: see there.
    """
    limits = Limits.of(settings)
    if group == "solo":
        return Group(0, 1, limits)
    if isinstance(group, Rendezvous):
        return _join_rendezvous(group, limits)
    default = _default_process_group()
    if group is None and default is None:
        _refuse_unconnected_ranks(environ)
        return Group(0, 1, limits)
    return _join_process_group(default if group is None else group, limits, environ)


def from_environment(environ: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """The meeting that torchrun (or mpirun with MASTER_ADDR and MASTER_PORT) arranged; None for one rank alone.

    Under torchrun its agent serves the store, otherwise rank 0 does. Raises ConfigError if the environment says that
    there are several ranks, but not which one this is or where they meet.
    """
    size_variable = _several_ranks(environ)
    if size_variable is None:
        return None
    rank_variable = _RANK_VARIABLES[size_variable]
    missing = [name for name in (rank_variable, "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{size_variable} is {environ[size_variable]}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start the ranks with torchrun, or set these variables"
        )
    run = environ.get("TORCHELASTIC_RUN_ID", "env")
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    host = environ["MASTER_ADDR"]
    return Rendezvous(
        f"[{host}]:{environ['MASTER_PORT']}" if ":" in host else f"{host}:{environ['MASTER_PORT']}",
        _number(environ, rank_variable),
        _number(environ, size_variable),
        f"{run}.{attempt}",
        served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


# -- kinds of groups --------------------------------------------------------------------------------------------------


def _default_process_group() -> ProcessGroup | None:
    torch = sys.modules.get("torch")  # not imported yet: then nobody can have initialised it
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return cast("ProcessGroup", torch.distributed.group.WORLD)


def _join_process_group(group: ProcessGroup | None, limits: Limits, environ: Mapping[str, str]) -> Group:
    import torch.distributed as dist

    if cast(object, group) is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group= is a process group that this rank is no member of; open the service on its members")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group= is {type(group).__name__}; it takes None, 'solo', a torch.distributed ProcessGroup or a Rendezvous"
        )
    try:
        members = dist.get_process_group_ranks(group)
    except KeyError:
        raise ConfigError("group= is a process group that was destroyed; open the service while it lives") from None
    rank, world_size = group.rank(), group.size()
    if world_size == 1:
        return Group(0, 1, limits)
    # torch's own launchers serve the store in the agent or in global rank 0; only the latter goes down with a rank.
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host_rank = members.index(0) if not agent and 0 in members and group is dist.group.WORLD else None
    nonce = f"group.{group.group_name}.{'-'.join(map(str, members)) if world_size <= 64 else world_size}"
    store_of = _StoreOf(group)
    return Group(
        rank,
        world_size,
        limits,
        meeting=Meeting(ClientPool(store_of), f"{_PREFIX}/{nonce}", rank, keep=False),
        host_rank=host_rank,
        meets_at=f"the store of process group {group.group_name!r}",
        let_go=store_of.let_go,
    )


class _StoreOf:
    """Gets the store of a process group, and holds the group no longer than the service needs it.

    A process group ends its threads with the last reference. One that outlives `destroy_process_group` because of ours
    (a closed service waits for the garbage collector) may still have them when the interpreter ends, which then aborts.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = group

    def __call__(self) -> Store:
        group = self._group
        if group is None:
            raise StateError("the service is closed")
        return cast("Store", group.get_group_store())

    def let_go(self) -> None:
        self._group = None


def _join_rendezvous(meeting: Rendezvous, limits: Limits) -> Group:
    rank, world_size = meeting.rank, meeting.world_size
    if world_size == 1:
        return Group(0, 1, limits)
    target = meeting.store_or_address
    prefix = f"{_PREFIX}/{meeting.nonce}"
    if isinstance(target, str):
        host, port = _split_address(target)
        serves = rank == LEADER and not meeting.served
        pool = pool_at(host, port, serves=serves, timeout_s=limits.start_timeout_s)
        return Group(
            rank,
            world_size,
            limits,
            meeting=Meeting(pool, prefix, rank, keep=True),
            host_rank=None if meeting.served else LEADER,
            meets_at=f"at {target}",
        )
    if not callable(getattr(target, "clone", None)):
        raise ConfigError(f"Rendezvous: {type(target).__name__} is neither 'host:port' nor a torch Store")
    store = cast(Store, target)
    place = Meeting(ClientPool(lambda: store), prefix, rank, keep=False)
    return Group(rank, world_size, limits, meeting=place, meets_at=f"a {type(target).__name__} given to Rendezvous")


# -- the environment --------------------------------------------------------------------------------------------------


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"the environment variable {name} is {environ[name]!r}, which is no number")
    return int(text)


def _several_ranks(environ: Mapping[str, str]) -> str | None:
    """The variable that says that there is more than one rank, if one does."""
    return next((name for name in _SIZE_VARIABLES if environ.get(name) and _number(environ, name) > 1), None)


def _refuse_unconnected_ranks(environ: Mapping[str, str]) -> None:
    name = _several_ranks(environ)
    if name is not None:
        raise ConfigError(
            f"{name} is {environ[name]}, but torch.distributed is not initialised, so that each rank would load alone: "
            "call torch.distributed.init_process_group first, or pass group=Rendezvous(...), "
            'or group="solo" if every rank shall load for itself'
        )


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    brackets = bare != host
    if not colon or not bare or (":" in bare) != brackets or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"Rendezvous: {address!r} is not an address like 'host:29500' or '[::1]:29500'")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"Rendezvous: {address!r} is not an address: ports are 1 to 65535")
    return bare, int(port)
