"""Two hosts on one machine: network namespaces joined by a link, each with a name, a boot id and a clock of its own.

    with two_hosts() as hosts:
        run_ranks(work, 4, enter=hosts.enter(ranks_per_host=2), address=hosts.first.address_at(29500))
        hosts.cut_link()

Made of `unshare` and `ip`, by root. What a host sees of its own: network, host name, /etc/hosts, boot id, /dev/shm, and
a monotonic clock that began at another time. Files are shared, as by a network file system. Nothing has a name outside,
so nothing is left behind: see `holder.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import pytest

from tests.hosts.holder import processes_in
from tests.support.ranks import free_port

DEVICE = "eth0"
MEMBERS = (("host-a", "10.77.0.1", 1_000), ("host-b", "10.77.0.2", 5_000_000))  # name, address, age of its clock
SPACES = ("net", "uts", "time", "mnt")  # the mount namespace last: the others' files are seen from outside of it
START_WITHIN_S = 30.0
END_WITHIN_S = 30.0

Direction = Literal["a>b", "b>a"]


@dataclass(frozen=True)
class Host:
    """`pid`: a process in it, which lives as long as the host; `maker`: the one that has made it."""

    name: str
    address: str
    pid: int
    maker: int

    def address_at(self, port: int) -> str:
        return f"{self.address}:{port}"

    def pids(self) -> list[int]:
        """The processes that run in it, but for its own."""
        network = os.readlink(f"/proc/{self.pid}/ns/net")
        return sorted(processes_in(network) - {self.pid, self.maker})

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip` in this host."""
        _run(["nsenter", "--net", "-t", str(self.pid), "ip", "-batch", "-"], "\n".join(commands))


@dataclass(frozen=True)
class Hosts:
    """Two hosts and what joins them. `port` is free in both, as everything is."""

    first: Host
    second: Host
    relay: Relay | None
    port: int

    @property
    def address(self) -> str:
        """Where ranks meet: at the first host."""
        return self.first.address_at(self.port)

    def enter(self, ranks_per_host: int = 2) -> Callable[[int], None]:
        """For `run_ranks(enter=...)`: the first ranks go to the first host, the others to the second."""
        return partial(_enter_by_rank, (self.first, self.second), ranks_per_host)

    def cut_link(self) -> None:
        """Takes the second host's device down, as a pulled plug does."""
        self.second.ip(f"link set {DEVICE} down")


class Relay:
    """A process that carries the frames of a link made of two TAP devices: see `relay.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def be_slow(self, *, delay_s: tuple[float, float], loss: float, seed: int) -> None:
        self._tell({"delay_s": delay_s, "loss": loss, "seed": seed})

    def cut(self, *directions: Direction) -> None:
        """Lets nothing pass any more in these directions; without any it passes everything again."""
        self._tell({"cut": directions})

    @property
    def counts(self) -> tuple[int, int]:
        """Frames (carried, lost) until now."""
        answer = self._tell({"count": True})
        return answer["carried"], answer["lost"]

    def _tell(self, command: dict[str, Any]) -> dict[str, int]:
        pipe_in, pipe_out = _pipes(self._process)
        pipe_in.write(json.dumps(command) + "\n")
        pipe_in.flush()
        answer: dict[str, int] = json.loads(pipe_out.readline())
        return answer


def why_not() -> str | None:
    """What two hosts lack here; None if they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)"
    probe = _unshared(["true"], 0)
    made = subprocess.run(probe, capture_output=True, text=True, timeout=START_WITHIN_S, check=False)
    return None if made.returncode == 0 else f"no namespaces here: {made.stderr.strip()}"


def need_hosts() -> None:
    """Skips the test where there can be no hosts; but CI must be able to make them."""
    reason = why_not()
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(f"two hosts cannot be made: {reason}")
    if reason is not None:
        pytest.skip(f"two hosts cannot be made: {reason}")


@contextlib.contextmanager
def two_hosts(link: Literal["veth", "relay"] = "veth") -> Iterator[Hosts]:
    """Makes both, and ends everything in them afterwards."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_one_host(*member)) for member in MEMBERS)
        relay = None
        if link == "relay":
            relay = stack.enter_context(_relay_between(first, second))
        else:
            ends = [f"{DEVICE} netns {host.pid}" for host in (first, second)]
            _run(["ip", "-batch", "-"], f"link add {ends[0]} type veth peer name {ends[1]}")
        for host in (first, second):
            host.ip("link set lo up", f"addr add {host.address}/24 dev {DEVICE}", f"link set {DEVICE} up")
        yield Hosts(first, second, relay, free_port())


@contextlib.contextmanager
def _one_host(name: str, address: str, clock_s: int) -> Iterator[Host]:
    known = "127.0.0.1 localhost\n" + "".join(f"{other} {its_name}\n" for its_name, other, _ in MEMBERS)
    boot_id = f"00000000-0000-4000-8000-{int.from_bytes(name.encode()[-6:], 'big'):012x}"
    program = [sys.executable, "-I", str(Path(__file__).with_name("holder.py")), name, boot_id, known]
    with _helper(_unshared(program, clock_s)) as (process, said):
        yield Host(name, address, int(said), process.pid)


@contextlib.contextmanager
def _relay_between(first: Host, second: Host) -> Iterator[Relay]:
    program = [sys.executable, "-I", str(Path(__file__).with_name("relay.py")), str(first.pid), str(second.pid), DEVICE]
    with _helper(program) as (process, _):
        yield Relay(process)


@contextlib.contextmanager
def _helper(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that lives until its standard input ends, and its first line."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pipe_in, pipe_out = _pipes(process)
    try:
        said = pipe_out.readline()
        assert said, f"{command} ended with {process.wait(START_WITHIN_S)}"
        yield process, said.strip()
    finally:
        pipe_in.close()
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            pipe_out.close()


def _unshared(program: Sequence[str], clock_s: int) -> list[str]:
    command = ["unshare", "--net", "--uts", "--mount", "--time", f"--monotonic={clock_s}", "--fork"]
    return [*command, "--", *program]


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _run(command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=START_WITHIN_S, check=False)
    assert done.returncode == 0, f"{text}: {done.stderr}"


# -- in a process that goes there -------------------------------------------------------------------------------------


def enter_host(host: Host) -> None:
    """Takes this process, which has one thread, and all that it starts into a host. There is no way back."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    for space in SPACES:
        descriptor = os.open(f"/proc/{host.pid}/ns/{space}", os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(descriptor, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{host.name}: {space} namespace: {os.strerror(number)}")
        os.close(descriptor)
    os.chdir(folder)  # entering the mount namespace led to its root
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def _enter_by_rank(hosts: tuple[Host, Host], ranks_per_host: int, rank: int) -> None:
    enter_host(hosts[rank // ranks_per_host])
