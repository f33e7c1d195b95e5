"""What a task waits for and goes on with at once: told, failed, cancelled, from callbacks and from other tasks."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from broker.egress import keys
from broker.egress.errors import SecretRefusedError
from broker.egress.keys import Keys, Leave
from broker.egress.prompt import Prompt
from broker.egress.rules import Destination
from broker.egress.streams import CHUNK_BYTES, Streams
from tests.support.wait import await_until

HOST = Destination("a.example", 443)


def test_who_is_told_by_a_callback_goes_on_within_it() -> None:
    """The task has gone on before the callback goes on; later words are not heard."""

    async def main() -> None:
        loop, order = asyncio.get_running_loop(), []
        prompt: Prompt[int] = Prompt(loop)

        async def waits() -> None:
            order.append(await prompt)
            order.append(await prompt)

        def tells() -> None:
            prompt.tell(1)
            order.append(3)
            prompt.tell(2)
            prompt.fail(ValueError())

        task = loop.create_task(waits())
        await asyncio.sleep(0)
        loop.call_soon(tells)
        await task
        assert order == [1, 1, 3]

    asyncio.run(main())


def test_who_is_told_by_a_task_goes_on_after_it() -> None:
    """One task never runs within another."""

    async def main() -> None:
        prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
        order = []

        async def waits() -> None:
            order.append(await prompt)

        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        prompt.tell(1)
        assert not order
        await task
        assert order == [1]

    asyncio.run(main())


def test_errors_and_time_reach_who_waits() -> None:
    """A failure is raised there; so is the end of a time limit, and a cancelled one hears nothing more."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        failed: Prompt[int] = Prompt(loop)
        loop.call_soon(failed.fail, KeyError("x"))
        with pytest.raises(KeyError):
            await failed
        late: Prompt[int] = Prompt(loop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await late
        late.tell(1)
        with pytest.raises(asyncio.CancelledError):
            late.result()
        before: Prompt[int] = Prompt(loop)
        before.tell(2)
        assert await before == 2

    asyncio.run(main())


def test_streams_hold_what_nobody_reads_and_no_more() -> None:
    """Small pieces come together, reading stops at a bound, and all of it comes in the end, and then the end."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        end, far = socket.socketpair()
        far.setblocking(False)
        streams = await Streams.over(end)
        sent = 0
        for piece in (b"ab", b"cde"):
            await loop.sock_sendall(far, piece)
        assert await streams.exactly(4) == b"abcd"
        assert await streams.read(9) == b"e"
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while sent < 4 << 20:
                    sent += CHUNK_BYTES
                    await loop.sock_sendall(far, bytes(CHUNK_BYTES))
        assert 2 * CHUNK_BYTES < sent < 2 << 20
        far.shutdown(socket.SHUT_WR)
        assert streams.idle()
        got = 0
        while data := await streams.read(CHUNK_BYTES):
            assert len(data) <= CHUNK_BYTES
            got += len(data)
        assert sent - CHUNK_BYTES <= got <= sent
        assert not streams.idle()
        with pytest.raises(ConnectionAbortedError):
            await streams.exactly(1)
        await streams.send(b"still")
        assert await loop.sock_recv(far, 9) == b"still"
        ended: list[bool] = []
        streams.watch(lambda: ended.append(True))
        assert ended
        streams.abort()
        with pytest.raises(ConnectionResetError):
            await streams.send(b"x")
        await asyncio.sleep(0)
        far.close()

    asyncio.run(main())


def test_each_question_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is never answered is refused in time, also behind one that was; the end of the line refuses all."""
    monkeypatch.setattr(keys, "ANSWER_S", 0.1)

    async def refused(asked: list[asyncio.Task[Leave]]) -> bool:
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return all(isinstance(one, SecretRefusedError) for one in answers)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lost: list[bool] = []
        line = Keys(near, lambda: lost.append(True))
        answered = asyncio.ensure_future(line.use(HOST))
        await asyncio.sleep(0)
        far.send(b'{"id":1,"ok":false,"err":"pending"}')
        with pytest.raises(SecretRefusedError, match="person"):
            await answered
        started_s = loop.time()
        for _ in range(2):
            late = [asyncio.ensure_future(line.use(HOST)) for _ in range(2)]
            assert all(
                isinstance(one, SecretRefusedError) for one in await asyncio.gather(*late, return_exceptions=True)
            )
        assert 0.2 <= loop.time() - started_s < 5
        last = [asyncio.ensure_future(line.use(HOST)) for _ in range(3)]
        await asyncio.sleep(0)
        far.close()
        assert await refused(last)
        await await_until(lambda: lost == [True] and line.closed, "the end of the line to be told")

    asyncio.run(main())
