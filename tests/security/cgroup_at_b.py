"""One level B job that finds a delegated subtree. A user runs ``python -m tests.security.cgroup_at_b NODE PATH MODE``.

Prints what each attack of ESCAPE was answered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from node_agent.containment.plan import Mount
from tests.containment.rig import Rig, granted, in_rig
from tests.security.fs_tries import tried
from tests.security.test_cgroup_escape import ESCAPE


def main() -> None:
    """Grant the path past the node's own refusal, run, tell."""
    node, path, mode = sys.argv[1:4]
    kind: Literal["read", "write"] = "write" if mode == "write" else "read"

    async def scenario(rig: Rig) -> None:
        with granted(Path(path), kind) as fd:
            found = await tried(rig, ESCAPE, path, mounts=[(Mount(path, kind, "dir"), fd)])
        for name, answer in found.items():
            print(name, answer)  # noqa: T201 - the test reads it

    in_rig(node, scenario)


if __name__ == "__main__":
    main()
