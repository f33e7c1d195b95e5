"""No worker finds in its memory what belongs to another job or to the agent."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containment.rig import Rig, in_rig, python


def halves(word: str) -> list[str]:
    """Cut a word in two, so that the search for it is no hit of itself."""
    return [word[:8], word[8:]]


def word() -> str:
    """A new word that occurs nowhere else."""
    return secrets.token_hex(12)


def test_attack_05_no_payload_of_an_earlier_job(node_name: str) -> None:
    """Arguments, environment values and argv of earlier jobs are in no later worker of the same mould."""

    async def scenario(rig: Rig) -> None:
        words = [word() for _ in range(9)]
        for start in range(0, 9, 3):
            arg, value, argv = words[start : start + 3]
            await rig.run(task="sample_tasks:add", args=[arg, arg])
            await rig.run(["true", argv], env={"VALUE": value})
        mould = rig.slot.mould_pid
        seen = await rig.run(task="probe_tasks:scan", args=[[halves(each) for each in words]])
        assert rig.slot.mould_pid == mould
        assert isinstance(seen.result, dict), seen
        assert seen.result["ok"] == [0] * 9
        # The counter-checks: the search sees its own job's words, and what the mould itself knows (its attempt).
        mine = word()
        seen = await rig.run(task="probe_tasks:own_word", args=[mine, [halves(mine)]])
        assert isinstance(seen.result, dict), seen
        assert seen.result["ok"][0] > 0
        named = word()
        seen = await rig.run(task="probe_tasks:scan", args=[[halves(named)]], attempt=f"main-{named}.1")
        assert isinstance(seen.result, dict), seen
        assert seen.result["ok"][0] > 0

    in_rig(node_name, scenario)


def test_attack_06_nothing_of_the_agents_environment(node_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value in the agent's environment and memory is in no worker: not on its stack, not in its heap."""
    canary = word()
    monkeypatch.setenv("RINGFENCE_REDIS_URL", f"redis://agent:{canary}@h/0")

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task="probe_tasks:scan", args=[[halves(canary)]])
        assert isinstance(seen.result, dict), seen
        assert seen.result["ok"] == [0]
        assert rig.zygote.pid is not None
        if os.geteuid() == 0:
            assert Path(f"/proc/{rig.zygote.pid}/environ").read_bytes() == b""
            links = {os.readlink(f"/proc/{rig.zygote.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{rig.zygote.pid}/fd")}
            others = {link for link in links if not link.startswith(("/dev/null", "socket:", "anon_inode:", "pid:"))}
            assert others <= {"anon_inode:[signalfd]"}, links
            assert os.readlink(f"/proc/{rig.zygote.pid}/cwd") == "/"

    in_rig(node_name, scenario)


PID_1 = """
import os
for name in ("mem", "environ", "maps", "mountinfo", "mounts", "fd/0", "cwd", "root", "cgroup"):
    try: os.open("/proc/1/" + name, os.O_RDONLY); print("OPENED", name)
    except OSError as error: print(error.errno)
try: print("LISTED", os.listdir("/proc/1/fd"))
except OSError as error: print(error.errno)
"""


def test_attack_43_the_mould_is_closed(node_name: str) -> None:
    """pid 1 of the job's world shows neither memory, descriptors nor the host's mounts, though at B it has its uid."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(PID_1))
        assert len(seen.out.split()) == 10, seen
        assert set(seen.out.split()) <= {b"1", b"2", b"13"}, seen

    in_rig(node_name, scenario)


def test_attack_43_the_mould_is_closed_without_landlock(node_name: str) -> None:
    """The same where the kernel has no Landlock: a filter in front of the zygote answers ENOSYS to its calls."""
    words = [sys.executable, "-m", "tests.isolation.bare", node_name, PID_1]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    abi, *answers = done.stdout.split()
    assert abi == "0"
    assert len(answers) == 10, done.stdout
    assert set(answers) <= {"1", "2", "13"}, done.stdout


@pytest.mark.parametrize("what", ["/work/f", "/dev/shm/f", "memfd"])
def test_memory_used_up_ends_the_job_and_is_told(node_name: str, what: str) -> None:
    """The job goes before its mould, though with cgroup v1 both share the limit: the reason is known."""

    async def scenario(rig: Rig) -> None:
        if rig.group is None or "memory" not in rig.group.enforces:
            pytest.skip("no memory controller here")
        code = f"""
import os
fd = os.memfd_create("x") if {what!r} == "memfd" else os.open({what!r}, os.O_CREAT | os.O_WRONLY)
for _ in range(200): os.write(fd, bytes(1 << 20))
"""
        await rig.run(["true"])
        mould = rig.slot.mould_pid
        seen = await rig.run(python(code), memory_bytes=64 << 20, shm_bytes=1 << 30)
        assert (seen.verdict.kind, seen.verdict.signal, seen.verdict.limit) == ("signal", 9, "memory"), seen
        assert rig.slot.mould_pid == mould
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)
