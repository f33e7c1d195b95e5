"""A stand-in for the node agent at one level, in a process of its own, so that a test can kill and stop it.

Run as ``python -m tests.ladder.agent LEVEL NODE MARK DEADLINE_MS [FOLDER]``: starts a detached tree that carries MARK,
prints ``up``, then does nothing. The lifeline carries a deadline so far away.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import cast

from node_agent.containment.plan import Level
from node_agent.containment.slots import boottime_ns
from tests.containment.agent import TREE
from tests.containment.rig import Rig, python
from tests.ladder.rig import climb
from tests.support.wait import await_until


def main() -> None:
    """Start, report, wait."""
    level, node, mark = sys.argv[1:4]
    deadline_ms = int(sys.argv[4])

    async def scenario(rig: Rig) -> None:
        attempt = await rig.start(python(TREE), env={"MARK": mark})
        seen = b""

        def look() -> bool:
            nonlocal seen
            with suppress(BlockingIOError):
                seen += os.read(attempt.stdout, 100)
            return b"up" in seen

        await await_until(look, "the tree to stand")
        rig.slot.renew(boottime_ns() + deadline_ms * 1_000_000)
        print("up", flush=True)  # noqa: T201 - the test reads it
        await asyncio.Event().wait()

    folder = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    climb(cast("Level", level), node, scenario, folder=folder)


if __name__ == "__main__":
    main()
