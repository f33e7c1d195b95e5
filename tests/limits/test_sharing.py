"""What a job inherits of the host's scales, and what many jobs cost the agent (attacks 35, 57)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import rig as rigs
from tests.support.fleet import processes_with
from tests.support.rig import Rig

OWN = Path("/proc/self/oom_score_adj")
LEAST = 500
#: An ordinary user without a cgroup has nothing but SIGKILL, and its mould waits for a CPU among the sessions.
KILL_MS = 50.0 if os.geteuid() == 0 else 1000.0
SESSIONS = 100
#: The default. Without a cpu controller the agent is one of a hundred that want a CPU: a lease of 3 s may lapse.
HEARTBEAT_S = 5.0
# Each session is a scheduling group of its own; every process ends by itself after 20 s.
BURNERS = """
import os, signal, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        signal.alarm(20)
        while True: pass
print("up", flush=True)
time.sleep(20)
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home; the test starts the agent, which inherits what the test has."""
    with rigs.rigged(slots=2, heartbeat_s=HEARTBEAT_S, real=True) as found:
        yield found


@pytest.mark.parametrize("agent", [-700, 300, 700])
def test_attack_57_jobs_go_first_when_memory_runs_out(rig: Rig, agent: int) -> None:
    """Whatever score the agent runs with, also one that protects it, a job has at least 500; Landlock keeps it so."""
    before = OWN.read_text()
    if agent < int(before) and os.geteuid() != 0:
        pytest.skip("only root may protect a process from the OOM killer")
    try:
        OWN.write_text(str(agent))
    except PermissionError:
        pytest.skip("this root has no CAP_SYS_RESOURCE: it can't protect an agent from the OOM killer")
    try:
        rig.start("one")
    finally:
        OWN.write_text(before)
    code = (
        "score = open('/proc/self/oom_score_adj').read().strip()\n"
        "try: open('/proc/self/oom_score_adj', 'w').write('0')\n"
        "except OSError as error: print(score, type(error).__name__)\n"
        "else: print(score, 'lowered to', open('/proc/self/oom_score_adj').read())"
    )
    job = rig.command("python3", "-c", code)
    assert job.outcome(20).state == "finished"
    score, *rest = rig.logs(job).split()
    assert (int(score), rest) == (max(LEAST, agent), ["PermissionError"])


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_attack_35_many_sessions_delay_neither_kill_nor_renewal(rig: Rig) -> None:
    """A hundred busy sessions: the kill is proved in 50 ms, and the lease was renewed all the time."""
    rig.start("one")
    mark = secrets.token_hex(8)
    job = rig.command("python3", "-c", BURNERS, str(SESSIONS), mark)
    rig.wait_output(job, "up", 30)
    assert len(processes_with(mark)) == SESSIONS + 1
    receipt = job.kill()
    assert (receipt.outcome, receipt.survivors, processes_with(mark)) == ("killed", 0, [])
    assert receipt.kill_ms <= KILL_MS, receipt
    assert rig.state(job) == "killed"
    assert {event.type for event in rig.app.events() if event.type.startswith("node.")} == {"node.up"}
