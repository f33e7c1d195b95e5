"""Child jobs and tools on real nodes: two agents, one store, real sandboxes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import Grants, JobFailed
from runner.cli.ceiling import Import
from runner.client import disconnect_all
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

PROGRAMS = Path(__file__).parent / "programs"
TOOLS = f"""
[[tool]]
name = "greet"
about = "Says hello."
argv = ["/bin/sh", "-c", 'echo "hello $0"; id -u; ls /proc | grep -c "^[0-9]"; printenv TOOL_ARGS', "{{who}}"]
[tool.schema]
required = ["who"]
properties.who = {{ type = "string", maxLength = 20 }}
[[tool]]
name = "slow"
argv = ["/bin/sh", "-c", 'sleep 60 & sleep 61 "$0"', "{{mark}}"]
timeout_s = 30
schema.properties.mark = {{ type = "string" }}
[[tool]]
name = "short"
argv = ["/bin/sh", "-c", "sleep 60"]
timeout_s = 0.3
[[tool]]
name = "crash"
argv = ["/bin/sh", "-c", 'kill -SEGV $$']
[[tool]]
name = "chatty"
argv = ["{sys.executable}", "-c", "print('x' * 100000)"]
output = "1K"
"""


@pytest.fixture(scope="module")
def agents() -> Iterator[Rig]:
    """Two nodes with two slots each that serve the tasks and declare tools."""
    with rigged(slots=2, heartbeat_s=5.0, imports=(Import("kin_tasks", PROGRAMS),)) as found:
        with (found.home / "policy.toml").open("a") as file:
            file.write(TOOLS)
        found.start("a")
        found.start("b")
        yield found


@pytest.fixture
def rig(agents: Rig) -> Iterator[Rig]:
    """The shared nodes for one test; nothing of the test runs on them afterwards."""
    yield agents
    agents.app.kill(all=True)
    agents.wait_idle()
    disconnect_all()
    agents.redis.connection_pool.disconnect()


def test_k2_children_run_and_their_results_come_back(rig: Rig) -> None:
    """job.spawn and job.wait end to end: three children of one task, on whichever node has room."""
    job = rig.app.call("kin_tasks:spread", [[2, 3, 4]], grants=Grants(spawn=3))
    assert job.result(timeout=40) == [{"square": n * n, "env": str(n)} for n in (2, 3, 4)]


def test_attack_04_a_job_gets_no_child_with_more(rig: Rig) -> None:
    """The guest is told so; on another node than the parent's: test_children_derived.py."""
    job = rig.app.call("kin_tasks:greedy", ["api.example.com:443"], grants=Grants(spawn=3))
    assert job.result(timeout=40) == "denied"


def test_job_exit_ends_the_attempt_from_any_process(rig: Rig) -> None:
    """A process below the task ends it with a code of its own choice; nothing of it is left."""
    assert rig.app.call("kin_tasks:leave", [0]).result(timeout=40) is None
    with pytest.raises(JobFailed, match="exit code 7"):
        rig.app.call("kin_tasks:leave", [7]).result(timeout=40)


def test_a_kill_of_the_parent_kills_the_tree(rig: Rig) -> None:
    """Running and waiting, on both nodes, three levels deep: one order, a receipt for each, survivors 0."""
    job = rig.app.call("kin_tasks:brood", ["tree-mark", 2], grants=Grants(spawn=6))
    wait_until(lambda: len(rig.app.jobs()) >= 3 and _below(rig, job.id) >= 3, "the tree to grow", 30)
    receipts = job.kill_tree(reason="test")
    assert receipts[0].job == job.id
    assert all(receipt.outcome in ("killed", "killed_before_start") for receipt in receipts), receipts
    assert len(receipts) >= 3
    assert all(receipt.survivors == 0 for receipt in receipts)
    wait_until(lambda: _open(rig, job.id) == [], "the whole tree to have ended")


def test_a_kill_by_tag_reaches_what_a_child_was_started_for(rig: Rig) -> None:
    """A selector that hits the parent alone kills its children, too: their parent's node tells the others."""
    job = rig.app.call("kin_tasks:brood", ["other-mark", 1], grants=Grants(spawn=6))
    wait_until(lambda: _below(rig, job.id) >= 2, "children", 30)
    rig.app.kill(task="kin_tasks:brood")
    wait_until(lambda: _open(rig, job.id) == [], "the whole tree to have ended", 30)


def test_k5_a_tool_runs_in_a_sandbox_of_its_own(rig: Rig) -> None:
    """Its own processes, uid and environment: it sees nothing of the job, and its arguments as they were passed."""
    job = rig.app.call("kin_tasks:use", ["greet", {"who": "you; id"}], grants=Grants(tools=("greet",)))
    answer = job.result(timeout=40)
    assert isinstance(answer, dict)
    assert answer["code"] == 0, answer
    lines = str(answer["text"]).splitlines()
    assert lines[0] == "hello you; id"
    assert lines[3] == '{"who":"you; id"}'


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        ("short", {"code": None, "timed_out": True}),
        ("crash", {"code": None}),
        ("chatty", {"code": 0, "cut": True, "text": "x" * 1024}),
    ],
)
def test_k5_a_tool_that_fails_is_an_answer(rig: Rig, tool: str, answer: dict[str, object]) -> None:
    """A deadline, a crash and a flood are the tool's own; the agent goes on."""
    job = rig.app.call("kin_tasks:use", [tool, {}], grants=Grants(tools=(tool,)))
    found = job.result(timeout=40)
    assert isinstance(found, dict)
    assert found.items() >= answer.items()


def test_k5_no_tool_outlives_the_job_that_called_it(rig: Rig) -> None:
    """A kill of the job is one of the tool that runs for it, before the receipt."""
    job = rig.app.call("kin_tasks:use", ["slow", {"mark": "0.75"}], grants=Grants(tools=("slow",)))
    wait_until(lambda: _sleeps("0.75"), "the tool to run", 30)
    receipt = job.kill()
    assert (receipt.outcome, receipt.survivors) == ("killed", 0)
    assert not _sleeps("0.75")


def test_k5_a_tool_ends_with_the_process_that_called_it(rig: Rig) -> None:
    """Nobody waits for it any more, so it is killed, though the job goes on."""
    grants = Grants(tools=("slow",))
    job = rig.app.call("kin_tasks:use_and_die", ["0.25"], grants=grants, env={"BEFORE": "2"})
    wait_until(lambda: _sleeps("0.25"), "the tool to run", 30)
    wait_until(lambda: not _sleeps("0.25"), "the tool to be gone", 30)
    assert rig.state(job) == "running"
    job.kill()


def test_k5_more_calls_than_places_wait_their_turn(rig: Rig) -> None:
    """Four calls at a time on two places all get their answer."""
    job = rig.app.call("kin_tasks:many", ["greet", {"who": "x"}, 4], grants=Grants(tools=("greet",)))
    assert job.result(timeout=40) == [0, 0, 0, 0]


def _below(rig: Rig, job: str) -> int:
    return len([one for one in rig.redis.scan_iter("rq:job:*") if f"job:{job}".encode() in _selectors(rig, one)])


def _selectors(rig: Rig, key: object) -> list[bytes]:
    found = rig.redis.hget(key, "rf_sel")  # type: ignore[arg-type] # a key as the store gave it
    return bytes(found or b"").split(b"\n")  # type: ignore[arg-type] # bytes, without decode_responses


def _open(rig: Rig, job: str) -> list[str]:
    """The jobs of a tree that have not ended."""
    ended = {"finished", "failed", "killed", "refused", "expired", "lost"}
    tree = [one for one in rig.redis.scan_iter("rq:job:*") if f"job:{job}".encode() in _selectors(rig, one)]
    states = {one: rig.redis.hget(one, "rf_state") for one in tree}
    return [one.decode() for one, state in states.items() if bytes(state or b"").decode() not in ended]  # type: ignore[arg-type] # as above


def _sleeps(mark: str) -> list[int]:
    """The processes of the slow tool that was called with this mark."""
    wanted, found = ["sleep", "61", mark], []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().rstrip("\0").split("\0") == wanted:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
