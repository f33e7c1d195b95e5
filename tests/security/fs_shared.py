"""A job on a host whose mounts are shared, as systemd makes them. Root runs ``python -m tests.security.fs_shared``.

Arguments: LEVEL NODE TOP. In a mount namespace of its own, shared throughout, it starts a job that may read TOP/grant
and to which TOP/tree is shown as one of the node's own paths; then the host mounts a file system below each. Prints
what the job saw of them.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from node_agent.containment import linux
from node_agent.containment.paths import Protected, clone_mount, open_grant
from node_agent.containment.plan import Mount
from tests.containment import rig as rigs
from tests.containment.rig import Rig, in_rig, python

PRIVATE, SHARED, RECURSIVE = 1 << 18, 1 << 20, 0x4000
USER = 65_533
PLACES = ("grant/sub", "tree/sub")
#: Says when it is up, waits for the word in its own folder, then looks.
JOB = r"""
import os, signal, sys, time
signal.alarm(20)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
for place in sys.argv[1:]:
    print("SEEN" if os.listdir(place) else "empty", place)
    try: open(place + "/made", "w").close(); print("WRITTEN", place)
    except OSError: pass
"""


def mounts_later(top: Path) -> tuple[int, int, int]:
    """Start a child that mounts when told to; return its pid, the pipe to tell it, and the one on which it answers."""
    told, tell = os.pipe()
    answered, answer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.close(answer)
        return pid, tell, answered
    os.close(tell)
    os.read(told, 1)
    for place in PLACES:
        linux.mount("later", str(top / place), "tmpfs", 0, "mode=0777,size=64k")
        (top / place / "file").touch()
    os.write(answer, b"x")
    os.read(told, 1)
    os._exit(0)


def main() -> None:
    """Prepare the host, run the job, mount, let it look."""
    level, node, top = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    linux.unshare(linux.NEWNS)
    linux.mount(None, "/", None, PRIVATE | RECURSIVE)
    linux.mount(None, "/", None, SHARED | RECURSIVE)
    pid, tell, answered = mounts_later(top)
    if level == "B":
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        rigs.LEVEL = "B"  # this process became an ordinary user only now

    async def scenario(rig: Rig) -> None:
        with ExitStack() as stack:
            opened = open_grant(str(top / "grant"), "read", protected=Protected.collect())
            stack.callback(opened.close)
            fd = opened.fd
            if level == "A":
                fd = clone_mount(opened, "read", None)
                stack.callback(os.close, fd)
            shown = (*rig.plan().python_paths, str(top / "tree"))
            words = [*python(JOB), *(str(top / place) for place in PLACES)]
            grant = Mount(str(top / "grant"), "read", "dir")
            attempt, _ = await rig.running(words, mounts=[(grant, fd)], python_paths=shown)
        os.write(tell, b"x")
        os.read(answered, 1)
        assert os.path.exists(top / "grant" / "sub" / "file"), "the host itself sees its mount"
        attempt.terminate()
        seen = await rig.finish(attempt)
        print(seen.out.decode(), seen.err.decode()[-300:])  # noqa: T201 - the test reads it

    in_rig(node, scenario)
    os.close(tell)
    if level == "A":
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
