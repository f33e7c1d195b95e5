"""Attacks by whoever writes the store: counters set back, words used twice, keys of another type, huge ones."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from node_agent.dependencies import Dependencies
from node_agent.kernel import approvals, budgets, quotas
from node_agent.kernel.anchors import Anchors
from node_agent.kernel.bell import Bell
from node_agent.kernel.endwatch import EndWatch
from node_agent.kernel.errors import CallError
from node_agent.kernel.family import Family
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.vfs.index import Change, Store, Where
from node_agent.kernel.vfs.nodes import Bounds
from node_agent.policycalls import Quota
from node_agent.records import Notary, Signed
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.calls import ErrorCode
from runner.wire.envelope import Domain
from runner.wire.event import Event
from runner.wire.flight import FlightHead
from runner.wire.flow import Budget
from runner.wire.keys import Keys
from tests.agent import build
from tests.kernel import ledger, rig
from tests.kernel.ledger import KEYS, Node, decision, looks, node, run, say, until
from tests.kernel.test_approval import ASK, call, refused
from tests.kernel.test_budget import frozen, started, told
from tests.support.valkey import Valkey

MAX_ID = "18446744073709551615-18446744073709551615"
BUDGET = KEYS.budget("main", "k")


def raw(on: Node) -> Any:  # noqa: ANN401 - redis leaves open which of its calls are awaited
    """The store's client, without its types."""
    return on.redis


def test_a_budget_that_a_node_comes_back_to_is_charged_from_the_first_batch(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that forgot a budget begins no numbers anew that the store has seen: else its charges were dropped."""
    monkeypatch.setattr(budgets, "_LATE_S", -1.0)

    async def main() -> None:
        async with node(valkey) as on:
            first = await started(on, ledger.job_of(Budget("k", requests=100)))
            await looks(on, first)
            on.budgets.ended(first.run, None)
            await until(lambda: not on.budgets._accounts, "the budget forgotten")
            second = await started(on, ledger.job_of(Budget("k", requests=100)))
            on.budgets.metered(told(second.attempt, requests=7))
            await looks(on, second)
            assert float(await raw(on).hget(BUDGET, "requests")) == 7

    run(main())


def test_a_budget_is_kept_as_long_as_its_last_job_wanted(valkey: Valkey) -> None:
    """Late reports of an attempt that is over do not make its budget live for the default time."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=100, ttl_s=3600)))
            account, _ = on.budgets._by_attempt[who.attempt]
            on.budgets.ended(who.run, None)
            seen = account.batch
            await until(lambda: account.batch > seen + 1, "two looks")
            assert 0 < await raw(on).ttl(BUDGET) <= 3600

    run(main())


@pytest.mark.parametrize("attack", ["zero", "gone", "batch", "other type", "negative"])
def test_a_counter_that_is_set_back_gives_a_job_nothing(valkey: Valkey, attack: str) -> None:
    """Whoever writes the store sets a budget's counter back: the node's jobs have used what they have used."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=10)))
            on.budgets.metered(told(who.attempt, requests=9))
            await looks(on, who)
            store = raw(on)
            if attack == "zero":
                await store.hset(BUDGET, "requests", "0")
            elif attack == "gone":
                await store.delete(BUDGET)
            elif attack == "batch":
                await store.hset(BUDGET, f"b:{on.name}/boot-{on.name}", "9007199254740990")
            elif attack == "negative":
                await store.hset(BUDGET, "requests", "-1e300")
            else:
                await store.set(BUDGET, "x")
            await looks(on, who)
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")

    run(main())


def test_a_budget_that_somebody_blows_up_is_not_read_and_counts_as_used_up(valkey: Valkey) -> None:
    """Thousands of fields, or one of megabytes: the node reads neither, and spends nothing that it can't tell."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=10)))
            await raw(on).hset(BUDGET, "w:x", b"x" * (8 << 20))
            script = {"op": "charge", "from": "n/b", "batch": 1, "used": {}, "ttl": 60_000}
            calls, places = StoreCalls(on.redis, KEYS), (BUDGET, KEYS.asks("main"))
            assert sum(len(cast("bytes", part)) for part in await calls.run("budget", places, script)) < 1000
            assert not frozen(who)
            await raw(on).hset(BUDGET, mapping={f"x{number}": "1" for number in range(5000)})
            await until(lambda: frozen(who), "frozen")
            assert await calls.run("budget", places, script | {"batch": 2}) == [b"!", b""]

    run(main())


def test_a_poisoned_number_of_words_keeps_no_operator_from_deciding(valkey: Valkey) -> None:
    """The count of a budget's words is no number: a decision is written down all the same."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")
            await raw(on).hset(BUDGET, "#", "many")
            await say(on, decision("approve", budget="k", add={"requests": 5}))
            await until(lambda: not frozen(who), "goes on")

    run(main())


def test_a_no_that_is_taken_out_of_the_store_stays_one(valkey: Valkey) -> None:
    """Whoever writes the store takes an operator's no away: jobs that start later die of it all the same."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")
            no = decision("deny", budget="k")
            await say(on, no)
            await until(lambda: bool(who.run.orders), "killed")
            await raw(on).hdel(BUDGET, f"w:{no.id}")
            await looks(on, who)
            late = on.caller(ledger.job_of(Budget("k", requests=1)))
            await asyncio.wait_for(on.budgets.begin(late.run), 5)
            assert late.run.orders

    run(main())


def test_places_that_never_lapse_are_nobody_s(valkey: Valkey) -> None:
    """A quota full of uses that lie ahead, without an end of its own: they go, and the next call finds room."""

    async def main() -> None:
        async with node(valkey) as on:
            (key,) = [on.quotas._calls.keys.quota("main", quotas._digest("x"))]
            await raw(on).zadd(key, {"a": "inf", "b": 9e15})
            for period_s in (60.0, 0.0):
                (await on.quotas.take("main", "j.1", [Quota("x", 2, period_s)]))()
            await raw(on).zadd(key, {f"c{number}": time.time() * 1000 for number in range(3)})
            await raw(on).persist(key)
            with pytest.raises(CallError):
                await on.quotas.take("main", "j.1", [Quota("x", 2, 60.0)])
            assert await raw(on).ttl(key) > 0

    run(main())


def test_one_word_lets_one_call_through_though_the_store_forgets_it(valkey: Valkey) -> None:
    """The mark that an approval was used is taken out of the store: this node knows better."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.05) as on:
            who = on.caller(tools=("deploy",))
            assert (await refused(on, who)).error is ErrorCode.PENDING
            ask, _ = await ledger.question(on, who.job)
            await say(on, decision("approve", job=who.job, ask=ask))
            key = KEYS.ask(who.job)
            before = await raw(on).hgetall(key)
            await call(on, who)
            await raw(on).hset(key, mapping=before)
            await raw(on).hdel(key, f"u:{ask}", f"n:{ask.partition('.')[0]}")
            assert (await refused(on, who)).error is ErrorCode.CONFLICT

    run(main())


def test_what_is_left_of_a_lost_key_has_an_end(valkey: Valkey) -> None:
    """An answer used up, a transfer dropped, a letter taken after their keys were lost: nothing stays for ever."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        calls = StoreCalls(store, KEYS)
        job = ids.new_job_id("main")
        places = (KEYS.ask(job), KEYS.asks("main"))
        await calls.run("ask", places, {"op": "use", "base": "b", "era": 0, "job": job})
        assert await store.ttl(KEYS.ask(job)) > 0
        bounds = {"gen": "ab", "pieces": 3, "most": 100, "ttl": 60}
        await calls.run("artifact", (KEYS.artifacts(job),), {"op": "drop", **bounds})
        assert not await store.exists(KEYS.artifacts(job))
        box = [form("main", "desk") for form in (KEYS.mail, KEYS.box, KEYS.dead)]
        head = {"tenant": "main", "box": "desk", "topic": False, "group": "mail", "node": "n1"}
        far = 9_000_000_000_000
        send = {"sig": "s", "until": far, "size": 1, "corr": "c", "confirm": False, "most": 9, "most_bytes": 99}
        await calls.run("mail", box, {**head, "op": "send", **send}, b"x")
        await store.delete(KEYS.box("main", "desk"))
        await calls.run("mail", box, {**head, "op": "take", "corr": "c", "most": 9, "wait": False})
        assert await store.ttl(KEYS.box("main", "desk")) != -1
        await store.aclose()

    run(main())


def test_a_letter_of_megabytes_reaches_no_node(valkey: Valkey) -> None:
    """It is put away in the store, and the next letter is given out."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        calls = StoreCalls(store, KEYS)
        box = [form("main", "desk") for form in (KEYS.mail, KEYS.box, KEYS.dead)]
        far = "9000000000000"
        await store.xadd(box[0], {"letter": b"x" * (4 << 20), "sig": "s", "until": far, "corr": "c"})
        await store.xadd(box[0], {"letter": b"small", "sig": "s", "until": far})
        await store.expire(box[0], 60)
        head = {"tenant": "main", "box": "desk", "topic": False, "group": "mail", "node": "n1"}
        more = {"count": 16, "bytes": 20480, "hold_ms": 60_000, "most_times": 5, "wait": False}
        assert await calls.run("mail", box, {**head, "op": "take", "corr": "c", "most": 9, "wait": False}) == [b"none"]
        reply = await calls.run("mail", box, {**head, "op": "receive", **more})
        assert [cast("list[object]", row)[1] for row in reply[2:]] == [b"small"]
        assert sum(len(fields[b"letter"]) for _, fields in await store.xrange(box[2])) == 0
        await store.aclose()

    run(main())


def test_a_tree_that_somebody_blows_up_is_not_read(valkey: Valkey) -> None:
    """An index of too many entries and a file of too many bytes: the node hears that they are there, no more."""

    async def main() -> None:
        client: Any = Redis(unix_socket_path=str(valkey.socket))
        store = Store(client, KEYS)
        job = ids.new_job_id("main")
        bounds = Bounds(1 << 16, 1 << 12, 16, 1 << 20)
        where = Where(KEYS.state(job), KEYS.state_data(job), "main", 600, bounds)
        await store.change(where, [Change("put", ("a",), data=b"1")])
        assert await store.content(where, ("a",)) == b"1"
        await client.hset(KEYS.state_data(job), "/a", b"x" * (1 << 20))
        with pytest.raises(CallError) as caught:
            await store.content(where, ("a",))
        assert caught.value.error is ErrorCode.TOO_LARGE
        entry = await client.hget(KEYS.state(job), "/a")
        await client.hset(KEYS.state(job), mapping={f"/b{number}": entry for number in range(2000)})
        with pytest.raises(CallError) as caught:
            await store.load(where, 0)
        assert caught.value.error is ErrorCode.TOO_LARGE
        await client.aclose()

    run(main())


def test_names_that_no_job_can_write_are_no_files(valkey: Valkey) -> None:
    """Whoever writes the store puts paths there that are none: the others are shown, and the volume works."""

    async def main() -> None:
        client: Any = Redis(unix_socket_path=str(valkey.socket))
        store = Store(client, KEYS)
        job = ids.new_job_id("main")
        where = Where(KEYS.state(job), KEYS.state_data(job), "main", 600, Bounds(1 << 16, 1 << 12, 64, 1 << 20))
        await store.change(where, [Change("put", ("a",), data=b"1")])
        entry = await client.hget(KEYS.state(job), "/a")
        bad = ("/", "//", "/a//b", "/..", "/./x", "/x/../y", "/n\x00", "/n\n", "/" + "x" * 256, "/x" * 17, "/a/")
        await client.hset(KEYS.state(job), mapping=dict.fromkeys((*bad, "/...", "/.b", "/c d"), entry))
        loaded = await store.load(where, 0)
        assert loaded is not None
        assert set(loaded.entries()) == {("a",), ("...",), (".b",), ("c d",)}
        for version in ("9007199254740991", "9" * 400, "-1", "x"):
            await client.hset(KEYS.state(job), ".version", version)
            done = await store.change(where, [Change("put", ("v",), data=b"1")])
            assert 0 < done.version < 2**45
            await store.change(where, [Change("del", ("v",), done.version)])
        await client.aclose()

    run(main())


def test_a_job_s_key_of_another_type_holds_up_no_other_wait(valkey: Valkey) -> None:
    """All waits for ends are one look: what is wrong with one job's key is told to who waits for that one."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        bad, huge, good = (ids.new_job_id("main") for _ in range(3))
        await store.set(KEYS.job(bad), "x", ex=60)
        await store.hset(KEYS.job(huge), "rf_state", b"x" * (1 << 20))
        await store.expire(KEYS.job(huge), 60)
        await store.hset(KEYS.job(good), "rf_state", "running")
        await store.expire(KEYS.job(good), 60)
        watch = EndWatch(store, KEYS)
        waits = [asyncio.create_task(watch.ended(job)) for job in (bad, huge, good)]
        await asyncio.wait_for(asyncio.gather(*waits[:2]), 2)
        assert not waits[2].done()
        await store.hset(KEYS.job(good), "rf_state", "finished")
        await asyncio.wait_for(waits[2], 2)
        await watch.stop()
        ends = Dependencies(store, KEYS, {}, "f" * 64)
        assert isinstance(await ends.end_of(bad, "main"), str)
        assert await ends.known(bad, "main") is None
        await store.aclose()

    run(main())


def test_attack_04_a_child_below_a_poisoned_job_is_left_alone_and_holds_no_slot(valkey: Valkey) -> None:
    """The key of the job above has another type: nobody can tell that it was not killed, and nobody waits for it."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        above = ids.new_job_id("main")
        await store.set(KEYS.job(above), "x", ex=60)
        family = Family(rig.around(store))
        spec = build.job(ancestors=(above,))
        assert await asyncio.wait_for(family.killed_above(spec, lambda: False), 2) == above
        await store.aclose()

    run(main())


def test_a_bell_that_was_made_deaf_rings_again(valkey: Valkey) -> None:
    """Its key has another type, or no ids left: who rings makes it anew, and the node hears it."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        heard: list[bytes] = []
        bell = Bell(store, KEYS, "n1")
        bell.on("signal", lambda ring: heard.append(ring["word"]))
        await store.xadd(KEYS.bell("n1"), {"kind": "x"}, id=MAX_ID)
        await store.xdel(KEYS.bell("n1"), MAX_ID)
        await store.expire(KEYS.bell("n1"), 60)
        bell.start()
        await bell.ring("n1", "signal", b"one", "s")
        await until(lambda: heard == [b"one"], "the first ring")
        await bell.ring("n2", "signal", b"x", "s")
        await store.set(KEYS.bell("n2"), "x", ex=60)
        await bell.ring("n2", "signal", b"two", "s")
        assert await store.xlen(KEYS.bell("n2")) == 1
        await bell.stop()
        await store.aclose()

    run(main())


def test_what_is_left_out_of_a_question_is_said() -> None:
    """A name that is too long to be shown ends with how much of it is not: it may be what matters."""
    assert approvals._short("a" * 512) == "a" * 512
    shown = approvals._short("a" * 513)
    assert shown.endswith("… and 41 characters more")
    assert len(approvals._short("a" * 100_000)) <= 512


class _Stand:
    """Anchors of node n1, and what the node says of them."""

    def __init__(self, folder: Path, store: Redis) -> None:
        self.signer = Signer(bytes(range(32)))
        self.recorder = Recorder(folder, node="n1", signer=self.signer, fleet=None, reserve_bytes=0)
        self.told: list[str] = []
        self.anchors = Anchors(self.recorder, store, Keys(), Notary(self.signer, "n1", "b00t", "B"), self._emit)

    def _emit(self, tenant: str | None, event: Signed) -> None:
        self.told.append(str(record.loads(Event, event.payload).detail["what"]))


def test_attack_31_anchors_that_the_store_takes_no_more_are_told(tmp_path: Path, valkey: Valkey) -> None:
    """Who may add to the stream uses its ids up, or makes it another type: the node says so, once."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        stand = _Stand(tmp_path / "flight", store)
        await store.xadd(KEYS.anchor("n1"), {"head": "x"}, id=MAX_ID)
        for _ in range(2):
            stand.recorder.note("call")
            assert not await stand.anchors.anchor()
        assert len(stand.told) == 1
        assert "takes no anchor" in stand.told[0]
        await store.delete(KEYS.anchor("n1"))
        stand.recorder.note("call")
        assert await stand.anchors.anchor()
        stand.recorder.close()
        await store.aclose()

    run(main())


def test_attack_31_a_start_believes_its_own_anchors_alone_and_looks_behind_others(
    tmp_path: Path, valkey: Valkey
) -> None:
    """A forged head of a later line is no alarm, and junk after the true ones hides no rollback."""

    async def main() -> None:
        store: Any = Redis(unix_socket_path=str(valkey.socket))
        stand = _Stand(tmp_path / "flight", store)
        key, stranger = KEYS.anchor("n1"), build.signer()
        digest = hashlib.sha256(b"").hexdigest()
        forged = record.dumps(FlightHead("n1", "b00t", 10**12, digest, 1))
        await store.xadd(key, {"head": forged, "sig": signed(stranger, forged)})
        await stand.anchors.compare()
        assert stand.told == []
        true = record.dumps(FlightHead("n1", "b00t", 1000, digest, 1))
        await store.xadd(key, {"head": true, "sig": signed(stand.signer, true)})
        for _ in range(100):
            await store.xadd(key, {"head": "junk"})
        await stand.anchors.compare()
        assert "line 1000 was anchored" in stand.told[0]
        stand.recorder.close()
        await store.aclose()

    run(main())


def signed(signer: Signer, payload: bytes) -> str:
    """A head's signature."""
    return signer.sign(Domain.HEAD, payload)
