"""A row source in a forked child, and in a process that ends right after a read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loader_service.errors import StateError
from loader_service.reading.file_range import FileRange
from loader_service.sources import LoadRowReader
from tests.rows.making import Workshop, make_table

# Forks while another thread holds every lock that a read takes, and a third is opening the file; prints what each child
# ended with. The children of the second kind end as processes do, right after they have read.
_SCRIPT = """
import os, sys, threading, warnings
import torch
from loader_service import RowSource
from loader_service.reading.local import LocalStorage

warnings.simplefilter("ignore")  # of forks with threads
path = sys.argv[1]
content = open(path, "rb").read()[123:863]

def child(work):
    pid = os.fork()
    if pid == 0:
        return work()
    ended = os.waitpid(pid, 0)[1]
    print(os.waitstatus_to_exitcode(ended))

def read(source):
    dst = torch.zeros(37, 20, dtype=torch.uint8)
    source.read_rows_into(dst, 0)
    return bytes(dst.numpy()) == content

def read_and_leave(source):
    os._exit(0 if read(source) else 3)

def source_of():
    return RowSource(path, 123, (37, 20), torch.uint8, threads=2, chunk_bytes=100)

used, unused = source_of(), source_of()
assert read(used)
child(lambda: read_and_leave(used))
child(lambda: read_and_leave(unused))

reader = used._reader
locks = (reader._threads._lock, reader.ranges._lock, reader.ranges.handles._changed)
held, go = threading.Event(), threading.Event()
def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    go.wait()
    for lock in locks:
        lock.release()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child(lambda: read_and_leave(used))
go.set()
holder.join()

opening, go_on = threading.Event(), threading.Event()
opened = LocalStorage.open
def open_later(self, path, *, direct=False):
    opening.set()
    go_on.wait()
    return opened(self, path, direct=direct)
LocalStorage.open = open_later
reading = threading.Thread(target=read, args=(unused,))
reading.start()
opening.wait()
LocalStorage.open = opened
child(lambda: read_and_leave(unused))
go_on.set()
reading.join()

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        dst = torch.zeros(37, 20, dtype=torch.uint8)
        threading.Thread(target=used.read_rows_into, args=(dst, 0), daemon=True).start()
        sys.exit(0 if read(used) else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert read(used)
"""


def test_a_source_reads_in_forked_children_whatever_its_threads_were_at(tmp_path: Path) -> None:
    table = make_table(tmp_path, (37, 20))
    command = [sys.executable, "-c", _SCRIPT, table.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["0"] * 7), done.stderr


def test_a_source_of_a_service_that_was_opened_before_a_fork_says_so(tmp_path: Path) -> None:
    table = make_table(tmp_path, (37, 20))
    one = Workshop.make()
    reader = LoadRowReader(one.reader.ranges, one.pool, chunk_bytes=100, stuck_after_s=300.0)
    reader._process += 1
    with pytest.raises(StateError, match="its service was opened before a fork: open one in each process") as caught:
        reader.begin(FileRange(table.path, None, 123, "table"), memoryview(bytearray(740)))
    assert (caught.value.path, caught.value.tensor) == (table.path, "table")
    one.end()
