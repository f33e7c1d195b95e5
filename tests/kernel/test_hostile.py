"""What a hostile job does to the loop that it shares with every other job of its node, and to the agent's memory."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from node_agent.kernel import session as sessions
from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.metrics import Metrics
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.rota import Rota
from node_agent.kernel.session import MAX_IN_FLIGHT
from node_agent.kernel.table import Entry, table_of
from node_agent.kernel.witness import Witness
from node_agent.run import KillOrder
from runner.guest.calls import CallRefused, Session
from runner.wire.codec import Json
from tests.agent import build
from tests.kernel import rig
from tests.kernel.line import Line, in_line, talk
from tests.support.wait import await_until


@dataclass(frozen=True, slots=True)
class Nothing:
    """No fields."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Whatever."""

    args: tuple[object, ...]


def test_attack_41_what_a_waiting_call_takes_of_the_loop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that waits, and works in between, costs its job as many calls as it took of the loop's time."""
    now = [0.0]

    async def slow(_caller: Caller, _ask: Nothing) -> Json:
        await asyncio.sleep(0)
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return None

    async def scenario(line: Line) -> None:
        desk = line.exchange.desk
        assert desk is not None
        desk.table = table_of([Entry("test.slow", Nothing, slow, "Works.", "null")])

        def process() -> int:
            count = 0
            with Session(line.attempt.far.fileno()) as session, socket.socket(fileno=os.dup(session.fileno())) as held:
                held.settimeout(0.3)
                try:
                    while True:
                        held.send(b'{"n":1,"op":"test.slow"}')
                        held.recv(1024)
                        count += 1
                except TimeoutError:
                    return count

        # 500 calls at once, of which each took as much of the loop as 200 that do nothing.
        assert await talk(process) <= 4

    in_line(scenario, clock=lambda: now[0])


def test_attack_41_between_two_slices_the_loop_belongs_to_others_for_as_long() -> None:
    """Jobs with costly calls, however many, get no more than half of the loop: kills and ends have the other."""

    class Costly:
        light = False

        def __init__(self, clock: list[float]) -> None:
            self.clock, self.times = clock, deque[float]()

        def step(self) -> bool:
            self.clock[0] += 0.01
            self.times.append(time.monotonic())
            return True

    class Light:
        light = True
        steps = 0

        def step(self) -> bool:
            self.steps += 1
            return False

    async def main() -> float:
        clock = [0.0]
        rota = Rota(lambda: clock[0])
        turns = [Costly(clock) for _ in range(3)]
        for turn in turns:
            rota.join(turn)
        await await_until(lambda: sum(len(turn.times) for turn in turns) >= 7, "some slices")
        light = Light()
        rota.join(light)
        assert light.steps == 1  # who has taken little waits for no rest of the others
        for turn in turns:
            rota.leave(turn)
        times = sorted(at for turn in turns for at in turn.times)
        return times[6] - times[0]

    # Six rests of 10 ms, in whole milliseconds of the loop's timers.
    assert asyncio.run(main()) >= 0.05


def test_answers_that_nobody_takes_hold_no_parsed_arguments() -> None:
    """What a call brought along is let go with its answer: parsed, it is twenty times as large as it was."""

    async def scenario(line: Line) -> None:
        desk = line.exchange.desk
        assert desk is not None
        loud = Entry("test.loud", Anything, lambda _caller, _ask: "x" * 60_000, "Says much.", "text")
        desk.table = table_of([loud])

        def process() -> Session:
            session = Session(line.attempt.far.fileno())
            with socket.socket(fileno=os.dup(session.fileno())) as held:
                for number in range(2 * MAX_IN_FLIGHT):
                    held.settimeout(1.5)
                    try:
                        held.send(b'{"n":%d,"op":"test.loud","args":[%s[]]}' % (number, b"[]," * 9000))
                    except TimeoutError:
                        break
            return session

        session = await talk(process)
        (ours,) = line.channel._sessions
        await await_until(lambda: bool(ours._out), "answers that nobody takes")
        assert [call for call in ours._out if call.answer is not None and (call.fields or call.data)] == []
        session.close()

    in_line(scenario)


def test_a_kill_acts_whatever_becomes_of_its_record(tmp_path: Path) -> None:
    """A recorder that fails in a way that nobody thought of counts a miss; the kill goes on."""

    def broken(fd: int, data: bytes) -> int:
        if b"kill.ordered" in data:
            raise RuntimeError("nobody thought of it")
        return os.write(fd, data)

    recorder = Recorder(tmp_path / "flight", node="n1", signer=build.signer(), fleet=None, write=broken)
    witness = Witness(recorder, Metrics())
    run = rig.caller().run
    run.on_order = lambda order: witness.ordered(run.job_id, run.attempt, order)
    run.kill(KillOrder("", 1, reason="over"))
    assert (run.cause, run.stopping, recorder.misses) == ("kill", True, 1)
    recorder.close()


def test_faults_that_a_job_causes_at_will_fill_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some are told with all that is known of them; the others are answered and counted."""
    monkeypatch.setattr(sessions, "_faults", Bucket(0.0001, 3.0))

    async def scenario(line: Line) -> None:
        def process() -> list[str]:
            found = []
            with Session(line.attempt.far.fileno()) as session:
                for _ in range(20):
                    with pytest.raises(CallRefused) as caught:
                        session.call("test.fail")
                    found.append(caught.value.code)
            return found

        assert await talk(process) == ["fault"] * 20

    in_line(scenario)
    assert sum("a call failed in the agent" in one.message for one in caplog.records) == 3
