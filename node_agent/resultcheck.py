"""Reads what a task wrote as its result, large ones in a process of their own, so that none holds up the agent's loop.

Called by the supervisor and, as ``python -I -B -m node_agent.resultcheck LIMIT``, by itself: the bytes come on
descriptor 0, the checked form goes to descriptor 1. Must never let bytes of a job be taken for a result that were not
parsed within their limit. One hostile result of 8 MiB takes seconds to parse: on the loop it would delay the lease, and
with it kill the jobs of every tenant (attacks 25, 41).
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from node_agent.containment.errors import ResultTooLarge
from runner.wire import codec
from runner.wire.errors import WireError
from runner.wire.flow import MAX_SPAN_S

__all__ = ["Reader", "Result", "main", "parse"]

MODULE: Final = "node_agent.resultcheck"
#: Parsed on the loop: at most so many bytes with so many values in them, about 4 ms at worst.
INLINE_BYTES: Final = 256 * 1024
INLINE_TOKENS: Final = 8192
TIMEOUT_S: Final = 60.0
_MEMORY_BYTES: Final = 2 << 30
_TEXT_LIMIT: Final = 64 * 1024
_VALUE, _ERROR, _PROBLEM = b"v", b"e", b"p"
_UNREADABLE: Final = "the result is not readable"


@dataclass(frozen=True, slots=True)
class Result:
    """What came back on the result descriptor: ``value`` as canonical JSON, or an ``error``, or a ``problem``.

    ``retry_in_s``: with an error, the task asks for another attempt so many seconds later.
    """

    value: bytes | None = None
    error: dict[str, str] | None = None
    problem: str | None = None
    retry_in_s: float | None = None


class Reader:
    """Reads results for one boot, large ones one at a time."""

    def __init__(self, *, python: str = sys.executable) -> None:
        self._python = python
        self._turn = asyncio.Lock()

    async def take(self, take: Callable[[int], bytes | None], limit_bytes: int) -> Result:
        """Return what ``take`` finds within the limit, read."""
        try:
            raw = take(limit_bytes)
        except ResultTooLarge as error:
            return Result(problem=str(error))
        return await self.read(raw, limit_bytes)

    async def read(self, raw: bytes | None, limit_bytes: int) -> Result:
        """Return what a task wrote. The bytes are the job's own and may be anything."""
        if raw is None:
            return Result(problem="the task ended without a result")
        if len(raw) <= INLINE_BYTES and sum(map(raw.count, (b"[", b"{", b",", b":"))) <= INLINE_TOKENS:
            return _result(parse(raw, limit_bytes))
        async with self._turn:
            return _result(await self._apart(raw, limit_bytes))

    async def _apart(self, raw: bytes, limit_bytes: int) -> bytes:
        given, taken = _memory(raw), _memory(b"")
        try:
            process = subprocess.Popen(
                [self._python, "-I", "-B", "-m", MODULE, str(limit_bytes)],
                stdin=given,
                stdout=taken,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
            try:
                await _ended(process.pid)
            finally:
                process.kill()
                process.wait()
            size = os.fstat(taken).st_size
            return os.pread(taken, size, 0) if process.returncode == 0 else _PROBLEM + _UNREADABLE.encode()
        finally:
            os.close(given)
            os.close(taken)


def parse(raw: bytes, limit_bytes: int) -> bytes:
    """Return the checked form: one letter for the kind, then the canonical value, the error's fields or a text."""
    try:
        record = codec.load(raw, limit_bytes=limit_bytes + _TEXT_LIMIT)
        if isinstance(record, dict) and set(record) == {"ok"}:
            return _VALUE + codec.dump(record["ok"])
        if isinstance(record, dict) and set(record) == {"error"} and isinstance(record["error"], dict):
            told = {key: record["error"].get(key, "") for key in ("type", "message", "traceback")}
            fields = {key: str(value)[:_TEXT_LIMIT] for key, value in told.items()}
            return _ERROR + codec.dump(fields | _asked(record["error"].get("retry_in_s")))
    except (WireError, MemoryError) as error:
        return _PROBLEM + f"{_UNREADABLE}: {str(error) or 'too large'}".encode()
    return _PROBLEM + b"the result has an unknown form"


def _asked(in_s: codec.Json) -> dict[str, codec.Json]:
    """A wait that is none is not asked for: the number is the job's own word."""
    good = isinstance(in_s, int | float) and not isinstance(in_s, bool) and 0 <= in_s <= MAX_SPAN_S
    return {"retry_in_s": str(in_s)} if good else {}


def main(words: Sequence[str]) -> None:
    """Read descriptor 0 to its end, write the checked form to descriptor 1."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S)))
    with open(0, "rb", closefd=False) as given, open(1, "wb", closefd=False) as taken:
        taken.write(parse(given.read(), int(words[1])))


def _result(checked: bytes) -> Result:
    kind, body = checked[:1], checked[1:]
    if kind == _VALUE:
        return Result(value=body)
    if kind == _ERROR:
        told = codec.load(body)
        if not isinstance(told, dict):
            return Result()
        in_s = told.pop("retry_in_s", None)
        error = {key: str(value) for key, value in told.items()}
        return Result(error=error, retry_in_s=None if in_s is None else float(str(in_s)))
    return Result(problem=body.decode("utf-8", "replace") or _UNREADABLE)


def _memory(data: bytes) -> int:
    fd = os.memfd_create("result", os.MFD_CLOEXEC)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _ended(pid: int) -> None:
    """Wait until a child has ended, at most TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)
    done = asyncio.Event()
    loop.add_reader(pidfd, done.set)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), TIMEOUT_S)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


if __name__ == "__main__":
    main(sys.argv)
