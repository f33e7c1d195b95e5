"""Signals: typed outcomes, masks, what acts from outside, who may send, and across nodes (rows S1 to S5)."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from dataclasses import dataclass, field
from typing import cast

import pytest
from redis.asyncio import Redis

from node_agent.containment.freezing import FREEZE_TIMEOUT_S, Still
from node_agent.kernel.caller import Caller
from node_agent.kernel.signalpost import MOST_TOLD, Sent
from node_agent.kernel.signals import BURST, may_signal
from node_agent.pausing import Order, Pauser
from node_agent.run import now_ms
from node_agent.walltime import WallTime
from runner.wire import codec, ids
from runner.wire import spec as specs
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.event import EventType
from runner.wire.keys import Keys
from runner.wire.signals import FATAL, FREEZING, TOLD, UNMASKABLE, Signal, SignalName
from runner.wire.spec import JobSpec
from tests.agent import build
from tests.kernel import rig
from tests.kernel.post import Fleet, Node, fleet
from tests.kernel.rig import FakeRecorder, Pushed
from tests.support.valkey import Valkey
from tests.support.wait import await_until

Answer = dict[str, Json]


@dataclass(slots=True)
class Tree:
    """The processes of an attempt, on paper."""

    done: list[str] = field(default_factory=list)

    def terminate(self) -> None:
        """Note it."""
        self.done.append("term")

    def tell(self, number: int) -> None:
        """Note a signal."""
        self.done.append(signal.Signals(number).name)

    def kill(self) -> None:
        """Note it."""
        self.done.append("kill")

    def sockets(self) -> int:
        """None are open."""
        return 0

    def cpu_s(self) -> float:
        """None was used."""
        return 0.0

    async def freeze(self, frozen: bool, timeout_s: float = FREEZE_TIMEOUT_S) -> Still:
        """Note it."""
        self.done.append("freeze" if frozen else "thaw")
        return Still(True, 1, "paper")


def start(node: Node, *, watch: tuple[str, ...] = (), **changes: object) -> tuple[Caller, Tree]:
    """A running job of a node, which may watch others."""
    who = rig.caller(build.job(**changes), watch=watch)
    tree = Tree()
    who.run.tree, who.run.selectors = tree, specs.selectors_of(who.spec, node.name)
    node.runs.append(who.run)
    return who, tree


async def ask(node: Node, who: Caller, op: str, **fields: object) -> Answer:
    """Call one op on a node."""
    return cast("Answer", await rig.ask(node.signals.entries(), who, f"signal.{op}", **fields))


async def outcome(node: Node, who: Caller, name: str, **fields: object) -> Json:
    """Send a signal; return what became of it."""
    return (await ask(node, who, "send", signal=name, **fields))["outcome"]


async def operator(node: Node, who: Caller, name: str) -> str:
    """Send an operator's signal."""
    return (await node.signals.carry_out(who.run, Sent(SignalName(name), "operator ann", 1, "why"))).outcome


def stands_still(wall: WallTime) -> bool:
    """Whether the clock of a time limit was stopped."""
    return wall._paused


def pushed(who: Caller) -> list[str]:
    """The names of the signals that a session's process was told."""
    return [cast("Answer", one["signal"])["signal"] for one in cast("Pushed", who.push).records]  # type: ignore[misc]  # texts


def test_row_s1_each_signal_has_a_typed_outcome_and_says_who_when_why(valkey: Valkey) -> None:
    """Delivered, queued, refused and applied are told apart, and every signal is in the history with its sender."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            assert await outcome(node, who, "USR1", why="tick") == "delivered"
            assert await outcome(node, who, "STOP") == "applied"
            assert await outcome(node, who, "TERM") == "queued"
            assert await outcome(node, who, "CONT") == "applied"
            assert tree.done == ["SIGUSR1", "freeze", "SIGTERM", "thaw"]
            told = (await ask(node, who, "list"))["history"]
            first = cast("list[Answer]", told)[0]
            assert (first["signal"], first["from"], first["why"]) == ("USR1", f"job {who.job}", "tick")
            assert [one["outcome"] for one in cast("list[Answer]", told)] == [
                "delivered",
                "applied",
                "queued",
                "applied",
            ]
            assert await outcome(node, who, "KILL") == "applied"
            assert await outcome(node, who, "USR1") == "refused"

    asyncio.run(main())


def test_row_s2_a_mask_holds_up_coalesces_and_lets_go_in_order(valkey: Valkey) -> None:
    """Blocked signals wait once each and come in order when they are unblocked; unmaskable ones can't be blocked."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            assert await rig.refused(node.signals.entries(), who, "signal.mask", blocked=["INT"]) is ErrorCode.CONFLICT
            await ask(node, who, "listen")
            for name in UNMASKABLE:
                code = await rig.refused(node.signals.entries(), who, "signal.mask", blocked=[name])
                assert code is ErrorCode.DENIED
            await ask(node, who, "mask", blocked=["USR1", "INT"])
            seen = [await outcome(node, who, name) for name in ("INT", "USR1", "INT", "TERM", "USR1")]
            assert seen == ["queued", "queued", "queued", "delivered", "queued"]
            assert pushed(who) == ["TERM"]
            await ask(node, who, "mask", blocked=["USR1"])
            await ask(node, who, "mask", blocked=[])
            assert pushed(who) == ["TERM", "INT", "USR1"]
            assert (await ask(node, who, "mask", blocked=[]))["pending"] == []
            assert tree.done == []

    asyncio.run(main())


def test_a_process_that_takes_no_record_gets_its_signals_later_each_once(valkey: Valkey) -> None:
    """A busy process loses nothing, gets nothing twice, and a closed session holds nothing up."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            await ask(node, who, "listen")
            cast("Pushed", who.push).deaf = True
            assert [await outcome(node, who, name) for name in ("USR1", "USR2", "USR1")] == ["queued"] * 3
            cast("Pushed", who.push).deaf = False
            await ask(node, who, "mask", blocked=[])
            assert pushed(who) == ["USR1", "USR2"]
            for close in who.closing:
                close()
            assert await outcome(node, who, "USR1") == "delivered"
            assert (pushed(who), tree.done) == (["USR1", "USR2"], ["SIGUSR1"])

    asyncio.run(main())


def test_attack_41_what_a_process_does_not_take_is_tried_again_once_at_a_time(valkey: Valkey) -> None:
    """However many signals a job sends to processes that take none, each of these is tried again by one timer."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, _ = start(node)
            await ask(node, who, "listen")
            cast("Pushed", who.push).deaf = True
            for _ in range(10):
                await outcome(node, who, "USR1")
                await ask(node, who, "mask", blocked=[])
            assert len(node.signals._timers) == 1
            cast("Pushed", who.push).deaf = False
            await await_until(lambda: pushed(who) == ["USR1"], "the signal to come")
            assert not node.signals._timers

    asyncio.run(main())


@pytest.mark.parametrize("name", sorted(FATAL))
def test_row_s3_a_job_can_not_keep_a_signal_that_kills_from_acting(valkey: Valkey, name: str) -> None:
    """KILL, POLICY and TRUST end the job from outside, listening or not, under a name of their own."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            await ask(node, who, "listen")
            await ask(node, who, "mask", blocked=sorted(TOLD))
            assert await operator(node, who, name) == "applied"
            assert (tree.done, who.run.cause) == (["kill"], name.lower())
            assert pushed(who) == []
            assert await operator(node, who, name) == "applied"

    asyncio.run(main())


def test_row_s4_every_signal_is_recorded_before_it_acts_and_the_history_is_bounded(valkey: Valkey) -> None:
    """Without a record nothing but a kill happens; the sender's name is the node's word; old entries go."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            recorder = cast("FakeRecorder", node.around.recorder)
            await outcome(node, who, "USR1")
            assert recorder.lines[-1][2] == {"signal": "USR1", "by": f"job {who.job}", "why": ""}
            recorder.broken = True
            assert await operator(node, who, "USR1") == "refused"
            assert await operator(node, who, "STOP") == "refused"
            assert tree.done == ["SIGUSR1"]
            assert await operator(node, who, "KILL") == "applied"
            for _ in range(2 * MOST_TOLD):
                sent = Sent(SignalName.USR2, "operator ann", 1, "\0\U0001f511" * 2000)
                await node.signals.carry_out(who.run, sent)
            answer = await ask(node, who, "list")
            assert len(cast("list[Json]", answer["history"])) == MOST_TOLD
            assert len(codec.dump(answer)) < MAX_CALL_BYTES - 4096

    asyncio.run(main())


@pytest.mark.parametrize("name", sorted(FREEZING))
def test_row_s5_a_job_stands_still_without_its_help_until_an_operator_says_so(valkey: Valkey, name: str) -> None:
    """BUDGET, LOOP and DRIFT freeze the job; neither it nor a service job can let it go on, an operator can."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            guard, _ = start(node, watch=("all",))
            await ask(node, who, "listen")
            assert await operator(node, who, name) == "applied"
            assert (pushed(who), tree.done) == ([name], ["freeze"])
            assert await outcome(node, who, "CONT") == "refused"
            assert await outcome(node, guard, "CONT", job=who.job) == "refused"
            sent = Sent(SignalName.CONT, "operator ann", 1)
            assert (await node.signals.carry_out(who.run, sent, holder="operator")).outcome == "applied"
            assert tree.done[-1] == "thaw"

    asyncio.run(main())


def test_a_job_signals_itself_what_it_started_and_what_it_watches_and_nothing_else() -> None:
    """Only the signed words of both jobs decide, never a name in the request."""
    me = build.job()
    child = build.job(ancestors=(me.id,))
    stranger = build.job(tags={"team": "a"}, group="g")
    far = build.job(id=ids.new_job_id("other"), tenant="other", tags={"team": "a"})

    def watching(*selectors: str) -> JobSpec:
        grants = dataclasses.replace(me.grants, watch=selectors)
        return dataclasses.replace(me, grants=grants)

    for name in ("KILL", "STOP", "CONT", "INT", "TERM", "USR1", "USR2"):
        known = SignalName(name)
        assert may_signal(me, me, known) == ""
        assert may_signal(me, child, known) == ""
        assert may_signal(child, me, known)
        assert may_signal(me, stranger, known)
        for selector in ("tag:team=a", "group:g", "all", f"job:{stranger.id}", "tenant:main"):
            assert may_signal(watching(selector), stranger, known) == ""
            assert may_signal(watching(selector), far, known)
        assert may_signal(watching("tag:team=b"), stranger, known)
    assert may_signal(me, me, SignalName.DRIFT)
    assert may_signal(watching("all"), stranger, SignalName.DRIFT) == ""
    for name in ("POLICY", "TRUST", "BUDGET", "LOOP"):
        assert may_signal(watching("all"), stranger, SignalName(name))


def test_signals_cross_nodes_and_are_judged_where_they_arrive(valkey: Valkey) -> None:
    """A service job reaches a job of another node, with that node's own answer; a sender's word alone is nothing."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", known=known) as nodes:
            here, there = nodes["n1"], nodes["n2"]
            guard, _ = start(here, watch=("tag:team=a",))
            bare, _ = start(here)
            who, tree = start(there, tags={"team": "a"})
            known.jobs |= {one.job: one.spec for one in (guard, bare, who)}
            store = Redis(unix_socket_path=str(valkey.socket))
            await store.hset(Keys().job(who.job), mapping={"rf_state": "running", "rf_claim": "n2/boot/1"})
            assert await outcome(here, guard, "USR1", job=who.job) == "delivered"
            assert await outcome(here, guard, "STOP", job=who.job) == "applied"
            assert tree.done == ["SIGUSR1", "freeze"]
            assert await rig.refused(here.signals.entries(), bare, "signal.send", signal="TERM", job=who.job) is (
                ErrorCode.DENIED
            )
            # A node that lies about what its job may is not believed; an old word, one from far ahead, and one that
            # was carried out already, are none.
            now = now_ms()
            again = Signal(ids.new_nonce(), "main", SignalName.USR1, who.job, guard.job, 1, "n1", now)
            lies = [
                Signal(ids.new_nonce(), "main", SignalName.KILL, who.job, sender, 1, "n1", at_ms)
                for sender, at_ms in ((bare.job, now), (guard.job, 1), (guard.job, now + 3_600_000))
            ]
            for word in (*lies, again, again):
                await here.bell.ring("n2", "signal", *here.seals.seal(word))
            assert await outcome(here, guard, "STOP", job=who.job) == "applied"
            assert await outcome(here, guard, "USR2", job=who.job) == "queued"
            assert tree.done == ["SIGUSR1", "freeze", "SIGUSR1", "freeze", "SIGUSR2"]
            await store.hset(Keys().job(who.job), "rf_state", "finished")
            assert await outcome(here, guard, "TERM", job=who.job) == "refused"
            await store.delete(Keys().job(who.job))
            await store.aclose()

    asyncio.run(main())


def test_attack_32_a_job_that_stops_itself_wins_no_time_and_floods_nobody(valkey: Valkey) -> None:
    """Its time limit goes on, its pauses are told in its own stream, and it can't stop and go on without end."""

    async def main() -> None:
        async with fleet(valkey, "n1", clock=lambda: 0.0) as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            guard, _ = start(node, watch=("all",))
            wall = who.run.wall = WallTime(1000, lambda: None)
            told: list[EventType] = []
            node.signals._pauser = Pauser(node.around.notary, node.around, lambda _job, _no, kind, _: told.append(kind))
            for name in ("STOP", "CONT") * 5:
                assert await outcome(node, guard, name, job=who.job) == "applied"
                assert not stands_still(wall)
            assert await outcome(node, guard, "STOP", job=who.job) == "refused"
            assert told == [EventType.JOB_PAUSED, EventType.JOB_RESUMED] * 5
            assert tree.done == ["freeze", "thaw"] * 5
            assert rig.emitted(node.around) == []
            assert await operator(node, who, "LOOP") == "applied"
            assert not stands_still(wall)
            await node.signals._pauser.carry_out(who.run, Order("pause", "operator"))
            assert stands_still(wall)
            wall.cancel()

    asyncio.run(main())


def test_what_a_job_may_send_is_bounded(valkey: Valkey) -> None:
    """A flood of signals is told to slow down; a long or odd reason, and a job that is none, are refused."""

    async def main() -> None:
        async with fleet(valkey, "n1", clock=lambda: 0.0) as nodes:
            node = nodes["n1"]
            who, tree = start(node)
            entries = node.signals.entries()
            send = {"signal": "USR1"}
            assert await rig.refused(entries, who, "signal.send", **send, why="x" * 257) is ErrorCode.BAD_REQUEST
            assert await rig.refused(entries, who, "signal.send", **send, why="\x1b[0m") is ErrorCode.BAD_REQUEST
            assert await rig.refused(entries, who, "signal.send", **send, job="nobody") is ErrorCode.NOT_FOUND
            for _ in range(int(BURST) - 3):
                await outcome(node, who, "USR1")
            assert await rig.refused(entries, who, "signal.send", **send) is ErrorCode.SLOW_DOWN
            assert len(tree.done) == BURST - 3

    asyncio.run(main())
