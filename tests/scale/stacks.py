"""Where an agent stands: the stacks of its asyncio tasks and threads, written to its log on a signal.

Put into each agent by nursery.py; asked for by faults.py and fleet.py before they complain that one does not end. Must
never change what the agent does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import signal
import sys
from typing import Final

__all__ = ["DONE", "SIGNAL", "install"]

SIGNAL: Final = signal.SIGUSR2
#: The last line of what is written.
DONE: Final = "end of the stacks"


def install() -> None:
    """Have SIGUSR2 write the stacks to standard error."""
    signal.signal(SIGNAL, _write)


def _write(*_: object) -> None:
    out = io.StringIO()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        out.write("no loop runs in the main thread\n")
    else:
        for task in asyncio.all_tasks(loop):
            out.write(f"task {task.get_name()} cancelling={task.cancelling()} {task!r}\n")
            task.print_stack(file=out)
            for line in _chain(task):
                out.write(f"    {line}\n")
    os.write(2, out.getvalue().encode("utf-8", "replace"))
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os.write(2, f"{DONE}\n".encode())


def _chain(task: asyncio.Task[object]) -> list[str]:
    """Return what a task awaits, from its own coroutine down to the future: print_stack shows the first frame only."""
    found: list[str] = []
    at: object = task.get_coro()
    while at is not None and len(found) < 40:
        frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None) or getattr(at, "ag_frame", None)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame is not None else repr(at)
        found.append(f"awaits {where}")
        at = next(
            (value for name in ("cr_await", "gi_yieldfrom", "ag_await") if (value := getattr(at, name, None))), None
        )
    return found
