"""A stand-in for the node agent in a process of its own, so that a test can kill and stop it.

Run as ``python -m tests.containment.agent NODE MARK [DEADLINE_MS]``: starts one slot with a detached tree that carries
MARK, prints ``mould PID``, then does nothing. With DEADLINE_MS the lifeline carries a deadline so far away.
"""

from __future__ import annotations

import asyncio
import os
import sys

from node_agent.containment.slots import boottime_ns
from tests.containment.rig import Rig, in_rig, python
from tests.support.wait import await_until

TREE = """
import os, signal, time
signal.alarm(40)
for number in range(4):
    if os.fork() == 0:
        signal.alarm(40)
        os.setsid()
        if os.fork() == 0: time.sleep(40)
        os._exit(0)
print("up", flush=True)
time.sleep(40)
"""


def main() -> None:
    """Start, report, wait."""
    node, mark = sys.argv[1:3]
    deadline_ms = int(sys.argv[3]) if len(sys.argv) > 3 else 0

    async def scenario(rig: Rig) -> None:
        attempt = await rig.start(python(TREE), env={"MARK": mark})
        seen = b""

        def look() -> bool:
            nonlocal seen
            try:
                seen += os.read(attempt.stdout, 100)
            except BlockingIOError:
                return False
            return b"up" in seen

        await await_until(look, "the tree to stand")
        if deadline_ms:
            rig.slot.renew(boottime_ns() + deadline_ms * 1_000_000)
        print("mould", rig.slot.mould_pid, rig.zygote.pid, flush=True)  # noqa: T201 - the test reads it
        await asyncio.Event().wait()

    in_rig(node, scenario)


if __name__ == "__main__":
    main()
