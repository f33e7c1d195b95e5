"""One name, one agent: a second holder is turned away with a reason, and the first one does not notice (A-F01)."""

from __future__ import annotations

from dataclasses import replace

from tests.support.rig import Rig


def test_a_f01_a_second_agent_of_the_same_name_is_refused(pair: Rig) -> None:
    """It exits for an operator to look (78), names what to do, and the kill of a job reaches the one that runs it."""
    first = pair.nodes["a"]
    boot = pair.boot(first)
    job = pair.command("sh", "-c", "echo up; sleep 600", node=first.name)
    pair.wait_output(job, "up")
    second = replace(first, process=None, log=first.log.with_suffix(".second"))
    second.start()
    assert second.wait() == 78
    assert "choose another --name" in second.tail()
    assert pair.boot(first) == boot
    receipt = job.kill(wait=20)
    assert (receipt.outcome, receipt.node, receipt.boot) == ("killed", first.name, boot)
    assert [view.name for view in pair.app.nodes()].count(first.name) == 1
