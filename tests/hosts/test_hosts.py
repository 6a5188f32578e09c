"""That two hosts are what they say: different names, boot ids, clocks and networks, and nothing of them stays."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loader_service.agreement.node import BOOT_ID_PATH
from tests.cli.support import ROOT, WATCHDOG_S, wait_until
from tests.hosts.host import need_hosts, two_hosts
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    need_hosts()


def look(rank: Rank) -> tuple[str, str, float, list[str], str]:
    with open(BOOT_ID_PATH) as file:
        boot_id = file.read()
    return (
        socket.gethostname(),
        boot_id,
        time.monotonic(),
        [name for _, name in socket.if_nameindex()],
        socket.gethostbyname("host-b"),
    )


def test_hosts_differ_in_name_boot_id_clock_and_network() -> None:
    with open(BOOT_ID_PATH) as file:
        outside = file.read()
    with two_hosts() as hosts:
        seen = [outcome.get() for outcome in run_ranks(look, 4, enter=hosts.enter())]
    assert [name for name, *_ in seen] == ["host-a"] * 2 + ["host-b"] * 2
    assert len({outside, *(boot_id for _, boot_id, *_ in seen)}) == 3
    clocks = [clock for _, _, clock, *_ in seen]
    assert clocks[3] - clocks[0] > 1_000_000
    assert all(devices == ["lo", "eth0"] for *_, devices, _ in seen)
    assert {address for *_, address in seen} == {"10.77.0.2"}
    assert socket.gethostname() != "host-a"


def test_what_runs_in_a_host_ends_with_it() -> None:
    with two_hosts() as hosts:
        sleeper = subprocess.Popen(["nsenter", "--net", "-t", str(hosts.second.pid), "sleep", "1000"])
        wait_until(lambda: sleeper.pid in hosts.second.pids())
    assert sleeper.wait(WATCHDOG_S) == -signal.SIGKILL
    assert not any(Path(f"/proc/{host.pid}").exists() for host in (hosts.first, hosts.second))


MAKES_HOSTS = """
import sys
from tests.hosts.host import two_hosts
with two_hosts() as hosts:
    print(hosts.first.pid, hosts.second.pid, flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them_also_if_it_is_killed() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKES_HOSTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert maker.stdout is not None
    pids = [int(text) for text in maker.stdout.readline().split()]
    assert len(pids) == 2
    maker.kill()
    maker.communicate(timeout=WATCHDOG_S)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_where_hosts_cannot_be_made_tests_skip_but_in_ci_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not installed: ip, unshare, nsenter"):
        need_hosts()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not installed"):
        need_hosts()
