"""The agent's line to the egress process, with that one played by the test: no line is asked twice for one door,
however often it breaks, however slow the answer is, and whoever opens or closes doors meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.egress.orders import MAX_RECORD_BYTES
from broker.egress.rules import Destination, Rules
from node_agent import egress
from node_agent.egress import Door, Egress
from node_agent.errors import EgressAwayError, EgressRefusedError
from runner.wire import codec
from runner.wire.grants import NetGrant
from tests.net.support import own_descriptors
from tests.support import scratch
from tests.support.wait import apause, await_until

RULES = Rules(frozenset({Destination("a.example", 80)}))
DOORS = 5


class Played:
    """An egress process as the test wants it. ``orders``: what came, by line, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.orders: list[list[tuple[str, str]]] = []
        #: Called with each order before it is answered; False: it gets no answer.
        self.judge: Callable[[str, str], bool] = lambda op, attempt: True
        self._lines: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def doors(self) -> list[str]:
        """Return the attempts whose doors the last line has, and make sure that no line was asked for one twice."""
        found: Counter[str] = Counter()
        for orders in self.orders:
            found = Counter()
            for op, attempt in orders:
                found[attempt] += {"open": 1, "close": -1}.get(op, 0)
                assert 0 <= found[attempt] <= 1, self.orders
        return sorted(attempt for attempt, count in found.items() if count)

    def crash(self) -> None:
        """Break every line off."""
        for line in self._lines:
            if line.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(line)
                line.close()

    def end(self) -> None:
        """Break every line off and listen no longer."""
        self.crash()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        number = len(self.orders)
        self._lines.append(line)
        self.orders.append([])
        asyncio.get_running_loop().add_reader(line, self._read, line, number)

    def _read(self, line: socket.socket, number: int) -> None:
        data, fds, _, _ = socket.recv_fds(line, MAX_RECORD_BYTES, 8)
        for fd in fds:
            os.close(fd)
        if not data:
            asyncio.get_running_loop().remove_reader(line)
            line.close()
            return
        record = codec.load(data)
        assert isinstance(record, dict)
        op, attempt = str(record["op"]), str(record.get("attempt"))
        if op == "hello":
            line.send(codec.dump({"op": "hello", "weak": ""}))
            return
        self.orders[number].append((op, attempt))
        assert len(fds) == (2 if op == "open" else 0)
        if self.judge(op, attempt) and line.fileno() >= 0:
            line.send(codec.dump({"id": record["id"], "refused": ""}))


@contextmanager
def playing(path: Path) -> Iterator[tuple[Played, Egress]]:
    """Yield both ends."""
    played = Played(path)
    try:
        yield played, Egress(path, (), lambda _: None)
    finally:
        played.end()


def run(scenario: Callable[[Played, Egress], Awaitable[None]]) -> None:
    """Run with both ends; no descriptor of either may stay."""

    async def main(path: Path) -> None:
        before = own_descriptors()
        with playing(path) as (played, line):
            try:
                await asyncio.wait_for(asyncio.ensure_future(_awaited(scenario(played, line))), 30)
            finally:
                await line.stop()
        assert own_descriptors() <= before

    with scratch.folder() as folder:
        asyncio.run(main(folder / "s"))


async def _awaited(thing: Awaitable[None]) -> None:
    await thing


async def door(line: Egress, number: int) -> Door:
    """Open a door; what it stands on is of no matter here."""
    return await line.open(f"main-job{number}.1", RULES, *os.pipe())


def names(*numbers: int) -> list[str]:
    """Return the attempts of such doors."""
    return [f"main-job{number}.1" for number in numbers]


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("at", range(1, DOORS + 1))
def test_a_crash_at_every_point_of_the_reopening(at: int, answered: bool) -> None:
    """It dies at the n-th door that it is given again, with or without an answer: the next one gets each door once."""

    async def scenario(played: Played, line: Egress) -> None:
        for number in range(DOORS):
            await door(line, number)
        left = at

        def judge(op: str, attempt: str) -> bool:
            nonlocal left
            left -= op == "open"
            if left == 0 and op == "open":
                if answered:
                    asyncio.get_running_loop().call_soon(played.crash)
                else:
                    played.crash()
            return True

        played.judge = judge
        played.crash()
        await await_until(lambda: len(played.orders) >= 3 and len(played.doors()) == DOORS, "all doors to be asked for")
        # Any order that came too much would come before this one's answer.
        await line.check([NetGrant("a.example", 80)], [])
        assert played.doors() == names(*range(DOORS))

    run(scenario)


def test_a_door_that_opens_while_others_are_reopened() -> None:
    """The attempt's own asking and the restoring one meet: each line is asked once."""

    async def scenario(played: Played, line: Egress) -> None:
        async def all_asked_for(count: int) -> None:
            expected = sorted(names(*range(count)))
            await await_until(lambda: played.doors() == expected, "all doors to be asked for")

        for number in range(DOORS):
            await door(line, number)
        for number in range(DOORS, DOORS + 20):
            played.crash()
            late = asyncio.ensure_future(door(line, number))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            played.crash()
            await late
            await all_asked_for(number + 1)
        await line.check([NetGrant("a.example", 80)], [])
        assert len(played.doors()) == DOORS + 20

    run(scenario)


def test_a_slow_answer_is_waited_for_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted process that takes longer than the longest wait: one order a door; it answers in the end."""
    monkeypatch.setattr(egress, "WAIT_S", 0.1)

    async def scenario(played: Played, line: Egress) -> None:
        doors = [await door(line, number) for number in range(3)]
        silent = True
        played.judge = lambda op, attempt: not silent
        played.crash()
        await await_until(lambda: len(played.orders) == 2 and played.doors(), "the first door to be asked for")
        await apause(0.5)
        assert len(played.orders[1]) == 1
        # The attempt ends before its answer comes: closed once, and the others' turn comes.
        silent = False
        doors[0].close()
        await await_until(lambda: played.doors() == names(1, 2), "the other doors to be asked for")
        with pytest.raises(EgressRefusedError, match="has a door already"):
            await door(line, 1)
        assert played.doors() == names(1, 2)

    run(scenario)


def test_a_line_that_is_stopped_stays_closed() -> None:
    """Whoever waits for an answer while the agent stops is told so, and makes no new line."""

    async def scenario(played: Played, line: Egress) -> None:
        await door(line, 0)
        played.judge = lambda op, attempt: False
        waiting = [
            asyncio.ensure_future(line.check([NetGrant("a.example", 80)], [])),
            asyncio.ensure_future(door(line, 1)),
        ]
        await await_until(lambda: len(played.orders[0]) == 3, "both orders to arrive")
        await line.stop()
        for each in waiting:
            with pytest.raises(EgressAwayError):
                await each
        with pytest.raises(EgressAwayError, match="stopping"):
            await door(line, 2)
        assert len(played.orders) == 1

    run(scenario)


def test_attack_42_grants_that_fill_no_record_are_refused_alone() -> None:
    """A job with as many and as long grants as can be: refused, and the line with others' doors stays."""

    async def scenario(played: Played, line: Egress) -> None:
        await door(line, 0)
        label = "a" * 60
        grants = [NetGrant(f"{label}.{label}.{label}.{number:03}.{'b' * 60}", 80) for number in range(256)]
        with pytest.raises(EgressRefusedError, match="grant fewer"):
            await line.check(grants, ["*"])
        await line.check(grants[:200], ["*"])
        assert len(played.orders) == 1
        assert played.doors() == names(0)

    run(scenario)
