"""Stand-ins for the node agent, one after the other, for tests that kill them in the middle of a start.

Run as ``python -m tests.security.nursery NODE MARK``. For each line on its input it forks a stand-in that starts a
slot, prints ``PID``, then asks for a mould and a worker. It adopts whatever a killed stand-in leaves, so that nothing
can hide: all that lives below this process is a leftover.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from node_agent.containment import linux
from tests.containment.rig import Rig, in_rig
from tests.security.jobs import program

TREE = 10


def main() -> None:
    """Fork on request; end with the input."""
    node, mark = sys.argv[1:3]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.set_subreaper()
    for number, _ in enumerate(sys.stdin):
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(40)
            in_rig(f"{node}-{number % 2}", lambda rig: spawn(rig, mark))
            os._exit(0)


async def spawn(rig: Rig, mark: str) -> None:
    """Say who is to be killed, and start a hostile tree."""
    os.write(1, f"{os.getpid()}\n".encode())
    await rig.start(program("trees", "forest", TREE), env={"MARK": mark})
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
