"""Something that happens at every point of a piece of code in turn: another thread's work, or an interrupt."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from loader_service.reading import chunked, threads

OURS = frozenset({chunked.__file__, threads.__file__})
LIBRARY = frozenset({threading.__file__, concurrent.futures._base.__file__})
# After these the interpreter looks whether a signal has come.
_LOOKS = frozenset({"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"})


def at_line(number: int, run: Callable[[], None], act: Callable[[], None], *, free: Callable[[], bool]) -> bool:
    """Runs `run`, and calls `act` before the line that comes as number `number` of those of a reading while `free`.

    False if it came to no such line.
    """
    lines = -1

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != chunked.__file__:
            return None
        if event == "line" and free():
            lines += 1
            if lines == number:
                act()
        return trace

    _traced(run, trace)
    return lines >= number


def interrupted_at(number: int, run: Callable[[], None]) -> bool:
    """Runs `run`, and raises KeyboardInterrupt where the interpreter would for the time number `number`, in the code of
    a reading, of its threads, or of what these call of the library. False if it came to no such place, and ended.

    Left out is the start of a thread: that of the library itself is not safe.
    """
    looks = -1
    at: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal looks
        if event == "call" and frame.f_back is not None:
            at.pop(frame.f_back, None)  # nobody looks when a function of Python's returns
        if not _is_watched(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if frame in at and _names_of(frame.f_code)[at[frame]] in _LOOKS:
                looks += 1
                if looks == number:
                    raise KeyboardInterrupt
            at[frame] = frame.f_lasti
        return trace

    try:
        _traced(run, trace)
    except KeyboardInterrupt:
        return True
    finally:
        at.clear()
    return False


def _is_watched(frame: FrameType) -> bool:
    if frame.f_code.co_filename not in OURS | LIBRARY:
        return False
    above: FrameType | None = frame
    while above is not None:
        if above.f_code is threading.Thread.start.__code__:
            return False
        above = above.f_back
    return True


def _names_of(code: Any) -> dict[int, str]:
    if code not in _names:
        _names[code] = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    return _names[code]


_names: dict[Any, dict[int, str]] = {}


def _traced(run: Callable[[], None], trace: Callable[..., Any]) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
