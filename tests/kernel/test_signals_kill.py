"""KILL is a fact: idempotent, retried until it is confirmed, escalating, and loud when it is not (row H1)."""

from __future__ import annotations

import asyncio
import signal

import pytest

from node_agent.containment.plan import Level
from node_agent.containment.slots import Slot
from node_agent.run import KillOrder, Run
from runner.wire.command import Command, Selector
from runner.wire.errors import RecordError
from runner.wire.signals import SignalName
from tests.agent import build
from tests.containment.rig import Rig, in_rig
from tests.containment.test_unproved import StuckGroup
from tests.ladder.rig import at_levels, climb
from tests.support.wait import await_until


class Counted(StuckGroup):
    """A stuck group that counts the kills."""

    kills = 0

    def kill(self) -> None:
        """Count it."""
        self.kills += 1


def test_row_h1_a_kill_is_idempotent_retried_escalates_and_alarms(
    node_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM first, SIGKILL after the grace, again until the proof; no proof in time is told, a late one is taken."""
    monkeypatch.setattr("node_agent.containment.attempts.PROOF_TIMEOUT_S", 0.3)
    monkeypatch.setattr("node_agent.containment.attempts._RETRY_S", 0.05)

    async def scenario(rig: Rig) -> None:
        group = Counted()
        stuck = Rig(rig.zygote, Slot(1, rig.zygote, group), None)  # type: ignore[arg-type] # what a slot uses of it
        attempt, _ = await stuck.running(["sh", "-c", "trap 'echo told' TERM; echo up; while :; do sleep 0.02; done"])
        spec = build.job()
        run = Run(spec.id, 1, 1, 1, spec=spec, started_at_ms=1)
        run.begun(attempt)
        run.kill(KillOrder("c1", 1, grace_s=0.2))
        assert group.kills == 0, "not before the grace is over"
        await await_until(lambda: group.kills > 0, "the grace to be over")
        for number in range(3):
            run.kill(KillOrder(f"again{number}", 1))
        await await_until(lambda: group.kills > 2, "the kill to be tried again")
        verdict = (await stuck.finish(attempt)).verdict
        assert (verdict.kind, verdict.proved, stuck.slot.healthy) == ("killed", False, False)
        kills = group.kills
        await await_until(lambda: group.kills > kills, "the kill to be tried again after the alarm")
        group.release()
        await asyncio.wait_for(attempt.proved, 5)
        assert (run.cause, len(run.orders), run.forced) == ("kill", 4, True)
        await stuck.slot.close()

    in_rig(node_name, scenario)


@at_levels()
def test_the_system_s_signals_reach_the_first_process_at_every_level(node_name: str, level: Level) -> None:
    """INT, TERM, USR1 and USR2 are told to the worker alone, through whatever holds it; nothing else can be."""

    async def scenario(rig: Rig) -> None:
        script = "n=0; trap 'n=$((n+1))' INT USR1 USR2; trap 'exit $n' TERM; echo up; while :; do sleep 0.02; done"
        attempt, _ = await rig.running(["sh", "-c", script])
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            attempt.tell(number)
        with pytest.raises(ValueError, match="no word"):
            attempt.tell(signal.SIGSTOP)
        attempt.tell(signal.SIGTERM)
        verdict = await attempt.verdict
        assert (verdict.kind, verdict.code) == ("exit", 3)
        await rig.finish(attempt)

    climb(level, node_name, scenario)


def test_a_kill_that_is_a_signal_keeps_its_name_wherever_it_meets_the_job() -> None:
    """POLICY and TRUST as commands are kills of their own name; nothing else can be called so."""
    for fatal in ("POLICY", "TRUST"):
        command = Command("c", "kill", Selector("all"), 1, 2, reason="because", signal=SignalName(fatal))
        order = KillOrder.of(command)
        assert (order.cause, order.reason) == (fatal.lower(), f"{fatal}: because")
    plain = KillOrder.of(Command("c", "kill", Selector("all"), 1, 2, reason="because"))
    assert (plain.cause, plain.reason) == ("kill", "because")
    for op, name in (("kill", "USR1"), ("signal", "POLICY"), ("signal", None), ("pause", "USR1")):
        known = SignalName(name) if name is not None else None
        with pytest.raises(RecordError, match="signal"):
            Command("c", op, Selector("all"), 1, 2, sequence=int(op != "kill"), signal=known)  # type: ignore[arg-type] # that is the test
