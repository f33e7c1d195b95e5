"""A job that may execute nothing of its own: every way to run a file that it wrote is tried, and each is closed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from node_agent.containment import slots
from node_agent.containment.errors import SetupError
from node_agent.containment.plan import Mount
from tests.containment.rig import TASKS, Rig, granted, in_rig, python

#: Prints, by way, "RAN" or the error of each attempt to execute a copy of /bin/true, or to map it as code.
WAYS = r"""
import ctypes, errno, json, mmap, os, shutil, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def attempt(way, act):
    try: found[way] = "RAN" if act() in (0, None) else "FAILED"
    except OSError as error: found[way] = errno.errorcode[error.errno]
def run(*words): return subprocess.run(words, stderr=subprocess.DEVNULL).returncode
loader = next(path for path in ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1") if os.path.exists(path))
for folder in ("/work", "/tmp", "/dev/shm", *sys.argv[1:]):
    copy = folder + "/copy"
    if not os.path.exists(copy):
        shutil.copy("/bin/true", copy)
        with open(folder + "/script", "w") as file: file.write("#!/bin/sh\nexit 0\n")
        os.chmod(folder + "/script", 0o755)
        attempt(folder + " script", lambda: run(folder + "/script"))
    attempt(folder + " execve", lambda: run(copy))
    attempt(folder + " loader", lambda: run(loader, copy))
    fd = os.open(copy, os.O_RDONLY)
    attempt(folder + " descriptor", lambda: run("sh", "-c", f"exec /proc/{os.getpid()}/fd/{fd}"))
    attempt(folder + " map", lambda: mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close())
def memory():
    fd = os.memfd_create("x", 0)
    with open("/bin/true", "rb") as file: os.write(fd, file.read())
    return run("sh", "-c", f"exec /proc/{os.getpid()}/fd/{fd}")
attempt("memory", memory)
attempt("the node's own", lambda: run("/bin/true"))
attempt("an interpreter", lambda: run(sys.executable, "-c", ""))
print(json.dumps(found))
"""
#: Always there, or nothing would run at all.
OWN = {"the node's own", "an interpreter"}


@pytest.mark.parametrize("allow_exec", [False, True])
def test_a_job_without_exec_executes_nothing_that_it_wrote(node_name: str, home: Path, *, allow_exec: bool) -> None:
    """Workspace, temporary folders, grants and memory: nothing is executed, by no way; with exec, all of it is."""
    place, tools = home / "place", home / "tools"
    for folder in (place, tools):
        folder.mkdir()
        folder.chmod(0o777)
    shutil.copy("/bin/true", tools / "copy")

    async def scenario(rig: Rig) -> None:
        with granted(place, "write") as first, granted(tools, "read") as second:
            mounts = [(Mount(str(place), "write", "dir"), first), (Mount(str(tools), "read", "dir"), second)]
            argv = [*python(WAYS), str(place), str(tools)]
            seen = await rig.run(argv, mounts=mounts, allow_unix=False, allow_exec=allow_exec)
        assert seen.verdict.code == 0, seen
        found = json.loads(seen.out)
        assert {way for way in found if found[way] == "RAN"} >= OWN, found
        ran = {way for way in found if found[way] == "RAN"} - OWN
        assert len(found) == 5 * 4 + 4 + 1 + len(OWN)
        assert ran == (set(found) - OWN if allow_exec else set()), found

    in_rig(node_name, scenario)


def test_a_task_without_exec_can_not_execute_its_result(node_name: str) -> None:
    """The file in memory that takes a task's result is sealed against execution; the result itself arrives."""

    async def scenario(rig: Rig) -> None:
        for allow_exec, wanted in ((True, "ran"), (False, "EACCES")):
            seen = await rig.run(task="exec_tasks:run_result", allow_exec=allow_exec)
            assert isinstance(seen.result, dict), seen
            assert seen.result["ok"] == wanted

    assert Path(TASKS, "exec_tasks.py").exists()
    in_rig(node_name, scenario)


def test_a_job_without_exec_runs_no_hook_of_a_write_grant(node_name: str, home: Path) -> None:
    """What is kept read-only below a write grant is a mount of its own: it is noexec as its grant is."""
    hooks = home / "project" / ".git" / "hooks"
    hooks.mkdir(parents=True)
    (home / "project").chmod(0o777)
    shutil.copy("/bin/true", hooks / "post-commit")
    grant = Mount(str(home / "project"), "write", "dir", protected=(".git/hooks",))

    async def scenario(rig: Rig) -> None:
        for allow_exec, code in ((True, 0), (False, 126)):
            with granted(home / "project", "write") as fd:
                argv = ["sh", "-c", '"$1"', "sh", str(hooks / "post-commit")]
                seen = await rig.run(argv, mounts=[(grant, fd)], allow_unix=False, allow_exec=allow_exec)
            assert seen.verdict.code == code, seen

    in_rig(node_name, scenario)


def test_a_kernel_that_can_not_seal_refuses_such_tasks(node_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sealed files in memory (simulated) a task is refused, says why, and the slot goes on; commands run."""
    monkeypatch.setattr(slots, "noexec_memory", lambda: False)

    async def scenario(rig: Rig) -> None:
        with pytest.raises(SetupError, match=r"needs Linux 6\.3"):
            await rig.run(task="exec_tasks:run_result", allow_exec=False)
        assert (await rig.run(["true"], allow_exec=False)).verdict.code == 0
        assert (await rig.run(task="exec_tasks:run_result")).verdict.code == 0

    in_rig(node_name, scenario)


def test_a_job_without_exec_and_without_grants(node_name: str) -> None:
    """A plan without grants gets the same: nothing below its own folders runs."""

    async def scenario(rig: Rig) -> None:
        for allow_exec, code in ((True, 0), (False, 126), (True, 0)):
            copy = "cp /bin/true /work/x && /work/x"
            seen = await rig.run(["sh", "-c", copy], allow_exec=allow_exec)
            assert seen.verdict.code == code, seen
            assert (b"denied" in seen.err) != allow_exec

    in_rig(node_name, scenario)
