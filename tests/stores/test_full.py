"""A fleet whose store has no room for a while (A-L05 a): nothing gets lost, and nobody goes down."""

from __future__ import annotations

import pytest

from runner.errors import StoreError
from tests.scale.fleet import TASK, running
from tests.support.wait import wait_until

HEARTBEAT_S = 1.0


def test_a_l05_a_full_store_ends_no_agent_and_no_job() -> None:
    """Longer than a lease: the running job's end arrives, a kill works, enqueues say why not; then all goes on."""
    with running(journal=False) as fleet:
        agent = fleet.start("a", slots=2, heartbeat_s=HEARTBEAT_S)
        boot, pid = fleet.records()[agent.name]["boot"], agent.pid
        ends, dies = (fleet.app.call(TASK, kwargs={"hold_ms": hold}) for hold in (2500, 60_000))

        def state(job: str) -> str:
            return (fleet.redis.hget(fleet.keys.job(job), "rf_state") or b"").decode()  # type: ignore[union-attr]  # sync

        wait_until(lambda: state(ends.id) == state(dies.id) == "running", "both to run")
        fleet.redis.config_set("maxmemory", 1)
        with pytest.raises(StoreError, match="is full and takes no writes"):
            fleet.app.call(TASK)
        wait_until(lambda: state(ends.id) == "finished", "the end to be written")
        dies.kill(wait=0.0)
        wait_until(lambda: state(dies.id) == "killed", "the kill to be carried out")
        assert fleet.records()[agent.name]["boot"] == boot
        fleet.redis.config_set("maxmemory", 0)
        assert fleet.app.call(TASK).result(timeout=10.0) == 1
        assert ends.result(timeout=5.0) == 1
        assert fleet.records()[agent.name]["boot"] == boot
        assert (agent.pid, agent.dead()) == (pid, False)
