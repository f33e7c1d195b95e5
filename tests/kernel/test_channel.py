"""The channel of an attempt: sessions are handed out, counted, and fair; nothing else is heard."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from node_agent.kernel import channel as channels
from runner.guest.calls import CallRefused, Session
from runner.wire import frames
from runner.wire.calls import MAX_SESSIONS, ErrorCode
from runner.wire.frames import Op
from tests.kernel import rig
from tests.kernel.line import FakeAttempt, Line, in_line, talk
from tests.support.wait import apause, await_until


def test_attack_34_sessions_are_counted_until_they_are_closed() -> None:
    """The seventeenth is refused, so are the descriptors in flight of those that nobody takes; a closed one is room."""

    async def scenario(line: Line) -> None:
        def process() -> None:
            held = [Session(line.attempt.far.fileno()) for _ in range(MAX_SESSIONS)]
            with pytest.raises(CallRefused) as caught:
                Session(line.attempt.far.fileno())
            assert caught.value.code == ErrorCode.QUOTA
            for session in held:
                session.close()

        await talk(process)
        await await_until(lambda: not line.channel._sessions, "all sessions to end")
        for _ in range(MAX_SESSIONS * 2):
            line.attempt.far.send(frames.pack(Op.OPEN))
        await await_until(lambda: len(line.channel._sessions) == MAX_SESSIONS, "as many as there may be")
        await asyncio.sleep(0)
        assert len(line.channel._sessions) == MAX_SESSIONS
        _, fds, _, _ = socket.recv_fds(line.attempt.far, 64, 4)
        assert len(fds) == 1
        os.close(fds[0])
        await await_until(lambda: len(line.channel._sessions) == MAX_SESSIONS - 1, "the taken one to be closed")

    in_line(scenario)


@pytest.mark.parametrize("word", [b"\x00", b"junk", frames.pack(Op.DONE, b"1"), frames.pack(Op.OPEN, b"x"), b"A" * 900])
def test_k2_an_unknown_word_ends_the_channel_and_the_job_goes_on(word: bytes) -> None:
    """No session stands any more, none is given, one event tells it; the attempt is not touched."""

    async def scenario(line: Line) -> None:
        session = await talk(lambda: Session(line.attempt.far.fileno()))
        line.attempt.far.send(word)
        await await_until(lambda: not line.channel._sessions, "the sessions to end")

        def after() -> str:
            with pytest.raises(CallRefused) as caught:
                Session(line.attempt.far.fileno())
            return caught.value.code

        assert await talk(after) == ErrorCode.ENDED
        assert [detail for _, detail in line.told] == [{"what": "an unknown word on the channel"}]
        assert not line.channel._run.stopping
        session.close()

    in_line(scenario)


def test_a_second_running_is_no_word_of_an_honest_job() -> None:
    """RUNNING is said once, before anything else."""

    async def scenario(line: Line) -> None:
        line.attempt.far.send(frames.pack(Op.RUNNING))
        await await_until(lambda: bool(line.told), "the violation to be told")

    in_line(scenario)


def test_attack_51_descriptors_put_into_channel_and_session_reach_nobody() -> None:
    """The agent asks for none, so the kernel drops them: its number of descriptors stays."""

    async def scenario(line: Line) -> None:
        session = await talk(lambda: Session(line.attempt.far.fileno()))
        before = len(os.listdir("/proc/self/fd"))
        with socket.socket(fileno=session.fileno()) as held:
            for number in range(20):
                call = json.dumps({"n": number, "op": "test.nothing"}).encode()
                try:
                    socket.send_fds(held, [call], [0, 1, 2])
                except PermissionError:
                    break  # Linux 6.16: the node's end says that it takes none
            held.detach()
        session.close()
        await await_until(lambda: not line.channel._sessions, "the session to end")
        assert len(os.listdir("/proc/self/fd")) <= before

    in_line(scenario)


def flood(attempt: FakeAttempt, over: threading.Event) -> int:
    """Call as fast as the node takes it until ``over``; return how many answers came."""
    count = 0
    with Session(attempt.far.fileno()) as session, socket.socket(fileno=os.dup(session.fileno())) as held:
        held.setblocking(False)
        while not over.is_set():
            with suppress(OSError):
                held.send(b'{"n":1,"op":"test.nothing"}')
            with suppress(OSError):
                while held.recv(1024):
                    count += 1
            over.wait(0.0002)
    return count


def honest(line: Line) -> float:
    """Return the median time of a call, in seconds."""
    took = []
    with Session(line.attempt.far.fileno()) as session:
        for _ in range(50):
            began = time.perf_counter()
            session.call("test.nothing")
            took.append(time.perf_counter() - began)
    return sorted(took)[25]


def test_attack_41_a_flood_waits_unread_and_others_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four attempts call as fast as they can: none is served beyond its rate; a fifth one's calls wait for none."""
    monkeypatch.setattr(channels, "BURST", 100.0)
    monkeypatch.setattr(channels, "CALLS_PER_S", 500.0)

    async def scenario(line: Line) -> None:
        over = threading.Event()
        attempts = [FakeAttempt() for _ in range(4)]
        others = [line.exchange.channel(who.run, who.spec, one) for one in attempts for who in [rig.caller()]]
        for other in others:
            other.listen()
        floods = [asyncio.ensure_future(talk(partial(flood, attempt, over))) for attempt in attempts]
        began = time.monotonic()
        median_s = await talk(lambda: honest(line))
        await apause(0.2)
        over.set()
        counts = await asyncio.gather(*floods)
        most = 100 + 500 * (time.monotonic() - began + 0.1)
        for other, attempt in zip(others, attempts, strict=True):
            other.close()
            attempt.close()
        assert 0 < min(counts) <= max(counts) <= most
        # Threads of one interpreter share it with the loop; alone, a call takes some 35 microseconds.
        assert median_s < 0.1

    in_line(scenario)


def test_a_flood_of_asks_for_sessions_is_read_as_slowly_as_it_may_come() -> None:
    """What is over the rate is answered BUSY, and read later."""
    now = [0.0]

    async def scenario(line: Line) -> None:
        sent = 0
        line.attempt.far.setblocking(False)
        for _ in range(400):
            try:
                line.attempt.far.send(frames.pack(Op.OPEN))
                sent += 1
            except BlockingIOError:
                break
        await await_until(lambda: "open" in line.channel._timers, "the channel to rest")
        assert line.channel._made <= MAX_SESSIONS
        assert sent > channels._OPENS_BURST

    in_line(scenario, clock=lambda: now[0])


def test_a_job_that_calls_nothing_costs_no_more_than_the_object() -> None:
    """Until its channel is listened to, nothing is watched, made or scheduled; its end touches nothing."""

    async def scenario(line: Line) -> None:
        attempt, who = FakeAttempt(), rig.caller()
        plug = line.exchange.plug(who.run, who.spec, attempt)
        assert not line.exchange.pipes._readers
        plug.close()
        plug.listen()
        assert not line.exchange.pipes._readers
        attempt.close()

    in_line(scenario, listen=False)


def test_a_job_with_grants_for_calls_is_listened_to_from_its_start() -> None:
    """Its first call waits for nothing."""

    async def scenario(line: Line) -> None:
        attempt, who = FakeAttempt(), rig.caller(spawn=2)
        plug = line.exchange.plug(who.run, who.spec, attempt)
        assert attempt.channel.fileno() in line.exchange.pipes._readers
        plug.close()
        assert not line.exchange.pipes._readers
        attempt.close()

    in_line(scenario, listen=False)


def test_a_worker_that_reads_its_channel_itself_passes_its_asks_on() -> None:
    """A reused worker's attempt calls for each OPEN; after its end it calls for nothing."""

    async def scenario(line: Line) -> None:
        attempt, who = FakeAttempt(), rig.caller()
        attempt.itself = True
        plug = line.exchange.plug(who.run, who.spec, attempt)
        attempt.open()
        word, fds, _, _ = socket.recv_fds(attempt.far, 64, 1)
        assert word == frames.pack(Op.SESSION)
        plug.close()
        assert not attempt.listening
        with socket.socket(fileno=fds[0]) as session:
            assert session.recv(10) == b""
        attempt.close()

    in_line(scenario, listen=False)


def test_attack_41_a_call_that_takes_long_to_read_counts_as_several() -> None:
    """A job gets no more of the node's loop by making each call as costly as it can."""
    now = [0.0]

    async def scenario(line: Line) -> None:
        def nasty() -> int:
            with Session(line.attempt.far.fileno()) as session, socket.socket(fileno=os.dup(session.fileno())) as held:
                held.settimeout(0.2)
                call = b'{"n":1,"op":"test.echo","text":[' + b"[1.5,1]," * 7500 + b"1]}"
                count = 0
                with suppress(OSError):
                    while True:
                        held.send(call)
                        held.recv(1024)
                        count += 1
                return count

        assert 0 < await talk(nasty) < 200

    in_line(scenario, clock=lambda: now[0])


def test_a_job_that_asks_for_sessions_one_after_the_other_gets_each_of_them() -> None:
    """A shell that calls in a loop waits a moment, and is refused nothing."""

    async def scenario(line: Line) -> None:
        def process() -> int:
            count = 0
            for _ in range(45):
                with Session(line.attempt.far.fileno()) as session:
                    count += session.call("test.tidy") is True
            return count

        assert await talk(process) == 45
        assert line.channel._made == 45

    in_line(scenario)
