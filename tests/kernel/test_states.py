"""The states of a node: each is shown and enforced by one decision, where jobs are claimed (row K7)."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
import redis

from node_agent.dispatch import Dispatcher
from node_agent.nodestate import NodeFacts, state_of
from node_agent.turns import Turn, TurnReply
from runner import App, keyring
from runner.home import Home
from runner.wire import record
from runner.wire.keys import Keys
from runner.wire.view import NodeView
from tests.support.valkey import Valkey
from tests.support.wait import await_until

#: facts, the state that `nodes` shows, whether jobs are claimed
STATES = {
    "starting": (NodeFacts(phase="starting"), False),
    "stopping": (NodeFacts(phase="stopping"), False),
    "ready": (NodeFacts(), True),
    "draining": (NodeFacts(operator="draining"), False),
    "drained": (NodeFacts(operator="drained"), False),
    "degraded(recorder)": (NodeFacts(record=False), False),
    "degraded(disk)": (NodeFacts(disk=False), False),
    "degraded(broker)": (NodeFacts(broker=False), True),
    "degraded(store)": (NodeFacts(store=False, lease=False), False),
    "unhealthy": (NodeFacts(unproved=True), False),
}


class Counting:
    """A store that notes for how many slots each turn claims."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def turn(self, turn: Turn) -> TurnReply:
        self.asked.append(len(turn.free))
        return TurnReply((), (), ())


class Idle:
    """A crew without work."""

    def held(self) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("name", STATES)
def test_k7_a_state_is_shown_and_enforced_at_the_claim(name: str) -> None:
    """Who looks sees this state, and the dispatcher claims in it or does not; it does again once the node is ready."""
    facts, claims = STATES[name]
    assert state_of(facts).name == name

    async def main() -> None:
        store, now = Counting(), facts
        dispatcher = Dispatcher(store, 2, lambda: ("agents",), lambda: None, lambda: state_of(now).claims)
        dispatcher.serve(Idle())  # type: ignore[arg-type] # no claim reaches it
        loop = asyncio.create_task(dispatcher.run())
        dispatcher.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert store.asked == ([2] if claims else [])
        now = NodeFacts()
        dispatcher.wake()
        await await_until(lambda: bool(store.asked), "the node to claim once it is ready")
        assert set(store.asked) == {2}
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    asyncio.run(main())


def test_k7_no_good_fact_hides_a_bad_one() -> None:
    """Whatever else is true, each fact that stops claims stops them, and the node is not shown as ready."""
    stops = {"operator": "draining", "phase": "starting", "lease": False, "unproved": True, "record": False}
    stops["disk"] = False
    for first, second in itertools.combinations(stops, 2):
        found = state_of(replace(NodeFacts(), **{first: stops[first], second: stops[second]}))  # type: ignore[arg-type]  # real names
        assert not found.claims, (first, second)
        assert found.name != "ready"
    for one, value in stops.items():
        assert not state_of(replace(NodeFacts(), **{one: value})).claims, one  # type: ignore[arg-type]  # as above


def test_k7_a_store_that_missed_a_heartbeat_is_shown_while_the_lease_stands() -> None:
    """Until the lease lapses a turn that the store answers is valid: claimed, and shown as degraded all the same."""
    found = state_of(NodeFacts(store=False))
    assert (found.name, found.claims) == ("degraded(store)", True)


def test_k7_a_node_whose_lease_has_run_out_is_lost(home: object, valkey: Valkey) -> None:
    """Others say it: a record without a lease is shown as lost, whatever it says of itself."""
    assert home is not None
    place = Home(home)  # type: ignore[arg-type] # the fixture's Path
    keyring.init(place, redis_url=valkey.url)
    keys = Keys()
    client: redis.Redis = valkey.client()
    view = NodeView("n1", "h", 1, "b" * 12, "ready", "B", 1, 0, ("*",), {}, "2030-01-01T00:00:00Z", "ok")
    client.hset(keys.nodes(), "n1", record.dumps(view).decode())
    with App(home=place.path) as app:
        assert [node.state for node in app.nodes()] == ["lost"]
        seconds, _ = client.time()
        client.zadd(keys.leases(), {f"n1/{'b' * 12}": (seconds + 60) * 1000})
        assert [node.state for node in app.nodes()] == ["ready"]
        client.zadd(keys.leases(), {f"n1/{'b' * 12}": (seconds - 60) * 1000})
        assert [node.state for node in app.nodes()] == ["lost"]
    client.close()
