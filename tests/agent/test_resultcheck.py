"""What a task wrote as its result is anything: it is read within its limits and never holds up the agent."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from node_agent import endings
from node_agent.resultcheck import INLINE_BYTES, INLINE_TOKENS, Reader, Result, parse
from runner.wire.states import State
from tests.support.wait import apause

LIMIT = 8 << 20


def read(raw: bytes | None, python: str = sys.executable) -> Result:
    """Read one result."""

    async def main() -> Result:
        return await Reader(python=python).read(raw, LIMIT)

    return asyncio.run(main())


def many(part: bytes, count: int) -> bytes:
    """A result of ``count`` equal values."""
    return b'{"ok":[' + b",".join([part] * count) + b"]}"


@pytest.mark.parametrize("size", [1, INLINE_TOKENS, 20 * INLINE_TOKENS])
def test_small_and_large_results_are_read_alike(size: int) -> None:
    """In this process or in one of its own: the canonical value."""
    assert read(many(b" {} ", size)).value == b"[" + b",".join([b"{}"] * size) + b"]"
    text = b'{"ok":"' + b"x" * (INLINE_BYTES // 4 * size // INLINE_TOKENS) + b'"}'
    assert read(text).value == text[6:-1]
    error = b'{"error":{"message":"m","traceback":"' + b"t," * size + b'","type":"T"}}'
    told = read(error).error
    assert told is not None
    assert (told["type"], told["message"], told["traceback"][:2]) == ("T", "m", "t,")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        b"\xff" * 10,
        b"[" * LIMIT,
        b'{"ok":1',
        b'{"ok":1,"ok":2}',
        b"{}",
        b'{"error":1}',
        many(b"1e999", 20_000),
    ],
)
def test_what_is_no_result_is_a_problem(raw: bytes) -> None:
    """Cut, ambiguous, too deep, of another form: told as a problem, never stored."""
    found = read(raw)
    assert found.problem
    assert found.value is None
    assert found.error is None


def test_no_result_and_no_helper_are_problems(home: Path) -> None:
    """A reader that dies without a word reads nothing."""
    assert read(None).problem == "the task ended without a result"
    dead = home / "dead"
    dead.write_text("#!/bin/sh\nexit 3\n")
    dead.chmod(0o755)
    assert read(many(b"1", 100_000), str(dead)).problem == "the result is not readable"


def test_attack_25_a_large_result_does_not_hold_the_loop() -> None:
    """8 MiB of tiny values take seconds to parse; meanwhile the loop runs on, so no renewal is late."""
    raw = many(b"[]", 2_700_000)

    async def main() -> tuple[Result, float]:
        task = asyncio.get_running_loop().create_task(Reader().read(raw, LIMIT))
        late = 0.0
        while not task.done():
            before = time.monotonic()
            await apause(0.01)
            late = max(late, time.monotonic() - before)
        return task.result(), late

    result, late_s = asyncio.run(main())
    assert result.value is not None
    assert late_s < 0.5


def test_a_job_that_ran_is_never_refused() -> None:
    """A task may write what it likes, also that it was not known: it ran, and that is what the end says."""
    told = read(b'{"error":{"type":"UnknownTaskError","message":"I never ran"}}').error
    assert told is not None
    assert endings.exception_ending(told).state == State.FAILED


def test_parse_keeps_only_the_known_fields_of_an_error() -> None:
    """What else an error carries is dropped, and each text is cut."""
    raw = b'{"error":{"type":"T","extra":"x","message":"' + b"m" * 100_000 + b'"}}'
    found = parse(raw, LIMIT)
    assert found.startswith(b"e")
    assert b"extra" not in found
    assert len(found) < 66_000
