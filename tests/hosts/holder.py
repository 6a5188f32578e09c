"""A host, as a program: keeps its namespaces, and ends everything that runs in them when its standard input ends.

Started by `unshare` in namespaces of its own, and without any import of the project, which would cost seconds:

    holder.py NAME BOOT_ID HOSTS      # prints its process id once the host is ready

Standard input ends when the test is done, and also when the test's process is killed: nothing outlives it, and nothing
of a host has a name outside of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

MS_BIND = 4096
END_WITHIN_S = 10.0


def mount(source: str, target: str, kind: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def put_over(target: str, text: str) -> None:
    """Lets the host see a file with `text` at `target`, if there is one. No file is left anywhere."""
    if not os.path.exists(target):
        return
    draft = Path("/dev/shm/draft")
    draft.write_text(text)
    mount(str(draft), os.path.realpath(target), "", MS_BIND)
    draft.unlink()


def processes_in(network: str) -> set[int]:
    """The processes in a network namespace, which `/proc/PID/ns/net` names."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/net") == network:
                found.add(int(name))
        except OSError:  # it has just ended
            continue
    return found


def end_others() -> None:
    """Ends all in this host, but for this process and `unshare`, which waits for it."""
    network = os.readlink("/proc/self/ns/net")
    until_s = time.monotonic() + END_WITHIN_S
    while (pids := processes_in(network) - {os.getpid(), os.getppid()}) and time.monotonic() < until_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def main() -> None:
    name, boot_id, hosts = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, meant for the tests, which then end standard input
    socket.sethostname(name)
    mount("tmpfs", "/dev/shm", "tmpfs", 0)
    put_over("/proc/sys/kernel/random/boot_id", f"{boot_id}\n")
    put_over("/etc/hosts", hosts)
    put_over("/etc/resolv.conf", "# no name server: what /etc/hosts does not know fails at once\n")
    print(os.getpid(), flush=True)
    sys.stdin.read()
    end_others()


if __name__ == "__main__":
    main()
