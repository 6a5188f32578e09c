"""Exchanges between real processes on loopback: how long one takes, and what agreement adds to a load without bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import loader_service as ls
from benchmarks.common import TensorShape, make_checkpoint
from benchmarks.ranks import Rank, Team, free_address, serve_store, store_address
from loader_service.agreement import PHASES, PhaseRecord, join_group
from loader_service.config.schema import AgreementConfig, ServiceConfig

Served = Literal["agent", "rank 0", "nowhere"]

WARM_LOADS = 3  # they connect, and import what is imported at its first use
RECORD = PhaseRecord("d" * 64, counted={"node": "n" * 36})
_TCP_BYTES_ACKED_AT = 120  # in struct tcp_info: two numbers of 64 bits, acked and received


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What all ranks measured, their samples together. Bytes are those of a member's connections, for one session."""

    ranks: int
    served: Served
    exchange_s: tuple[float, ...]
    session_s: tuple[float, ...]
    load_s: tuple[float, ...]
    sent_bytes: float | None
    received_bytes: float | None


def measure(world_size: int, served: Served, loads: int, folder: Path) -> Exchanges:
    """So many sessions (six exchanges and leaving), then as many loads whose consumer takes nothing."""
    with contextlib.ExitStack() as stack:
        address = free_address()
        if served == "agent":
            address = store_address(stack.enter_context(Team(serve_store, 1)))
        team = stack.enter_context(Team(agree_often, world_size, served, loads, str(folder), address=address))
        results = team.hear("result")
    exchanges, sessions, whole, traffic = zip(*results, strict=True)
    sent_bytes, received_bytes = traffic[-1]  # rank 0 may have the server's side of every connection too
    return Exchanges(
        ranks=world_size,
        served=served,
        exchange_s=sum(exchanges, ()),
        session_s=sum(sessions, ()),
        load_s=sum(whole, ()),
        sent_bytes=None if sent_bytes is None else sent_bytes / loads,
        received_bytes=None if received_bytes is None else received_bytes / loads,
    )


Times = tuple[float, ...]
Traffic = tuple[int | None, int | None]


def agree_often(rank: Rank, served: Served, loads: int, folder: str) -> tuple[Times, Times, Times, Traffic]:
    """A rank's process: seconds of each exchange, of each session, of each load, and a session's bytes."""
    config = small_config(folder)
    return asyncio.run(_agree_often(rank, served, loads, config))


async def _agree_often(
    rank: Rank, served: Served, loads: int, config: ServiceConfig
) -> tuple[Times, Times, Times, Traffic]:
    exchanges: list[float] = []
    sessions: list[float] = []
    whole: list[float] = []
    before: Traffic = (None, None)
    group = join_group(_meeting(rank, served, "sessions"), settings=AgreementConfig())
    for number in range(-WARM_LOADS, loads):
        if number == 0:
            before = traffic()
        began_s = time.perf_counter()
        session = group.session("load")
        for phase in PHASES:
            exchange_began_s = time.perf_counter()
            await session.exchange(phase, RECORD)
            exchanges.append(time.perf_counter() - exchange_began_s)
        await session.close()
        sessions.append(time.perf_counter() - began_s)
    after = traffic()
    group.close()
    async with ls.LoaderService(config, _meeting(rank, served, "loads")) as service:
        for _ in range(WARM_LOADS + loads):
            began_s = time.perf_counter()
            async with service.open("target"):
                pass
            whole.append(time.perf_counter() - began_s)
    warm = WARM_LOADS * len(PHASES)
    return tuple(exchanges[warm:]), tuple(sessions[WARM_LOADS:]), tuple(whole[WARM_LOADS:]), _difference(before, after)


def _meeting(rank: Rank, served: Served, nonce: str) -> ls.Rendezvous | Literal["solo"]:
    if served == "nowhere":
        return "solo"
    return ls.Rendezvous(rank.address, rank.rank, rank.world_size, nonce, served=served == "agent")


def make_small_checkpoint(folder: Path) -> None:
    make_checkpoint(folder, [TensorShape(f"layers.{i}.weight", (16,)) for i in range(64)], 2)


def small_config(folder: str) -> ServiceConfig:
    return ls.config_from_dict(
        {"checkpoint": {"path": folder}, "loads": {"target": {}}, "staging": {"capacity_bytes": 1 << 20}}
    )


# Bytes


def traffic() -> Traffic:
    """Payload bytes that this process's TCP connections have sent (and the peer acknowledged) and received so far, as
    the kernel counts them; None where it does not."""
    sent = received = 0
    for own in _own_connections():
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_ACKED_AT + 16)
        if len(info) < _TCP_BYTES_ACKED_AT + 16:
            return None, None
        acked, got = struct.unpack_from("=QQ", info, _TCP_BYTES_ACKED_AT)
        sent, received = sent + acked, received + got
    return sent, received


def _own_connections() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family in {socket.AF_INET, socket.AF_INET6}:
                    yield own


def _difference(before: Traffic, after: Traffic) -> Traffic:
    if None in before or None in after:
        return None, None
    sent, received = (b - a for a, b in zip(before, after, strict=True) if a is not None and b is not None)
    return sent, received
