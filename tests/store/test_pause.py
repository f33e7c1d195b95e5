"""pause.lua: an order goes to who holds the job, in one step with the look at its state, and leaves nothing else."""

from __future__ import annotations

from typing import Any, cast

from tests.store.desk import KEYS, Agent, Desk
from tests.support.valkey import Valkey


def pause(desk: Desk, job: str) -> list[str]:
    """Send a pause for one job; return the script's answer."""
    document: dict[str, object] = {"form": "job", "job": job, "command": '{"op":"pause"}', "sig": "kid.sig"}
    return [part.decode() for part in desk.script("pause", [KEYS.job(job)], document)]


def sent(desk: Desk, node: str | None) -> list[dict[bytes, bytes]]:
    """Return the entries of a control stream."""
    rows = cast("list[Any]", desk.redis.xrange(KEYS.control(node)))
    return [fields for _, fields in rows]


def test_an_order_follows_the_job_s_state(valkey: Valkey) -> None:
    """Unknown, waiting, held (sent to its node) and ended are told apart; only a held one is sent anywhere."""
    with Desk(valkey) as desk, Agent(valkey) as agent:
        agent.register()
        assert pause(desk, "main-none") == ["unknown"]
        job = desk.enqueue()
        assert pause(desk, job) == ["waits", "queued"]
        assert sent(desk, "n1") == sent(desk, None) == []
        claim = agent.claim()
        assert pause(desk, job) == ["sent", "n1"]
        (entry,) = sent(desk, "n1")
        assert entry == {b"command": b'{"op":"pause"}', b"sig": b"kid.sig", b"why": b"pause", b"job": job.encode()}
        agent.start(claim)
        assert pause(desk, job) == ["sent", "n1"]
        before = desk.job(job)
        assert before["rf_state"] == "running", "the script itself changes no job"
        agent.finish(claim)
        assert pause(desk, job) == ["ended", "finished"]
        assert len(sent(desk, "n1")) == 2
        assert not desk.redis.exists(KEYS.tombstone(job))


def test_a_selector_goes_to_all_and_names_the_live_nodes(valkey: Valkey) -> None:
    """Every node with a lease answers; one whose lease has lapsed is not waited for."""
    with Desk(valkey) as desk, Agent(valkey) as agent, Agent(valkey, "n2", "b00t0000000a") as other:
        agent.register()
        other.register(host="host-2")
        desk.redis.zadd(KEYS.leases(), {"n2/b00t0000000a": 1})
        keys = [KEYS.control(), KEYS.leases(), KEYS.nodes(), KEYS.clock()]
        document: dict[str, object] = {"form": "selector", "command": "{}", "sig": "kid.sig"}
        assert [part.decode() for part in desk.script("pause", keys, document)] == ["n1"]
        (entry,) = sent(desk, None)
        assert (entry[b"why"], entry[b"job"]) == (b"pause", b"")


def test_a_job_key_of_a_wrong_type_stops_nothing(valkey: Valkey) -> None:
    """Whoever can write the store can break one job's key, not the script."""
    with Desk(valkey) as desk:
        desk.redis.set(KEYS.job("main-odd"), "x", ex=60)
        assert pause(desk, "main-odd") == ["unknown"]
