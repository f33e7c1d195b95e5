"""A job that wants to go on although others have stopped it, and one that takes what belongs to its neighbours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from node_agent.containment import glance
from node_agent.kernel import rooms
from node_agent.kernel.errors import CallError
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.rooms import Rooms
from node_agent.kernel.signals import BURST, HOLDS_BURST
from node_agent.kernel.toolrun import ToolDesk
from node_agent.run import now_ms
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.flow import Budget
from runner.wire.keys import Keys
from runner.wire.signals import Signal, SignalName
from tests.agent import build
from tests.kernel import ledger, rig
from tests.kernel import test_signals as signals
from tests.kernel.ledger import decision, node, put, say, until
from tests.kernel.post import Fleet, fleet
from tests.kernel.test_budget import frozen, started, told
from tests.kernel.test_recorder import flood
from tests.support.valkey import Valkey
from tests.support.wait import await_until, wait_until

KEYS = Keys()


def full(recorder: object) -> None:
    """From now on the jobs have no room in the record."""
    cast("rig.FakeRecorder", recorder).full = True


def test_a_job_that_filled_its_room_in_the_record_is_stopped_all_the_same(valkey: Valkey) -> None:
    """LOOP and an operator's signals, and the STOP of who watches it, act on a job that may record nothing more."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            here = nodes["n1"]
            who, tree = signals.start(here)
            guard, _ = signals.start(here, watch=("all",))
            full(here.around.recorder)
            for name in ("LOOP", "DRIFT", "BUDGET"):
                assert await signals.operator(here, who, name) == "applied"
            assert await signals.outcome(here, guard, "STOP", job=who.job) == "applied"
            assert set(tree.done) == {"freeze"}
            kinds = [kind for kind, _, _ in cast("rig.FakeRecorder", here.around.recorder).lines]
            assert kinds == ["signal"] * 4

    asyncio.run(main())


def test_a_budget_that_is_hit_is_told_although_the_job_may_record_nothing_more(valkey: Valkey) -> None:
    """The job stands still, the event comes, and so does the answer to the word."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            full(on.recorder)
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who) and "budget.hit" in on.types(), "held, and told")
            await say(on, decision("approve", budget="k"))
            await until(lambda: not frozen(who) and "budget.answered" in on.types(), "let go on, and told")

    asyncio.run(main())


def test_a_line_about_a_job_needs_no_room_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do to a job is written when its own calls have no room any more."""
    monkeypatch.setattr(rooms, "ATTEMPT_BYTES", 2048)
    record = Recorder(tmp_path / "flight", node="n1", signer=build.signer(), fleet=None, reserve_bytes=0)
    name = f"{ids.new_job_id('main')}.1"
    monkeypatch.setattr("tests.kernel.test_recorder.JOB", name)
    with pytest.raises(CallError) as caught:
        flood(record, {"op": "file.put"}, 50)
    assert caught.value.error is ErrorCode.SLOW_DOWN
    lines = record.count
    record.about("signal", name, signal="STOP")
    assert record.count == lines + 1
    record.close()


def test_attack_32_many_jobs_of_one_tenant_fill_their_tenant_s_room_alone() -> None:
    """Each attempt of a flood is new; together they have a share, which comes back slowly; neighbours have theirs."""
    now = [1e9]
    held = Rooms(lambda: now[0])
    step, number = 1 << 20, 0
    while not (why := held.take(f"bad-{number // 16}.1", step)):
        number += 1
        held.forget(f"bad-{number // 16 - 1}.1")
    assert (number * step, why) == (rooms.TENANT_BYTES, "the jobs of this tenant have")
    assert held.take("bad-new.1", step)
    assert not held.take("main-new.1", step)
    now[0] += step / rooms.TENANT_BYTES_PER_S
    assert not held.take("bad-new.1", step)
    assert held.take("bad-new.1", step)
    for number in range(3000):
        held.take(f"t{number}-a.1", 1)
    assert held.take("bad-new.1", step), "a full room is not forgotten for those that are empty"


def test_a_job_that_lets_itself_go_on_all_the_time_can_be_stopped(valkey: Valkey) -> None:
    """Its own CONTs use up its own rate, not that of the service job that watches it."""

    async def main() -> None:
        async with fleet(valkey, "n1", clock=lambda: 0.0) as nodes:
            here = nodes["n1"]
            who, tree = signals.start(here)
            guard, _ = signals.start(here, watch=("all",))
            found = [await signals.outcome(here, who, "CONT") for _ in range(int(HOLDS_BURST) + 1)]
            assert found[-1] == "refused"
            assert await signals.outcome(here, guard, "STOP", job=who.job) == "applied"
            assert tree.done[-1] == "freeze"

    asyncio.run(main())


def test_a_node_that_floods_with_signals_is_held_to_what_a_job_may_send(valkey: Valkey) -> None:
    """The node of the sender is not the one that bounds it alone: more than a job's burst is not carried out."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", known=known, clock=lambda: 0.0) as nodes:
            here, bad = nodes["n1"], nodes["n2"]
            guard, _ = signals.start(bad, watch=("all",))
            who, tree = signals.start(here)
            known.jobs |= {guard.job: guard.spec, who.job: who.spec}
            for _ in range(int(BURST) + 20):
                word = Signal(ids.new_nonce(), "main", SignalName.USR1, who.job, guard.job, 1, "n2", now_ms())
                await bad.bell.ring("n1", "signal", *bad.seals.seal(word))
            road = here.signals._road
            await await_until(lambda: len(road._known) == BURST + 20 and not road._tasks, "all of them")
            assert len(tree.done) == BURST

    asyncio.run(main())


def test_a_neighbour_takes_no_tool_slot_that_another_call_waits_for() -> None:
    """A slot goes to who waits longest, also if somebody asks in the very moment in which it comes free."""

    async def main() -> None:
        desk = ToolDesk(rig.around())
        slot = cast("Any", object())
        waits = asyncio.create_task(desk._slot())
        await asyncio.sleep(0)
        later = asyncio.create_task(desk._slot())
        desk._give_back(slot)
        assert await asyncio.wait_for(waits, 5) is slot
        assert not later.done()
        # Given up in the moment in which it was handed over: the next one has it.
        third = asyncio.create_task(desk._slot())
        await asyncio.sleep(0)
        desk._give_back(slot)
        later.cancel()
        assert await asyncio.wait_for(third, 5) is slot
        desk._give_back(slot)
        assert desk._free == [slot]
        assert not desk._waiting

    asyncio.run(main())


def test_a_tool_call_that_waited_too_long_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over: it is told so, and the slot that comes free goes to the next."""
    monkeypatch.setattr("node_agent.kernel.toolrun.QUEUE_S", 0.01)

    async def main() -> None:
        desk = ToolDesk(rig.around())
        with pytest.raises(CallError) as caught:
            await desk._slot()
        assert caught.value.error is ErrorCode.TIMEOUT
        desk._give_back(cast("Any", slot := object()))
        assert await desk._slot() is slot

    asyncio.run(main())


def test_a_short_budget_does_not_shorten_the_others(valkey: Valkey) -> None:
    """A key is kept as long as the job wants it that wants it longest, and not for ever what somebody made immortal."""

    async def main() -> None:
        async with node(valkey) as on:
            store: Any = on.redis
            await started(on, ledger.job_of(Budget("k", calls=9, ttl_s=86_400)))
            last = await started(on, ledger.job_of(Budget("k", calls=9, ttl_s=60)))
            account, _ = on.budgets._by_attempt[last.attempt]
            on.budgets.ended(next(m.run for m in account.members.values() if m.attempt != last.attempt), None)
            await ledger.looks(on, last)
            assert account.ttl_s == 60
            assert await store.pttl(KEYS.budget("main", "k")) > 86_000_000
            await store.pexpire(KEYS.budget("main", "k"), 10**13)
            await ledger.looks(on, last)
            assert await store.pttl(KEYS.budget("main", "k")) <= 60_000

    asyncio.run(main())


def test_a_job_that_joins_a_budget_is_no_news_of_old_words(valkey: Valkey) -> None:
    """A word is answered for the jobs that were here when it came, and for nobody once its command has run out."""

    async def main() -> None:
        async with node(valkey) as on, node(valkey, "n2", operator=on.operator) as other:
            first = await started(on, ledger.job_of(Budget("k", calls=9)))
            await say(on, decision("approve", budget="k"))
            await until(lambda: len(on.receipts) == 1, "the answer")
            second = await started(on, ledger.job_of(Budget("k", calls=9)))
            await ledger.looks(on, second)
            assert [receipt.job for receipt in on.receipts] == [first.job]
            word = decision("approve", budget="k")
            object.__setattr__(word, "expires_at_ms", now_ms() - 1)
            await put(on, KEYS.budget("main", "k"), f"w:{word.id}", ledger.worded(word, on.operator))
            third = await started(other, ledger.job_of(Budget("k", calls=9)))
            await ledger.looks(other, third)
            account, _ = other.budgets._by_attempt[third.attempt]
            assert len(account.words) == 2
            assert len(other.receipts) == 1
            assert account.unanswered == {}

    asyncio.run(main())


def test_long_fields_of_a_job_are_not_even_fetched(valkey: Valkey) -> None:
    """A tenant that writes megabytes where its job's node stands has them looked at by nobody."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", known=known) as nodes:
            here, store = nodes["n1"], cast("Any", Redis(unix_socket_path=str(valkey.socket)))
            guard, _ = signals.start(here, watch=("all",))
            who = rig.caller()
            known.jobs |= {one.job: one.spec for one in (guard, who)}
            await store.hset(KEYS.job(who.job), mapping={"rf_state": "running", "rf_claim": b"n2/" + b"x" * (4 << 20)})
            await store.expire(KEYS.job(who.job), 60)
            before = (await store.info("stats"))["total_net_output_bytes"]
            assert await signals.outcome(here, guard, "USR1", job=who.job) == "refused"
            assert (await store.info("stats"))["total_net_output_bytes"] - before < 1 << 20
            await store.aclose()

    asyncio.run(main())


#: A thread that makes 40 children, of which the last one computes.
_HIDES = """
import os, threading, time
def more():
    for number in range(40):
        if os.fork() == 0:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                if number < 39: time.sleep(20)
            os._exit(0)
    time.sleep(20)
threading.Thread(target=more).start()
time.sleep(20)
"""


def test_cpu_seconds_hide_neither_behind_a_thread_nor_behind_many_processes() -> None:
    """Without a cgroup every process counts, whoever of its parent's threads made it."""
    process = subprocess.Popen([sys.executable, "-c", _HIDES])
    try:
        wait_until(lambda: glance.below(process.pid).processes == 40, "all children")
        wait_until(lambda: glance.cpu_s_below(process.pid) > 0.5, "the CPU time of the last one")
    finally:
        for pid in (*glance._descendants(process.pid), process.pid):
            os.kill(pid, 9)
        process.wait()


def test_attack_41_a_look_at_many_processes_is_followed_by_a_rest(valkey: Valkey) -> None:
    """What takes long is done less often: one job's tree does not take the loop of all."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", cpu_s=1000)))
            looks: list[float] = []

            def slow() -> float:
                looks.append(time.monotonic())
                while time.monotonic() < looks[-1] + 0.005:
                    pass
                return 0.0

            ledger.paper(who).cpu_s = slow  # type: ignore[method-assign] # a tree of many processes
            account, member = on.budgets._by_attempt[who.attempt]
            await until(lambda: len(looks) == 2, "two looks")
            assert looks[1] - looks[0] > 0.4
            assert account.over(member.budget) is None

    asyncio.run(main())
