"""A level B job whose granted folder has a mount of the host in it. Root runs ``python -m tests.security.fs_below``.

Arguments: NODE FOLDER. Prints how the attempt was refused, or that it ran.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from node_agent.containment import linux
from node_agent.containment.errors import SetupError
from node_agent.containment.plan import Mount
from tests.containment import rig as rigs
from tests.containment.rig import Rig, granted, in_rig
from tests.security.fs_shared import PRIVATE, RECURSIVE, USER


def main() -> None:
    """Mount, become an ordinary user, run."""
    node, folder = sys.argv[1], Path(sys.argv[2])
    linux.unshare(linux.NEWNS)
    linux.mount(None, "/", None, PRIVATE | RECURSIVE)
    linux.mount("below", str(folder / "sub"), "tmpfs", 0, "mode=0777,size=64k")
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    rigs.LEVEL = "B"  # this process became an ordinary user only now

    async def scenario(rig: Rig) -> None:
        with granted(folder, "read") as fd:
            try:
                seen = await rig.run(["ls", str(folder)], mounts=[(Mount(str(folder), "read", "dir"), fd)])
                print("ran", seen)  # noqa: T201 - the test reads it
            except SetupError as error:
                print(error)  # noqa: T201 - the test reads it

    in_rig(node, scenario)


if __name__ == "__main__":
    main()
