"""An agent in a store in which somebody has spoilt what he could reach: it lives on, and kills reach it.

What such a writer may do (delay, drop, hide) is said in docs/security.md; here he must not reach any further than that.
"""

from __future__ import annotations

import time

from node_agent.scheduler import LEASE_MS
from tests.support.rig import rigged
from tests.support.wait import wait_until


def test_attack_20_a_spoilt_store_stops_neither_agent_nor_kill() -> None:
    """Streams of commands, clock, worker, record and ticks are spoilt under a job: `kill --all` is confirmed."""
    with rigged(slots=1) as rig:
        node = rig.start("n")
        name, keys, redis = node.name, rig.keys, rig.redis
        boot = rig.boot(node)
        job = rig.command("sleep", "300")
        rig.wait_state(job, "running")
        for stream in (keys.control(name), keys.control(), keys.events("main")):
            redis.set(stream, "spoilt")
        redis.set(f"rq:worker:{name}.{boot[:6]}.0", "spoilt", ex=60)
        redis.set(keys.clock(), "1e300")
        redis.hset(keys.cutoffs(), "#", "x")
        redis.zadd(keys.ticks(), {b"main/any": float("-inf"), b"\xff/x": 1.0, b"none": 0.5})
        redis.set(keys.schedules("main"), "spoilt")
        # Two renewals and a look of the scheduler see all of it.
        wait_until(lambda: int(redis.zcard(keys.ticks())) == 0, "the ticks to be done", LEASE_MS / 1000 + 5)
        seen = redis.zscore(keys.leases(), f"{name}/{boot}") or 0
        wait_until(
            lambda: (redis.zscore(keys.leases(), f"{name}/{boot}") or 0) > seen + 1000 * rig.heartbeat_s, "renewals"
        )
        assert rig.state(job) == "running"
        started_s = time.monotonic()
        (receipt,) = rig.app.kill(all=True, wait=15)
        assert (receipt.job, receipt.outcome, receipt.survivors) == (job.id, "killed", 0)
        # What a store user who may add commands can do: use up the ids (the agent mends it), then take a kill's place.
        last = f"{2**64 - 1}-{2**64 - 1}"
        for stream in (keys.control(name), keys.control()):
            redis.xadd(stream, {"command": "x"}, id=last)
        for stream in (keys.control(name), keys.control()):
            wait_until(lambda: not redis.xrange(stream, last, "+"), "the stream to be mended", 10)  # noqa: B023 - awaited here
        assert time.monotonic() - started_s < 10
        after = rig.command("sleep", "300")
        rig.wait_state(after, "running")
        assert after.kill(wait=15).outcome == "killed"
        assert not node.dead()
        assert rig.boot(node) == boot, "no lease was lost"
        redis.delete(keys.schedules("main"))
