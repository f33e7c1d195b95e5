"""What a job is told when the filter or its grants stop a program: a state, a reason and words, not a mystery."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import cast

import pytest

from node_agent.containment import syscalls
from node_agent.containment.sysnumbers import NUMBERS
from tests.support.fleet import Fleet
from tests.toolchains import census

#: mov eax, 0x40000027; syscall; ret: the getpid of x32.
FOREIGN = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b8270000400f05c3"))
print("before", flush=True)
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""
#: A filter of the job's own that ends it at getppid, for machines without a foreign entry at hand.
OWN = """
import ctypes, os, platform, struct
number = {"x86_64": 110, "aarch64": 173}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("@HP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(22, 2, program) == 0
print("before", flush=True)
os.getppid()
"""
FORMS = [pytest.param(OWN, id="own filter")]
if os.uname().machine == "x86_64":
    FORMS.append(pytest.param(FOREIGN, id="x32 call"))


def test_what_real_programs_were_seen_to_call_is_there() -> None:
    """Every call of the last census is allowed or checked, or one whose absence the C library expects."""
    seen = {name: census.decision(name) for name in census.measured()}
    assert len(seen) > 150
    assert {name for name, said in seen.items() if said == "EPERM"} == set()
    assert {name for name, said in seen.items() if said == "ENOSYS"} <= {"clone3", "get_mempolicy", "set_mempolicy"}
    known = syscalls.ALLOWED | syscalls.DENIED | syscalls.ABSENT
    checked = {name for name, said in seen.items() if said == "checked"}
    assert checked.isdisjoint(known)
    assert checked <= set(NUMBERS["x86_64"])


@pytest.mark.parametrize("code", FORMS)
def test_attack_45_a_job_that_dies_on_a_filter_says_so(fleet: Fleet, code: str) -> None:
    """State failed(seccomp), signal and code, the last output, the words for people, and one event with the reason."""
    done = fleet.run("run", "--json", "--", sys.executable, "-c", code)
    assert done.returncode == 128 + signal.SIGSYS
    view = json.loads(done.stdout)
    assert (view["state"], view["reason"], view["signal"]) == ("failed", "seccomp", int(signal.SIGSYS))
    shown = fleet.json("show", view["job"])[0]
    assert "SIGSYS" in str(shown["detail"])
    assert "before" in str(shown["tail"])
    ends = [event for event in fleet.json_lines("events", "--job", view["job"]) if event["type"] == "job.ended"]
    assert len(ends) == 1
    assert cast("dict[str, object]", ends[0]["detail"])["reason"] == "seccomp"


def test_a_shell_whose_program_died_on_a_filter_is_no_mystery(fleet: Fleet) -> None:
    """The shell's own end is an exit code; the detail names the signal that it stands for."""
    done = fleet.run("run", "--json", "--", "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", OWN)
    view = json.loads(done.stdout)
    assert (done.returncode, view["state"], view["reason"]) == (159, "failed", "exit")
    assert "SIGSYS" in str(fleet.json("show", view["job"])[0]["detail"])


@pytest.mark.parametrize("option", [("--no-exec",), ()], ids=["--no-exec", "default"])
def test_no_exec_holds_for_the_workspace_and_for_grants(fleet: Fleet, option: tuple[str, ...]) -> None:
    """With --no-exec neither a copy in /work nor a granted program runs; without it both do."""
    place = fleet.work / "place"
    place.mkdir(exist_ok=True)
    shutil.copy("/bin/true", place / "tool")
    script = 'cp /bin/true /work/x; /work/x; echo $?; "$1"/tool; echo $?; cp /bin/true "$1/mine"; "$1/mine"; echo $?'
    done = fleet.run("run", *option, "--write", str(place), "--", "sh", "-c", script, "sh", str(place))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["126"] * 3 if option else ["0"] * 3)
    shutil.rmtree(place)
