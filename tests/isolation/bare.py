"""One job on a kernel that seems to have no Landlock. Run as ``python -m tests.isolation.bare NODE CODE``.

Prints the Landlock ABI that is left, then what the job printed.
"""

from __future__ import annotations

import struct
import sys

from node_agent.containment import landlock, linux, seccomp
from node_agent.containment.seccomp import Filter
from tests.containment.rig import Rig, in_rig, python

#: landlock_create_ruleset, landlock_add_rule and landlock_restrict_self, on every machine.
FIRST, LAST = 444, 446
LOAD, AT_LEAST, ABOVE, RETURN = 0x20, 0x35, 0x25, 0x06
ALLOW, ENOSYS = 0x7FFF_0000, 0x0005_0000 | 38


def main() -> None:
    """Mask Landlock, run the job."""
    # Below FIRST and above LAST to the end, which allows.
    steps = [(LOAD, 0, 0, 0), (AT_LEAST, 0, 2, FIRST), (ABOVE, 1, 0, LAST)]
    steps += [(RETURN, 0, 0, ENOSYS), (RETURN, 0, 0, ALLOW)]
    linux.no_new_privs()
    seccomp.install(Filter(b"".join(struct.pack("HBBI", *step) for step in steps), len(steps)))
    print(landlock.abi())  # noqa: T201 - the test reads it

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(sys.argv[2]))
        assert seen.verdict.code == 0, seen
        print(seen.out.decode())  # noqa: T201 - the test reads it

    in_rig(sys.argv[1], scenario)


if __name__ == "__main__":
    main()
