"""A slow and lossy link between two hosts, as a program: a TAP device in each, and the frames carried between them.

    relay.py PID_A PID_B DEVICE       # of a process in each host; prints "ready" once both devices are there

Reads commands, one JSON object a line, and answers each with one line:

    {"delay_s": [0.02, 0.05], "loss": 0.03, "seed": 1}    how long each frame takes, and how many get lost
    {"cut": ["a>b"]}                                      directions in which nothing goes any more; [] mends them
    {"count": true}                                       answers {"carried": n, "lost": n}

Frames keep their order within a direction. It ends, and the devices with it, when its standard input ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import stat
import struct
import sys
import tempfile
import time
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65536
DIRECTIONS = ("a>b", "b>a")


def tap_in(pid: int, device: str) -> int:
    """A TAP device in the network of a process. It stays there wherever this process goes afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to the network of {pid}")
    os.close(network)
    tap = open_tun()
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def open_tun() -> int:
    """The device that makes devices, also where a container's /dev does not show it."""
    if os.path.exists("/dev/net/tun"):
        return os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    with tempfile.TemporaryDirectory() as folder:
        node = os.path.join(folder, "tun")
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(10, 200))
        return os.open(node, os.O_RDWR | os.O_NONBLOCK)


class Relay:
    """Takes frames from one device and puts them into the other when they are due."""

    def __init__(self, a: int, b: int) -> None:
        self._source = {"a>b": a, "b>a": b}
        self._target = {"a>b": b, "b>a": a}
        self._delay_s = (0.0, 0.0)
        self._loss = 0.0
        self._random = random.Random(0)
        self._cut: frozenset[str] = frozenset()
        self._last_due_s = dict.fromkeys(DIRECTIONS, 0.0)
        self._on_the_way: list[tuple[float, int, str, bytes]] = []
        self._carried = 0
        self._lost = 0
        self._number = 0

    def run(self) -> None:
        poller = select.poll()
        for descriptor in (0, *self._source.values()):
            poller.register(descriptor, select.POLLIN)
        while True:
            due_s = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else None
            ready = poller.poll(None if due_s is None else max(0.0, due_s * 1000))
            if any(descriptor == 0 for descriptor, _ in ready):
                line = sys.stdin.readline()
                if not line:
                    return
                self._obey(json.loads(line))
            for direction, source in self._source.items():
                if any(descriptor == source for descriptor, _ in ready):
                    self._take(direction, source)
            self._deliver()

    def _obey(self, command: dict[str, Any]) -> None:
        if "loss" in command:
            low, high = command["delay_s"]
            self._delay_s, self._loss = (low, high), command["loss"]
            self._random.seed(command["seed"])
        if "cut" in command:
            self._cut = frozenset(command["cut"])
        print(json.dumps({"carried": self._carried, "lost": self._lost}), flush=True)

    def _take(self, direction: str, source: int) -> None:
        try:
            frame = os.read(source, FRAME_BYTES)
        except OSError:  # taken down, or nothing there after all
            return
        if direction in self._cut or self._random.random() < self._loss:
            self._lost += 1
            return
        due_s = max(self._last_due_s[direction], time.monotonic() + self._random.uniform(*self._delay_s))
        self._last_due_s[direction] = due_s
        self._number += 1
        heapq.heappush(self._on_the_way, (due_s, self._number, direction, frame))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, _, direction, frame = heapq.heappop(self._on_the_way)
            if direction in self._cut:
                self._lost += 1
                continue
            try:
                os.write(self._target[direction], frame)
                self._carried += 1
            except OSError:  # the device is down, or its queue is full: a frame is lost, as on any link
                self._lost += 1


def main() -> None:
    a, b = (tap_in(int(pid), sys.argv[3]) for pid in sys.argv[1:3])
    print("ready", flush=True)
    Relay(a, b).run()


if __name__ == "__main__":
    main()
