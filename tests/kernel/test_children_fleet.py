"""Child jobs and tools on real nodes: two agents, one store, real sandboxes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from runner import Grants, JobFailed, JobKilled, JobLost, JobRefused, keyring, lineage
from runner.cli.ceiling import Import
from runner.home import Home
from runner.scripts import loader, payload, rows
from runner.scripts.payload import JobData, Link
from runner.wire import derived, record
from runner.wire.derived import Child
from runner.wire.envelope import Domain
from runner.wire.flow import Budget
from runner.wire.grants import Grants as Granted
from runner.wire.grants import NetGrant
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

KEYS = Keys()
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
timeout_s = 50
schema.properties.mark = {{ type = "string" }}
[[tool]]
name = "spin"
argv = ["/bin/sh", "-c", 'while :; do :; done', "{{mark}}"]
timeout_s = 50
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


def test_k2_children_run_and_their_results_come_back(rig: Rig) -> None:
    """job.spawn and job.wait end to end: three children of one task, on whichever node has room."""
    job = rig.app.call("kin_tasks:spread", [[2, 3, 4]], grants=Grants(spawn=3))
    assert job.result(timeout=40) == [{"square": n * n, "env": str(n)} for n in (2, 3, 4)]


def test_attack_04_a_job_gets_no_child_with_more(rig: Rig) -> None:
    """The guest is told so; on another node than the parent's: test_children_derived.py."""
    job = rig.app.call("kin_tasks:greedy", ["api.example.com:443"], grants=Grants(spawn=3))
    assert job.result(timeout=40) == "denied"


def test_attack_04_a_child_that_a_node_forged_is_refused_on_another_node(rig: Rig) -> None:
    """Node a signs a child with a destination that its parent does not have, and enqueues it: node b refuses it."""
    job = rig.command("sleep", "30", grants=Grants(spawn=2))
    rig.wait_state(job, "running")
    found = payload.parse(rig.redis.hget(KEYS.job(job.id), "data"))  # type: ignore[arg-type] # bytes
    origin = lineage.origin_of(found, None, 0)
    good = Child(job.id, 1, rig.nodes["a"].name, 0, argv=("sleep", "0"), pin=rig.nodes["b"].name)
    greedy = replace(good, number=1, grants=Granted(net=(NetGrant("api.example.com", 443),)))
    wanted = derived.child_of(origin, good).spec
    beyond = replace(wanted, id=derived.child_id(job.id, 1), grants=greedy.grants)
    ends = {}
    for spec, child in ((wanted, good), (beyond, greedy)):
        _enqueue(rig, found, spec, child)
        ends[child.number] = rig.app.job(spec.id)
    assert ends[0].result(timeout=30) is None
    with pytest.raises(JobRefused, match=r"more than its parent was granted: .*grants.net"):
        ends[1].result(timeout=30)
    job.kill()


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


def test_a_kill_of_an_ended_parent_kills_what_is_left(rig: Rig) -> None:
    """A job's children may go on after it; its id still names them all."""
    job = rig.app.call("kin_tasks:leave_one", ["left-mark"], grants=Grants(spawn=1))
    child = rig.app.job(str(job.result(timeout=40)))
    rig.wait_state(child, "running")
    assert (child.status().parent, job.status().parent) == (job.id, None)
    receipts = job.kill_tree()
    assert [(one.job, one.outcome) for one in receipts] == [(job.id, "already_ended"), (child.id, "killed")]


def test_a_retried_parent_has_the_children_that_it_had(rig: Rig) -> None:
    """The second attempt asks for the child by the same name and gets the first one's result."""
    job = rig.app.call("kin_tasks:twice", [], grants=Grants(spawn=2), retries=1)
    known, answer = cast("tuple[bool, dict[str, object]]", job.result(timeout=40))
    assert (known, answer["square"]) == (True, 81)


def test_a_command_starts_jobs_and_calls_tools_from_a_shell(rig: Rig) -> None:
    """`ringfence-guest jobs` and `tools`, from a command job and from what it started itself."""
    script = """
    if [ "$1" = part ]; then exit 3; fi
    ringfence-guest tools call greet '{"who": "shell"}' | head -1
    ringfence-guest tools call greet '{"who": 7}'; echo "refused $?"
    child=$(ringfence-guest jobs run -- sh "$0" part) && ringfence-guest jobs wait "$child" >/dev/null; echo "child $?"
    ringfence-guest jobs exit 4
    sleep 60
    """
    place = rig.work / "shell.sh"
    place.write_text(script)
    grants = Grants(spawn=1, tools=("greet",), read=(str(place),))
    job = rig.command("sh", str(place), grants=grants)
    with pytest.raises(JobFailed, match="exit code 4"):
        job.result(timeout=40)
    assert rig.logs(job).splitlines()[0] == "hello shell"
    assert "refused 1" in rig.logs(job)
    assert "child 1" in rig.logs(job)


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
    # Process 1, the shell and the two that it counts with, and nobody of the job.
    assert int(lines[2]) <= 5
    assert os.geteuid() != 0 or int(lines[1]) != 0
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


def test_a_paused_job_has_no_tool_that_runs(rig: Rig) -> None:
    """A pause freezes what runs for the job elsewhere, and a resume lets it go on."""
    job = rig.app.call("kin_tasks:use", ["spin", {"mark": "0.5"}], grants=Grants(tools=("spin",)))
    wait_until(lambda: _ticks(rig, "0.5") > 2, "the tool to run", 30)
    assert job.pause().outcome == "paused"
    seen = [_ticks(rig, "0.5")]

    def looked() -> bool:
        seen.append(_ticks(rig, "0.5"))
        return len(seen) > 10

    wait_until(looked, "ten looks")
    assert seen[-1] == seen[0]
    assert job.resume().outcome == "resumed"
    wait_until(lambda: _ticks(rig, "0.5") > seen[-1] + 2, "the tool to go on", 30)
    assert job.kill().survivors == 0


def test_k5_a_tool_ends_with_the_process_that_called_it(rig: Rig) -> None:
    """Nobody waits for it any more, so it is killed, though the job goes on."""
    grants = Grants(tools=("slow",))
    job = rig.app.call("kin_tasks:use_and_die", ["0.25"], grants=grants, env={"BEFORE": "2"})
    wait_until(lambda: _sleeps("0.25"), "the tool to run", 30)
    wait_until(lambda: not _sleeps("0.25"), "the tool to be gone", 10)
    assert rig.state(job) == "running"
    job.kill()


def test_a_budget_counts_tool_calls(rig: Rig) -> None:
    """The call that goes over the bound is not carried out; the job ends as its budget says."""
    budget = Budget("tools-in-test", calls=2, on_hit="kill")
    grants = Grants(tools=("greet",))
    job = rig.app.call("kin_tasks:one_by_one", ["greet", {"who": "x"}, 5], grants=grants, budget=budget)
    with pytest.raises(JobKilled):
        job.result(timeout=40)
    assert rig.logs(job).split() == ["1", "2"]


def test_k5_more_calls_than_places_wait_their_turn(rig: Rig) -> None:
    """Four calls at a time on two places all get their answer."""
    job = rig.app.call("kin_tasks:many", ["greet", {"who": "x"}, 4], grants=Grants(tools=("greet",)))
    assert job.result(timeout=40) == [0, 0, 0, 0]


def test_no_tool_outlives_its_agent(rig: Rig) -> None:
    """A tool's sandbox hangs on the agent's lifeline like any job's: SIGKILL to the agent ends it."""
    node = rig.start("c")
    job = rig.app.call("kin_tasks:use", ["slow", {"mark": "0.125"}], grants=Grants(tools=("slow",)), node=node.name)
    wait_until(lambda: _sleeps("0.125"), "the tool to run", 30)
    node.crash()
    wait_until(lambda: not _sleeps("0.125"), "the tool to be gone", 10)
    rig.restart(node)
    with pytest.raises(JobLost):
        job.result(timeout=40)
    node.stop()


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


def _enqueue(rig: Rig, found: JobData, spec: JobSpec, child: Child) -> None:
    """Enqueue what node a signs for a child, by hand: no agent looks at it before it is claimed."""
    signer = keyring.node_key(Home(rig.home), rig.nodes["a"].name)
    data = record.dumps(child, bare=True)
    card = rig.redis.hget(KEYS.cards(), rig.nodes["a"].name)
    link = Link(data, signer.sign(Domain.CHILD, data), bytes(card or b""))  # type: ignore[arg-type] # bytes
    packed = payload.pack(found.envelope, found.signature, found.occurrence, (link,))
    row = rows.row(spec, spec.not_before_ms)
    places = [KEYS.seq(), KEYS.lanes(), KEYS.queues(), KEYS.job(spec.id), KEYS.queue(str(row["lane"]))]
    words = [json.dumps({"rq": KEYS.rq, "rf": KEYS.rf, "ttl": 600, "jobs": [row]}), packed]
    rig.redis.eval(loader.load("enqueue").text, 6, *places, KEYS.active("main"), *words)  # type: ignore[arg-type] # bytes


def _ticks(rig: Rig, mark: str) -> int:
    """The processor time of the spinning tool that was called with this mark, in ticks."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().endswith(f"done\0{mark}\0"):
                return int((entry / "stat").read_text().rpartition(")")[2].split()[11])
        except OSError:
            continue
    return 0


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
