"""Mail and signals on real nodes: two agents, one store, real sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import Budget, Grants, JobKilled
from runner.cli.ceiling import Import
from runner.cli.commands import run_words
from runner.errors import UsageError
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

PROGRAMS = Path(__file__).parent / "programs"
TOOL = """
[[tool]]
name = "echo"
argv = ["/bin/echo", "{word}"]
schema.properties.word = { type = "string" }
[loop]
in_row = 4
"""
MAIL = Grants(mail=("desk", "once"))


@pytest.fixture(scope="module")
def agents() -> Iterator[Rig]:
    """Two nodes with two slots each that serve the tasks."""
    with rigged(slots=2, heartbeat_s=5.0, imports=(Import("talk_tasks", PROGRAMS),)) as found:
        with (found.home / "policy.toml").open("a") as file:
            file.write(TOOL)
        found.start("a")
        found.start("b")
        yield found


def on(rig: Rig, name: str) -> str:
    """The full name of a node."""
    return rig.nodes[name].name


def test_row_i1_two_agents_on_two_nodes_talk(rig: Rig) -> None:
    """Questions and answers cross nodes, and a letter's receiver is known by its own word."""
    server = rig.app.call("talk_tasks:answers", node=on(rig, "b"), grants=MAIL)
    client = rig.app.call("talk_tasks:asks", [["a", "b"]], node=on(rig, "a"), grants=MAIL)
    assert client.result(timeout=40) == ["A", "B", server.id]
    assert server.result(timeout=40) == [client.id] * 3


def test_two_agents_talk_keep_state_over_a_kill_and_a_retry_and_one_budget_stops_both(rig: Rig) -> None:
    """All of it at once: neither the kill nor the freeze costs a round, and one word lets both go on to their ends."""
    budget = Budget("pair", wall_s=3.0)
    server = rig.app.call("talk_tasks:answers", node=on(rig, "b"), grants=MAIL, budget=budget)
    grants = Grants(mail=("desk",), state="1M")
    client = rig.app.call(
        "talk_tasks:leads", [30], node=on(rig, "a"), grants=grants, budget=budget, retries=1, backoff=0.1
    )
    wait_until(lambda: rig.app.waiting(), "the budget to be used up", 20)
    for job in (client, server):
        rig.wait_state(job, "paused", "claimed")  # claimed: it was about to begin its next attempt
    assert "its budget pair is used up" in str(client.status().waiting)
    receipts = rig.app.budget("pair").approve({"wall": 3600})
    assert {(receipt.job, receipt.outcome) for receipt in receipts} == {
        (job.id, "approved") for job in (client, server)
    }
    assert client.result(timeout=40) == [2, 3, "ROUND 29"]
    assert server.result(timeout=40) == [client.id] * 31


def test_row_i2_a_letter_outlives_the_job_that_took_it(rig: Rig) -> None:
    """A receiver that dies with a letter loses it to the next one, on another node, at once."""
    rig.app.call("talk_tasks:sends_once", grants=MAIL).result(timeout=40)
    rig.app.call("talk_tasks:dies_with_a_letter", node=on(rig, "a"), grants=MAIL).outcome(timeout=40)
    assert rig.app.call("talk_tasks:takes_over", node=on(rig, "b"), grants=MAIL).result(timeout=40) == 2


def test_row_s1_operators_signal_a_job_and_its_handlers_run(rig: Rig) -> None:
    """A signal's receipt says what became of it; masks hold up, LOOP freezes, and only an operator lets go on."""
    job = rig.app.call("talk_tasks:hears")
    rig.wait_output(job, "ready")
    said = [job.signal(name, reason="now").outcome for name in ("USR1", "USR2", "LOOP")]
    assert said == ["delivered", "queued", "applied"]
    rig.wait_state(job, "paused")
    assert job.signal("CONT").outcome == "resumed"
    assert job.signal("TERM").outcome == "delivered"
    assert job.result(timeout=40) == ["USR1 now", "LOOP", "-", "USR2"]
    assert job.signal("USR1").outcome == "already_ended"


def test_signals_reach_a_program_that_knows_nothing_of_them(rig: Rig) -> None:
    """Without a listener USR1 and INT are the system's own, to the first process; POLICY ends it all, by its name."""
    script = "trap 'echo one' USR1; trap 'echo int' INT; echo ready; while :; do sleep 0.05; done"
    job = rig.command("sh", "-c", script)
    rig.wait_output(job, "ready")
    for name, word in (("USR1", "one"), ("INT", "int")):
        assert job.signal(name).outcome == "delivered"
        rig.wait_output(job, word)
    receipt = job.signal("POLICY", reason="it must not")
    assert (receipt.outcome, receipt.reason) == ("killed", "POLICY: it must not")
    with pytest.raises(JobKilled) as ended:
        job.result(timeout=20)
    assert ended.value.reason == "policy"


def test_a_looping_job_is_frozen_let_go_on_once_frozen_again_and_killed(rig: Rig) -> None:
    """LOOP is sent at the fourth equal tool call, from outside; an operator gives as much rope again, and ends it."""
    job = rig.app.call("talk_tasks:loops", grants=Grants(tools=("echo",)))
    for calls in (3, 7):
        rig.wait_state(job, "paused")
        rig.wait_output(job, "called\n" * calls)
        told = [event.detail for event in job.events() if event.type == "job.signalled"]
        assert (told[-1]["signal"], told[-1]["outcome"]) == ("LOOP", "applied")
        assert len(told) == calls // 3
        if calls == 3:
            assert job.signal("CONT", reason="go on").outcome == "resumed"
    receipt = job.kill()
    assert (receipt.outcome, receipt.survivors) == ("killed", 0)
    assert rig.logs(job).count("called") == 7


def test_operators_signal_by_name_and_selector_on_the_command_line(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Receipts of every hit job, exit codes as of pause and kill; STOP, CONT and KILL are what they are elsewhere."""
    script = "trap 'echo one' USR1; echo ready; while :; do sleep 0.05; done"
    jobs = [rig.command("sh", "-c", script, tags={"g": "y"}, node=on(rig, name)) for name in ("a", "b")]
    for job in jobs:
        rig.wait_output(job, "ready")

    def cli(*words: str) -> tuple[int, str]:
        code = run_words(["--home", str(rig.home), "signal", *words])
        return code, capsys.readouterr().out

    code, out = cli("usr1", "--tag", "g=y", "--reason", "now")
    assert (code, out.count("signal delivered on")) == (0, 2)
    for job in jobs:
        rig.wait_output(job, "one")
    assert [event.detail["why"] for event in jobs[0].events() if event.type == "job.signalled"] == ["now"]
    found = rig.app.signal("usr1", tag="g=y", reason="again")
    assert {(one.job, one.outcome) for one in found} == {(job.id, "delivered") for job in jobs}
    with pytest.raises(UsageError, match="exactly one"):
        rig.app.signal("USR1")
    assert cli("SIGSTOP", jobs[0].id)[0] == 0
    rig.wait_state(jobs[0], "paused")
    assert "signal queued on" in cli("USR1", jobs[0].id)[1]
    assert cli("CONT", jobs[0].id)[0] == 0
    assert cli("NOSUCH", jobs[0].id)[0] == 2
    assert cli("USR1", "main-01m8q1h7tzawayv46ws7qp3136")[0] == 4
    code, out = cli("TRUST", "--tag", "g=y")
    assert (code, out.count("0 survivors")) == (0, 2)
    assert {job.status().reason for job in jobs} == {"trust"}
    assert cli("USR1", jobs[0].id)[0] == 5


def test_a_service_job_signals_and_watches_a_job_of_another_node(rig: Rig) -> None:
    """Ring 2 by grant: a watched job is signalled across nodes, and its end is seen as its node signed it."""
    script = "trap 'exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    target = rig.command("sh", "-c", script, tags={"team": "x"}, node=on(rig, "a"))
    rig.wait_output(target, "ready")
    guard = Grants(watch=("tag:team=x",))
    seen = rig.app.call("talk_tasks:watches", [target.id], node=on(rig, "b"), grants=guard).result(timeout=40)
    assert seen == ["delivered", "finished", "True"]
