"""After every kind of end the host holds nothing of a job, and after a crash of the agent nothing once it is back.

Gone with the namespaces: workspace, tmp, shm, SysV objects, sockets, mounts. Given back by the agent: groups, uids,
descriptors. Swept by the agent's next start: what a killed one could not.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node_agent.containment.sweep import sweep_folders
from runner import Grants
from runner.job import Job
from tests.containment.rig import LEVEL, marked
from tests.support.holdings import Holdings, descendants, look
from tests.support.rig import Node, Rig, rigged
from tests.support.wait import wait_until

SLOTS = 2
#: Descriptors that an agent keeps open from their first use on.
SLACK_DESCRIPTORS = 2 * SLOTS + 2
MARK = "rf-ends-mark"
#: Everything that a job can leave lying about, made by each of the jobs below before it ends.
LITTER = """
mkdir -p /work/deep/tree /tmp/t; echo x >/work/deep/tree/f; echo x >/dev/shm/s; chmod 000 /work/deep /tmp/t
ln -s /etc/passwd /work/link; mkfifo /tmp/pipe; setsid sleep 40 & (setsid setsid sleep 40 &) ; sleep 40 &
python3 -c 'import ctypes; l = ctypes.CDLL(None); l.shmget(0x5247, 4096, 0o1666); l.msgget(0x5247, 0o1666)'
echo up
"""


#: Sends its output pipe away on its channel, which nobody empties, and in a ring of sockets that hold each other.
IN_FLIGHT = """
import array, socket
def send(end, *fds):
    end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())])
channel = socket.socket(fileno=100)
channel.setblocking(False)
try:
    for _ in range(500): send(channel, 1, 2)
except OSError: pass  # full; or the node takes no descriptors there (Linux 6.16)
one, two = socket.socketpair()
send(one, 1, 2, one.fileno(), two.fileno()); send(two, 1, 2, one.fileno(), two.fileno())
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A store and a home; each test starts its own agent."""
    with rigged(slots=SLOTS) as found:
        found.redis.ping()  # its connection stays for all tests
        yield found


@pytest.fixture(autouse=True)
def few_connections(rig: Rig) -> Iterator[None]:
    """Close what a test opened to the store."""
    yield
    rig.app.close()


def littered(rig: Rig, then: str, **options: object) -> Job[None]:
    """Enqueue a job that leaves litter and then does as told."""
    return rig.command("sh", "-c", LITTER + then, env={"MARK": MARK}, **options)  # type: ignore[arg-type] # passed on


ENDS: dict[str, tuple[Callable[[Rig], Job[None]], str, str]] = {
    "exit": (lambda rig: littered(rig, "exit 0"), "finished", ""),
    "code": (lambda rig: littered(rig, "exit 3"), "failed", "exit"),
    "signal": (lambda rig: littered(rig, "kill -9 $$"), "failed", "signal"),
    "stopped": (lambda rig: littered(rig, "kill -STOP $$; sleep 40", timeout=1.5), "failed", "time_limit"),
    "time-limit": (lambda rig: littered(rig, "trap '' TERM; wait; sleep 40", timeout=1.5), "failed", "time_limit"),
    "killed": (lambda rig: _killed(rig, littered(rig, "wait; sleep 40")), "killed", ""),
    "pipe-in-flight": (lambda rig: rig.command("python3", "-c", IN_FLIGHT, env={"MARK": MARK}), "finished", ""),
    "no-program": (lambda rig: rig.command("no-such-program"), "failed", "exit"),
    "refused": (lambda rig: rig.command("true", grants=Grants(read=("/root",))), "refused", "policy"),
    "killed-waiting": (lambda rig: _killed_waiting(rig), "killed", ""),
}


def _killed(rig: Rig, job: Job[None]) -> Job[None]:
    rig.wait_output(job, "up")
    receipt = job.kill()
    assert (receipt.outcome, receipt.survivors) == ("killed", 0)
    return job


def _killed_waiting(rig: Rig) -> Job[None]:
    blockers = [rig.command("sleep", "30") for _ in range(SLOTS)]
    for blocker in blockers:
        rig.wait_state(blocker, "running")
    job = rig.command("true")
    assert job.kill().outcome == "killed_before_start"
    for blocker in blockers:
        blocker.kill()
    return job


def filled(rig: Rig, node: Node) -> Holdings:
    """Look at the agent when every slot has just served a job in the same way."""
    go = rig.work / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.1; done"
    jobs = [rig.command("sh", "-c", script, grants=Grants(read=(str(rig.work),))) for _ in range(SLOTS)]
    for job in jobs:
        rig.wait_state(job, "running")
    go.touch()
    for job in jobs:
        rig.wait_state(job, "finished")
    go.unlink()
    rig.wait_idle()
    wait_until(lambda: workers(node) == [1] * SLOTS, "a worker to wait in every mould")
    return look(node.pid, node.name)


def workers(node: Node) -> list[int]:
    """Return how many processes each of the agent's moulds has below it."""
    return [len(descendants(pid)) for pid in descendants(node.pid) if _is_first(pid)]


def _is_first(pid: int) -> bool:
    """Whether a process is the first of a pid namespace of its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
    return len(numbers) > 1 and numbers[-1] == "1"


def test_every_kind_of_end_leaves_the_host_as_it_was(rig: Rig) -> None:
    """Exit, code, signal, stop, limit, kill, refusal and no program: no process, group, mount, uid, object or file."""
    node = rig.start("ends")
    before = filled(rig, node)
    objects = host_objects()
    for name, (start, state, reason) in ENDS.items():
        job = start(rig)
        rig.wait_state(job, "finished", "failed", "killed", "refused")
        view = job.status()
        assert (view.state, view.reason if reason else "") == (state, reason), name
        assert marked(MARK) == [], f"{name}: processes are left"
    after = filled(rig, node)
    assert (after.processes, after.groups, after.mounts) == (before.processes, before.groups, before.mounts)
    assert after.uid_locks == before.uid_locks
    assert after.descriptors <= before.descriptors + SLACK_DESCRIPTORS
    assert host_objects() == objects, "SysV objects of a job are in the host's ipc namespace"
    assert lying_about(rig, node) == []
    node.stop()
    assert lying_about(rig, node) == []


@pytest.mark.timeout(120)
def test_what_a_killed_agent_left_is_swept(rig: Rig) -> None:
    """SIGKILL to an agent with littering jobs, three times: at once no process, after its restart nothing else."""
    node = rig.start("crashed")
    before = filled(rig, node)
    objects = host_objects()
    for _ in range(3):
        jobs = [littered(rig, "wait; sleep 40") for _ in range(SLOTS)]
        for job in jobs:
            rig.wait_output(job, "up")
        assert marked(MARK)
        node.crash()
        wait_until(lambda: not marked(MARK), "the jobs to be gone", 1.0)
        rig.restart(node)
        for job in jobs:
            rig.wait_state(job, "lost")
    after = filled(rig, node)
    assert (after.processes, after.groups, after.mounts) == (before.processes, before.groups, before.mounts)
    assert after.uid_locks == before.uid_locks
    assert host_objects() == objects
    assert lying_about(rig, node) == []
    assert len(os.listdir(rig.home / "nodes" / node.name / "moulds")) == SLOTS, "the list of moulds grows with crashes"
    node.stop()


def host_objects() -> list[list[str]]:
    """Return the keys of the SysV objects of this test's own ipc namespace that jobs here would make."""
    found = []
    for kind in ("shm", "msg"):
        rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]
        found.append([row[0] for row in rows if int(row[0]) == 0x5247])
    return found


def lying_about(rig: Rig, node: Node) -> list[str]:
    """Return what lies in the folders of an agent that hold what belongs to attempts."""
    home = rig.home / "nodes" / node.name
    return [
        f"{name}/{entry}" for name in ("work", "view") if (home / name).is_dir() for entry in os.listdir(home / name)
    ]


PLANT = """
import os, sys
top = sys.argv[1]
os.makedirs(top + "/a/b"); os.symlink(sys.argv[2], top + "/a/out"); os.symlink(sys.argv[2], top + "/a/b/out")
os.symlink("/", top + "/root"); os.symlink("../../..", top + "/up"); open(top + "/a/b/f", "w").close()
os.link(sys.argv[2] + "/kept", top + "/a/hard") if os.access(sys.argv[2] + "/kept", os.W_OK) else None
os.mkfifo(top + "/pipe")
deep = top
for _ in range(300):
    deep += "/d"
    os.mkdir(deep) if len(deep) < 4000 else None
for folder, folders, files in os.walk(top, topdown=False):
    os.chmod(folder, 0)
"""


def test_a_sweep_follows_no_link_and_stops_at_no_mode(home: Path) -> None:
    """A tree of an attempt with links to the host, hard links, pipes, 300 levels, all of mode 000: gone, alone."""
    victim = home / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    (victim / "kept").chmod(0o666)
    work = home / "node" / "work"
    work.mkdir(parents=True)
    work.chmod(0o777)
    uid = {"user": 1_900_000_777, "group": 1_900_000_777, "extra_groups": []} if LEVEL == "A" else {}
    words = ["python3", "-I", "-S", "-c", PLANT, str(work / "attempt"), str(victim)]
    subprocess.run(words, check=True, cwd="/", timeout=30, **uid)  # type: ignore[call-overload] # options of a user
    assert stat.S_IMODE((work / "attempt").stat().st_mode) == 0
    assert sweep_folders(home / "node") == ["folder work/attempt"]
    assert os.listdir(work) == []
    assert (victim / "kept").read_text() == "kept"
    assert stat.S_IMODE((victim / "kept").stat().st_mode) == 0o666


def test_a_write_grant_is_never_cleaned(rig: Rig) -> None:
    """What a job made below a write grant, links included, is its result: it stays, and nothing else is touched."""
    node = rig.start("granted")
    victim = rig.home.parent / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    below = rig.work / "below"
    below.mkdir()
    below.chmod(0o777)
    script = f"cd {below} && mkdir d && echo x >d/f && ln -s {victim} out && chmod 000 d && echo up; exit 0"
    job = rig.command("sh", "-c", script, grants=Grants(write=(str(below),)))
    rig.wait_state(job, "finished", "failed")
    assert "up" in rig.logs(job)
    assert sorted(os.listdir(below)) == ["d", "out"]
    assert (victim / "kept").read_text() == "kept"
    (below / "d").chmod(0o700)
    node.stop()
