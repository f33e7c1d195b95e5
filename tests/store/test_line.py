"""The turn's own connection: commands as they travel, and no answer of one call ever read by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.connection import PythonRespSerializer
from redis.exceptions import NoScriptError, ResponseError

from node_agent.errors import StoreAwayError
from node_agent.line import Line, packed
from tests.support.valkey import Valkey


def on_line(valkey: Valkey, check: Callable[[Line], Awaitable[None]], timeout_s: float = 10.0) -> None:
    """Run ``check`` on a line to the store."""

    async def whole() -> None:
        client = Redis(unix_socket_path=str(valkey.socket))
        try:
            await check(Line(client, timeout_s))
        finally:
            await client.aclose()

    asyncio.run(whole())


@given(st.lists(st.one_of(st.binary(max_size=50), st.text(max_size=50, alphabet="aé€\r\n$*")), min_size=1, max_size=9))
def test_a_command_is_packed_as_the_library_packs_it(words: list[bytes | str]) -> None:
    """Byte for byte, for every kind of word that a script call holds."""
    library = PythonRespSerializer(6000, lambda word: word.encode() if isinstance(word, str) else word)
    assert packed([b"EVALSHA", *words]) == b"".join(library.pack(b"EVALSHA", *words))  # type: ignore[no-untyped-call]  # untyped in redis


def test_calls_take_turns(valkey: Valkey) -> None:
    """Each of many calls at once gets its own answer, large ones and errors among them."""

    async def check(line: Line) -> None:
        words = [["ECHO", str(number) * (1 + 9999 * (number % 5 == 0))] for number in range(40)]
        answers = await asyncio.gather(
            *(line.call(each) for each in words), line.call(["NO_SUCH"]), return_exceptions=True
        )
        assert answers[:-1] == [each[1].encode() for each in words]
        assert isinstance(answers[-1], StoreAwayError)
        assert isinstance(answers[-1].__cause__, ResponseError)
        with pytest.raises(StoreAwayError) as unknown:
            await line.call(["EVALSHA", "0" * 40, "0"])
        assert isinstance(unknown.value.__cause__, NoScriptError)

    on_line(valkey, check)


def test_an_interrupted_call_leaves_no_answer_behind(valkey: Valkey) -> None:
    """After a call that took too long, and one that was cancelled, the next one reads its own answer."""

    async def check(line: Line) -> None:
        assert await line.call(["ECHO", "first"]) == b"first"
        with pytest.raises(StoreAwayError):
            await line.call(["BLPOP", "nobody-pushes-here", "0"])
        assert await line.call(["ECHO", "second"]) == b"second"
        waiting = asyncio.create_task(line.call(["BLPOP", "nobody-pushes-here", "0"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await line.call(["ECHO", "third"]) == b"third"

    on_line(valkey, check, timeout_s=0.5)


def test_a_connection_that_the_store_closed_is_opened_again(valkey: Valkey) -> None:
    """The call that finds it closed says that the store is away; the next one works."""

    async def check(line: Line) -> None:
        number = await line.call(["CLIENT", "ID"])
        with valkey.client() as other:
            other.execute_command("CLIENT", "KILL", "ID", str(number))
        with pytest.raises(StoreAwayError):
            await line.call(["PING"])
        assert await line.call(["PING"]) in (b"PONG", "PONG")

    on_line(valkey, check)
