"""Every key has a TTL or an owner, and all of them move below one hash tag."""

from __future__ import annotations

import calendar
from collections.abc import Callable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, cast

import redis
from hypothesis import given
from hypothesis import strategies as st
from rq.utils import utcformat

from runner.scripts import loader
from runner.wire import keys
from runner.wire.keys import Keys
from runner.wire.states import State
from tests.store.desk import Agent, Desk
from tests.support.valkey import Valkey

DAY_S = 86_400
WEEK_S = 7 * DAY_S
FAR_S = 31 * DAY_S

# What a busy fleet leaves: pattern -> (least, most) seconds to live; None = an owner, named in wire/keys.py.
LIVES: dict[str, tuple[int, int] | None] = {
    "rf:act:*": (WEEK_S, 2 * WEEK_S + 60),
    "rf:cut": (8 * DAY_S - 60, 8 * DAY_S),
    "rf:named:*": (8 * DAY_S - 60, 8 * DAY_S),
    "rf:ev:*": (30 * DAY_S - 60, 30 * DAY_S),
    "rf:tomb:*": (1, 900),
    "rf:wake:*": (1, 60),
    "rq:execution:*": (30 * DAY_S, FAR_S),
    "rq:executions:*": (30 * DAY_S, FAR_S),
    "rq:results:*": (WEEK_S - 60, WEEK_S),
    "rq:worker:*": (400, 480),
    "rq:queues": None,
    "rq:queue:*": None,
    "rq:workers": None,
    "rq:workers:*": None,
    "rq:wip:*": None,
    "rq:finished:*": None,
    "rq:failed:*": None,
    "rq:canceled:*": None,
    **dict.fromkeys(keys.PERMANENT),
}


def live(desk: Desk, agent: Agent) -> dict[str, str]:
    """Leave one job in each state; return id -> state."""
    jobs = {}
    for state, started in ((State.FINISHED, True), (State.FAILED, True), (State.KILLED, True), (State.KILLED, False)):
        job = desk.enqueue()
        claim = agent.claim()
        if started:
            agent.start(claim)
        agent.finish(claim, state=state, started=started, return_value=b"1")
        jobs[job] = "ended"
    jobs[desk.enqueue(lane="other")] = "waiting"
    running = desk.enqueue()
    agent.start(agent.claim())
    jobs[running] = "running"
    desk.kill(running)
    removed = desk.enqueue(lane="other")
    desk.kill(removed)
    jobs[removed] = "killing"
    desk.cut("tag:x=y")
    return jobs


def test_every_key_has_a_life(agent: Agent, desk: Desk) -> None:
    """Each key that a busy fleet leaves is in the table, with a TTL inside its bounds or with an owner."""
    jobs = live(desk, agent)
    bad = []
    for raw in cast("list[bytes]", desk.redis.keys("*")):
        key, ttl = raw.decode(), int(str(desk.redis.ttl(raw)))
        if key.startswith("rq:job:"):
            state = jobs[key.removeprefix("rq:job:")]
            bounds = {"ended": (WEEK_S - 60, WEEK_S), "killing": (1, 900)}.get(state)
        else:
            found = [life for pattern, life in LIVES.items() if fnmatchcase(key, pattern)]
            if not found:
                bad.append(f"{key} is not in the table")
                continue
            bounds = found[0]
        if (bounds is None) != (ttl == -1) or (bounds is not None and not bounds[0] <= ttl <= bounds[1]):
            bad.append(f"{key}: {ttl} s, expected {bounds}")
    assert bad == []


def test_keys_move_below_one_hash_tag(agents: Callable[..., Agent], valkey: Valkey) -> None:
    """With tagged prefixes every key that the scripts touch carries the tag, as a cluster needs."""
    tagged = Keys.tagged("rf")
    with Desk(valkey, tagged) as desk:
        agent = agents(keys=tagged)
        agent.register()
        live(desk, agent)
        agent.recover()
        agent.run(agent.store.sweep(("agents",)))
        found = cast("list[bytes]", desk.redis.keys("*"))
        assert [key for key in found if not key.startswith((b"{rf}rq:", b"{rf}rf:"))] == []
        assert len(found) > 20
        desk.redis.flushall()


def test_scripts_are_known_by_their_hash(desk: Desk) -> None:
    """Each script compiles, and the server knows it by the SHA-1 that the loader gives."""
    for name in loader.NAMES:
        script = loader.load(name)
        assert desk.redis.script_load(script.text) == script.sha


@given(st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31)))
def test_scripts_write_times_as_rq_does(valkey_keeper: redis.Redis, moment: datetime) -> None:
    """The calendar of the scripts is Python's, leap years and centuries included."""
    text = loader.load("turn").text
    function = text[text.index("local function iso") : text.index("local NOW_ISO")]
    moment = moment.replace(tzinfo=UTC)
    asked = [str(calendar.timegm(moment.timetuple())), str(moment.microsecond)]
    found: Any = valkey_keeper.eval(f"{function} return iso(tonumber(ARGV[1]), tonumber(ARGV[2]))", 0, *asked)
    assert found.decode() == utcformat(moment)


def test_each_script_says_what_it_needs() -> None:
    """Each script opens with its keys, arguments, reply and the race it closes (style rule 17)."""
    for name in loader.NAMES:
        own = loader.load(name).text.partition("\n-- RACE")
        assert all(word in own[0] for word in ("\n-- KEYS", "\n-- ARGV", "\n-- REPLY")), name
        assert own[1], name
