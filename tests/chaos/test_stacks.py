"""An agent that does not end says where it stands."""

from __future__ import annotations

from tests.scale import stacks
from tests.scale.fleet import running
from tests.support.wait import wait_until


def test_an_agent_shows_what_its_tasks_wait_for() -> None:
    """On request the log has every task with the line that it waits in, and the agent goes on."""
    with running(journal=False) as fleet:
        agent = fleet.start("a", slots=1)
        parts = ("node_agent/dispatch.py", "node_agent/heartbeat.py", "node_agent/wakeups.py", "Current thread")
        wait_until(lambda: all(part in agent.stacks() for part in (*parts, stacks.DONE)), "the stacks of every loop")
        fleet.wait_up(agent)
        assert not agent.dead()
