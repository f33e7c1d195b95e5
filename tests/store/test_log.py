"""log.lua: output is stored in order, once, and only for the attempt that holds the job."""

from __future__ import annotations

from typing import cast

from node_agent.output import Chunk
from runner.wire.states import State
from tests.store.desk import KEYS, Agent, Desk

FIRST = (Chunk(1, 0, b"one\n"), Chunk(2, 4, b"two\n"))
CUT = (Chunk(0, 8, b"", 100), Chunk(1, 108, b"tail\n"))


def stored(desk: Desk, job: str) -> list[bytes]:
    """Return the data of a job's log entries, a cut as its size."""
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", desk.redis.xrange(KEYS.log(job)))
    return [fields.get(b"skipped", fields[b"d"]) for _, fields in entries]


def test_output_is_stored_in_order_and_a_repeated_call_adds_nothing(agent: Agent, desk: Desk) -> None:
    """An answer that got lost leads to no line twice; later output follows, and the log goes away in the end."""
    job = desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    for chunks in (FIRST, FIRST, CUT, CUT):
        assert agent.run(agent.store.log(claim, chunks))
    assert stored(desk, job) == [b"one\n", b"two\n", b"100", b"tail\n"]
    assert desk.redis.ttl(KEYS.log(job)) > 0


def test_the_next_attempt_starts_anew_and_the_last_one_adds_nothing(agent: Agent, desk: Desk) -> None:
    """Offsets of another attempt are its own; an attempt that is over can't write behind its successor."""
    job = desk.enqueue(retries=1)
    old = agent.claim()
    agent.run(agent.store.log(old, FIRST))
    agent.finish(old, kind="retry", state=State.FAILED)
    new = agent.claim()
    assert agent.run(agent.store.log(new, FIRST[:1]))
    assert not agent.run(agent.store.log(old, CUT))
    assert stored(desk, job) == [b"one\n", b"two\n", b"one\n"]


def test_a_key_of_another_type_is_replaced(agent: Agent, desk: Desk) -> None:
    """Whoever writes the store can't stop a node's output with a wrong type."""
    job = desk.enqueue()
    claim = agent.claim()
    desk.redis.set(KEYS.log(job), "x")
    assert agent.run(agent.store.log(claim, FIRST))
    assert stored(desk, job) == [b"one\n", b"two\n"]
