"""Captured output is live, bounded, in order, and never waits for a pipe that somebody else holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from node_agent.output import HEAD_BYTES, TAIL_BYTES, Capture, Chunk
from node_agent.pipes import Pipes
from tests.support.wait import await_until


class Sink:
    """Remembers what was stored."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    async def __call__(self, chunks: list[Chunk]) -> None:
        self.chunks += chunks

    def text(self, fd: int) -> bytes:
        """What one descriptor wrote, as stored."""
        return b"".join(chunk.data for chunk in self.chunks if chunk.fd == fd)


async def _captured(
    write: Callable[[int, int], object], *, limit_bytes: int = 1 << 30, hold: bool = False
) -> tuple[Sink, Capture, int]:
    """Run ``write(out, err)`` beside a capture, then finish it; with ``hold`` somebody keeps a write end open."""
    out, out_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    err, err_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for fd in (out_w, err_w):
        os.set_blocking(fd, True)
    hits: list[int] = []
    sink, pipes = Sink(), Pipes()
    capture = Capture((out, err), sink, limit_bytes=limit_bytes, on_limit=lambda: hits.append(1), watch=pipes)
    await asyncio.get_running_loop().run_in_executor(None, write, out_w, err_w)
    os.close(err_w)
    if not hold:
        os.close(out_w)
    await capture.finish()
    if hold:
        os.close(out_w)
    pipes.close()
    return sink, capture, len(hits)


def test_output_of_both_descriptors_is_kept_with_its_place() -> None:
    """Every byte arrives once, under its descriptor, with its offset in the whole."""

    def write(out: int, err: int) -> None:
        os.write(out, b"one\n")
        os.write(err, b"two\n")

    sink, capture, _ = asyncio.run(_captured(write))
    assert (sink.text(1), sink.text(2)) == (b"one\n", b"two\n")
    assert capture.total_bytes == 8
    assert sorted(chunk.offset for chunk in sink.chunks) == [0, 4]


def test_k04_a_held_pipe_does_not_delay_the_end() -> None:
    """A background child that holds the pipe: what was written is taken, the rest is not waited for."""
    sink, _, _ = asyncio.run(asyncio.wait_for(_captured(lambda out, _err: os.write(out, b"done\n"), hold=True), 5))
    assert sink.text(1) == b"done\n"


def test_the_middle_of_a_flood_is_cut_and_marked() -> None:
    """First 4 MiB and last 256 KiB are kept, the cut carries its size."""
    total = HEAD_BYTES + 3 * TAIL_BYTES

    def write(out: int, _err: int) -> None:
        left = total
        while left:
            left -= os.write(out, b"x" * min(left, 1 << 16))

    sink, capture, _ = asyncio.run(_captured(write))
    cut = [chunk for chunk in sink.chunks if chunk.skipped]
    assert len(cut) == 1
    assert capture.total_bytes == total
    assert len(sink.text(1)) + cut[0].skipped == total
    assert HEAD_BYTES + TAIL_BYTES <= len(sink.text(1)) <= HEAD_BYTES + TAIL_BYTES + (1 << 16)


def test_the_output_limit_is_told_once() -> None:
    """Over the limit the supervisor hears of it, one time."""
    _, _, hits = asyncio.run(_captured(lambda out, _err: os.write(out, b"x" * 1000), limit_bytes=10))
    assert hits == 1


def test_output_is_stored_while_the_job_runs() -> None:
    """The first line is stored before the pipe ends."""

    async def check() -> None:
        out, out_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        err, err_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        sink, pipes = Sink(), Pipes()
        capture = Capture((out, err), sink, limit_bytes=1 << 20, on_limit=lambda: None, watch=pipes)
        os.write(out_w, b"early\n")
        await await_until(lambda: sink.text(1) == b"early\n", "the line is stored")
        os.close(out_w)
        os.close(err_w)
        await capture.finish()
        assert capture.evidence == "early\n"
        pipes.close()

    asyncio.run(check())


def test_pipes_are_told_apart_and_forgotten() -> None:
    """Each reader hears of its own pipe alone, of none after ``forget``, and a closed one leaves nothing behind."""

    async def check() -> None:
        pipes, heard = Pipes(), []
        ends = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(3)]
        before = len(os.listdir("/proc/self/fd"))

        def reader(fd: int) -> None:
            heard.append((fd, os.read(fd, 100)))
            # Of two that are ready in the same look, the first one takes the second one away.
            pipes.forget(ends[2][0] if fd == ends[1][0] else ends[1][0])

        for near, _ in ends:
            pipes.watch(near, reader)
        os.write(ends[0][1], b"a")
        await await_until(lambda: heard == [(ends[0][0], b"a")], "the first pipe is read")
        os.write(ends[1][1], b"b")
        os.write(ends[2][1], b"c")
        await await_until(lambda: len(heard) == 2, "the third pipe is read, the second was forgotten")
        assert heard[1] == (ends[2][0], b"c")
        pipes.forget(ends[1][0])
        pipes.close()
        pipes.close()
        assert len(os.listdir("/proc/self/fd")) == before
        for pair in ends:
            for fd in pair:
                os.close(fd)

    asyncio.run(check())
