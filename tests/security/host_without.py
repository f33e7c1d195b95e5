"""Jobs on a kernel that refuses one call. Run as ``python -m tests.security.host_without NODE CASE...``.

A case is ``NAME:ERROR:CALL,CALL``: for it a child of this process puts a filter in front of all that follows, zygote,
mould and worker included, and runs one job. Each case prints one line, ``NAME WHOLE`` for a job that ran with all that
confines it, ``NAME LACKS ...`` for one that ran without, or ``NAME REFUSED WHY``. An error of 0 is a kernel that does
nothing and says that it did.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from node_agent.containment import linux, seccomp
from node_agent.containment.errors import ContainmentError
from node_agent.containment.seccomp import Filter
from node_agent.containment.sysnumbers import NUMBERS
from tests.containment.rig import Rig, in_rig, python

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ANSWER = 0x7FFF_0000, 0x0005_0000
#: Looks at itself. ``filters``: how many were in force before the job's own.
JOB = """
import os, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
lacks = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[name], 16)]
lacks += ["no_new_privs"] * (status["NoNewPrivs"].strip() != "1")
lacks += ["seccomp"] * (int(status["Seccomp_filters"]) <= int(sys.argv[1]))
lacks += ["uid"] * (set(status["Uid"].split() + status["Gid"].split()) != {sys.argv[2]})
lacks += ["groups"] * (os.getuid() > 1_900_000_000 and bool(os.getgroups()))
lacks += ["view"] * any(map(os.path.exists, ("/sys", "/boot", "/var/log", "/etc/shadow")))
lacks += ["proc"] * (len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 3)
lacks += ["net"] * (len(open("/proc/net/dev").read().splitlines()) != 3)
lacks += ["session"] * (os.getsid(0) != os.getpid())
lacks += ["ipc"] * bool(open("/proc/sysvipc/shm").read().count("\\n") > 1)
print("LACKS " + " ".join(lacks) if lacks else "WHOLE", flush=True)
"""


def refuse(error: int, calls: list[str]) -> None:
    """Put the filter on."""
    steps = [(LOAD, 0, 0, 0)]
    for name in calls:
        number = NUMBERS[os.uname().machine][name]
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ANSWER | error)]
    steps.append((RETURN, 0, 0, ALLOW))
    linux.no_new_privs()
    seccomp.install(Filter(b"".join(struct.pack("HBBI", *step) for step in steps), len(steps)))


def filters() -> str:
    """Return how many filters are in force."""
    status = Path("/proc/self/status").read_text()
    return status.partition("Seccomp_filters:")[2].split()[0]


def case(node: str, text: str) -> None:
    """Run one job on such a kernel."""
    name, error, calls = text.split(":")

    async def scenario(rig: Rig) -> str:
        try:
            plan = rig.plan()
            seen = await rig.run([*python(JOB), filters(), str(plan.uid)], uid=plan.uid, gid=plan.gid)
        except ContainmentError as refused:
            return f"REFUSED {type(refused).__name__}: {refused}"
        out = seen.out.decode().strip()
        return out or f"REFUSED {seen.verdict} {seen.err!r}"

    refuse(int(error), calls.split(",") if calls else [])
    try:
        told = in_rig(node, scenario)
    except (ContainmentError, OSError) as refused:
        told = f"REFUSED {type(refused).__name__}: {refused}"
    print(name, " ".join(told.split()), flush=True)  # noqa: T201 - the test reads it


def main() -> None:
    """Run each case in a child of its own; a filter can't be taken off again."""
    for number, text in enumerate(sys.argv[2:]):
        pid = os.fork()
        if pid == 0:
            case(f"{sys.argv[1]}-{number}", text)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
