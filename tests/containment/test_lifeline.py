"""A job never outlives its agent, its zygote or its lease, whatever happens to them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.slots import boottime_ns
from tests.containment.rig import LEVEL, Rig, in_rig, marked, python
from tests.support.wait import await_until, wait_until

ROOT = Path(__file__).parents[2]
frozen_only_with_v2 = pytest.mark.skipif(
    LEVEL == "B", reason="needs cgroup v2 freeze, which an ordinary user has only where it is delegated"
)


class Agent:
    """The stand-in agent, its tree's mark, and the pids of its mould and zygote."""

    def __init__(self, process: subprocess.Popen[bytes], node: str, mark: str) -> None:
        self.process = process
        self.node = node
        self.mark = mark
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == [b"mould"], words
        self.mould, self.zygote = int(words[1]), int(words[2])

    def tree(self) -> list[int]:
        """The processes of the job."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]


@contextmanager
def agent(node: str, deadline_ms: int = 0) -> Iterator[Agent]:
    """Run the stand-in agent with its tree; end it, and sweep its groups, whatever the test did to it."""
    mark = f"rfmark{secrets.token_hex(8)}"
    words = [sys.executable, "-m", "tests.containment.agent", node, mark, *([str(deadline_ms)] if deadline_ms else [])]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield Agent(process, node, mark)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        with suppress(OSError):
            if (groups := NodeGroups.open(node)) is not None:
                groups.sweep()
                groups.close()


def _ended(pid: int) -> bool:
    """Whether the process runs no more; a zombie is for the host's init to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def freeze(running: Agent) -> None:
    """Freeze the job's group, as a pause does."""
    lines = Path(f"/proc/{running.mould}/cgroup").read_text().splitlines()
    own = next(line[4:] for line in lines if line.startswith("0::"))
    top = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")
    group = top / own.removesuffix("/mould") / "job"
    (group / "cgroup.freeze").write_text("1")
    wait_until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "the job to be frozen")


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=frozen_only_with_v2)], ids=["running", "frozen"])
def test_attack_36_an_agent_killed_takes_its_jobs_along(node_name: str, frozen: bool) -> None:
    """Within a second of SIGKILL to the agent, mould and tree are gone, also when the job is frozen."""
    with agent(node_name) as running:
        wait_until(lambda: len(running.tree()) == 5, "the whole tree to stand")
        if frozen:
            freeze(running)
        running.process.kill()
        wait_until(lambda: not running.tree(), "the tree to be gone", 1.0)
        wait_until(lambda: _ended(running.mould), "the mould to be gone", 1.0)


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=frozen_only_with_v2)], ids=["running", "frozen"])
def test_attack_36_an_agent_stopped_past_its_lease_loses_its_jobs(node_name: str, frozen: bool) -> None:
    """A stopped agent keeps every descriptor open; its jobs end at the deadline all the same, frozen ones too."""
    with agent(node_name, deadline_ms=700) as running:
        if frozen:
            freeze(running)
        running.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        assert running.tree()
        wait_until(lambda: not running.tree(), "the tree to be gone", 2.0)
        assert time.monotonic() - start < 1.5


def test_a_dead_zygote_ends_everything(node_name: str) -> None:
    """SIGKILL to the zygote ends its moulds and their jobs within a second."""
    with agent(node_name) as running:
        os.kill(running.zygote, signal.SIGKILL)
        wait_until(lambda: not running.tree(), "the tree to be gone", 1.0)


def test_the_agent_sees_that_its_zygote_died(node_name: str) -> None:
    """``died`` resolves, the running attempt gets its verdict, and no new mould is promised."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(["sh", "-c", "echo up; sleep 30"])
        assert rig.zygote.pid is not None
        os.kill(rig.zygote.pid, signal.SIGKILL)
        await rig.zygote.died
        assert (await rig.finish(attempt)).verdict.kind == "worker_died"
        assert marked(mark) == []

    in_rig(node_name, scenario)


def test_a_passed_deadline_ends_the_attempt(node_name: str) -> None:
    """An attempt whose lease is not renewed ends as worker_died; one that is renewed goes on."""

    async def scenario(rig: Rig) -> None:
        rig.slot.renew(boottime_ns() + 20_000_000_000)
        attempt, mark = await rig.running(["sh", "-c", "echo up; sleep 30"])
        rig.slot.renew(boottime_ns() + 600_000_000)
        start = time.monotonic()
        seen = await rig.finish(attempt)
        assert seen.verdict.kind == "worker_died"
        assert time.monotonic() - start > 0.4
        assert marked(mark) == []
        rig.slot.renew(boottime_ns() + 60_000_000_000)
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


def test_attack_36_ten_thousand_renewals_of_a_paused_job(node_name: str) -> None:
    """Renewals of a job that does nothing never block the agent, and the newest one counts."""

    async def scenario(rig: Rig) -> None:
        attempt, _ = await rig.running(["sh", "-c", "echo up; kill -STOP $$; sleep 30"])
        if rig.group is not None and "freeze" in rig.group.enforces:
            rig.group.freeze(True)
        start = time.monotonic()
        for number in range(10_000):
            rig.slot.renew(boottime_ns() + 400_000_000 + number)
        assert time.monotonic() - start < 2.0
        last: list[int] = []

        def renewed() -> bool:
            last.append(1)
            rig.slot.renew(boottime_ns() + 60_000_000_000)
            return len(last) > 60

        await await_until(renewed, "more time than the first deadlines gave")
        assert not attempt.verdict.done()
        if rig.group is not None and "freeze" in rig.group.enforces:
            rig.group.freeze(False)
        attempt.kill()
        assert (await rig.finish(attempt)).verdict.kind == "killed"

    in_rig(node_name, scenario)


def test_attack_50_the_lifeline_can_not_be_written_by_a_job(node_name: str) -> None:
    """The lifeline is a socket: it can't be reopened through /proc, and a job holds none of the mould's descriptors."""

    async def scenario(rig: Rig) -> None:
        code = r"""
import os
tried = []
for pid in ("self", "1"):
    try: names = os.listdir(f"/proc/{pid}/fd")
    except OSError as error: tried.append((pid, error.errno)); continue
    for name in names:
        if name == "100":
            try: os.open(f"/proc/{pid}/fd/{name}", os.O_WRONLY); tried.append((pid, name, "OPENED"))
            except OSError as error: tried.append((pid, name, error.errno))
print(tried)
"""
        seen = await rig.run(python(code))
        assert seen.out in {b"[('self', '100', 6), ('1', %d)]\n" % number for number in (1, 2, 13)}, seen

    in_rig(node_name, scenario)
