"""Loop detection: the same call again and again is found, what changes is not, and policy says what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator

import pytest

from broker.egress.meter import Meter, Tally, Usage
from node_agent.errors import PolicyError
from node_agent.kernel.loops import Loops
from node_agent.kernel.talk import Alone, Talk
from node_agent.policy import parse
from node_agent.policyloop import LoopRule
from node_agent.records import Signed
from node_agent.run import Run
from runner.wire import record
from runner.wire.event import Event
from tests.agent import build
from tests.kernel import rig
from tests.kernel.rig import Pushed
from tests.kernel.test_signals import Tree

RULE = LoopRule(in_row=4, in_window=8, window_s=60.0)


class Nothing:
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class Found:
    """What a rule found, by a clock of its own."""

    def __init__(self, rule: LoopRule = RULE) -> None:
        self.now_s = 0.0
        self.whys: list[str] = []
        self.loops = Loops(rule, self.found, lambda: self.now_s)
        self.run = rig.caller(build.job()).run

    def found(self, run: Run, why: str) -> Awaitable[None]:
        """Note it."""
        assert run is self.run
        self.whys.append(why)
        return Nothing()

    def call(self, name: str, args: bytes = b"{}", times: int = 1) -> None:
        """Make calls, a second apart."""
        for _ in range(times):
            self.now_s += 1
            asyncio.run(self.loops.seen(self.run, name, args))


def test_equal_calls_in_a_row_are_a_loop_and_counted_anew_after_it() -> None:
    """The k-th one is told, with what it was; whoever lets the job go on gives it as much rope again."""
    found = Found()
    found.call("tool search", times=3)
    assert found.whys == []
    found.call("tool search")
    assert found.whys == ["4 equal calls of tool search in a row"]
    found.call("tool search", times=3)
    assert len(found.whys) == 1
    found.call("tool search")
    assert len(found.whys) == 2


def test_what_changes_is_no_loop() -> None:
    """Other arguments, another name, or name and arguments that only look alike together, count apart."""
    found = Found()
    for number in range(100):
        found.call("tool search", str(number).encode())
    for args in (b"1", b"1", b"1", b"2") * 3:
        found.now_s += 100
        found.call("tool search", args)
    for _ in range(3):
        found.call("ab", b"c")
        found.call("a", b"bc")
    assert found.whys == []


def test_equal_calls_in_a_window_are_a_loop_whatever_lies_between() -> None:
    """A cycle of two calls is found; the same calls spread over a longer time are not."""
    found = Found()
    for number in range(8):
        found.call("tool fetch")
        found.call("tool other", str(number).encode())
    assert found.whys == ["8 equal calls of tool fetch in 60 s"]
    slow = Found()
    for number in range(30):
        slow.now_s += 10
        slow.call("tool fetch")
        slow.call("tool other", str(number).encode())
    assert slow.whys == []
    off = Found(LoopRule(in_row=0, in_window=0))
    off.call("tool search", times=100)
    assert off.whys == []


def test_equal_requests_to_a_model_are_counted_by_the_egress_process() -> None:
    """Path and body together are what is asked; a door's row goes on over reports, and is begun anew after LOOP."""

    async def main() -> None:
        told: list[int] = []

        def tell(_: str, counts: dict[str, int]) -> bool:
            told.append(counts["same"])
            return True

        meter = Meter(Usage(), tell)

        def ask(body: bytes, path: str = "/v1/messages", method: bytes = b"POST") -> None:
            tally = Tally(meter, method, path)
            tally.sent(body[:3])
            tally.sent(body[3:])
            tally.end(whole=True)
            meter.flush()

        for body in (b"hello", b"hello", b"hello", b"other", b"hello"):
            ask(body)
        ask(b"", "/v1/models", b"GET")
        ask(b"hello", "/v1/chat/completions")
        ask(b"hello", "/upload")
        ask(b"hello", "/v1/chat/completions")
        assert told == [0, 2, 3, 0, 0, 0, 0, 0, 2]
        meter.close()

    asyncio.run(main())
    found = Found()
    acted = [found.loops.counted(found.run, "requests", count) is not None for count in (2, 3, 4, 5, 7, 8, 0, 3, 4)]
    assert acted == [False, False, True, False, False, True, False, False, True]
    # Other requests between equal ones say nothing of these: what was acted on is not acted on again for them.
    found = Found()
    counts = [count for number in range(2, 12) for count in (number, 0)]
    assert sum(found.loops.counted(found.run, "requests", count) is not None for count in counts) == 2


@pytest.mark.parametrize("action", ["freeze", "kill", "tell"])
def test_a_loop_is_frozen_killed_or_told_as_policy_says(action: str) -> None:
    """LOOP acts from outside, before the call that was one too many is carried out; each is an event and a record."""

    async def main() -> None:
        rule = parse(f'version = 1\n[loop]\nin_row = 3\naction = "{action}"').loop
        who, tree = rig.caller(build.job()), Tree()
        who.run.tree = tree
        around = rig.around(loop=rule, runs=lambda: (who.run,))
        talk = Talk(around, Alone())
        await rig.ask(talk.signals.entries(), who, "signal.listen")
        for _ in range(3):
            assert tree.done == []
            await around.repeating[0](who.run, "tool search", b"{}")
        assert tree.done == {"freeze": ["freeze"], "kill": ["kill"], "tell": []}[action]
        assert who.run.holders == ({"loop"} if action == "freeze" else set())
        push = who.push
        assert isinstance(push, Pushed)
        assert push.records[0]["signal"]["signal"] == "LOOP"  # type: ignore[index,call-overload]  # an object
        if action != "tell":
            assert [type_of(event) for event in rig.emitted(around)][-1] == "job.signalled"
            assert "signal" in around.recorder.kinds()  # type: ignore[attr-defined]  # the fake

    asyncio.run(main())


def test_a_loop_rule_is_read_whole_or_refuses_to_load() -> None:
    """Unknown keys, wrong types and bounds that would mean nothing are errors, and there is a rule without a table."""
    assert parse("version = 1").loop == LoopRule()
    rule = parse("version = 1\n[loop]\nin_row = 0\nin_window = 5\nwindow_s = 10").loop
    assert (rule.in_row, rule.in_window, rule.window_s) == (0, 5, 10.0)
    for line in ("rows = 3", "in_row = 1", "in_row = true", "in_row = 2.5", "window_s = 0", "in_window = -1",
                 'action = "stop"', "action = 1", "in_row = 1000000", "window_s = inf",
                 "window_s = nan"):  # fmt: skip # several to a line
        with pytest.raises(PolicyError):
            parse(f"version = 1\n[loop]\n{line}")
    with pytest.raises(PolicyError):
        parse("version = 1\nloop = 3")


def type_of(event: tuple[str | None, Signed]) -> str:
    """The type of an emitted event."""
    return record.loads(Event, event[1].payload).type
