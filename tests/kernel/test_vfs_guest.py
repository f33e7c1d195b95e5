"""What jobs use: files.open as Python's open, whole files, errors as OSError, threads, forks, state."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable

import pytest

from node_agent.kernel.caller import Caller
from runner.guest import calls, files, state
from runner.guest.calls import CallRefused
from runner.wire.calls import ErrorCode
from tests.kernel.disks import disk, in_job, job, memory
from tests.support.valkey import Valkey

W = "/mem/working"
Runs = Callable[[Callable[[], None]], None]
BIG = b"0123456789" * 20_000


@pytest.fixture
def as_job(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs a function as a process of a job without a store."""
    return lambda work: asyncio.run(in_job(memory(), job(), monkeypatch, work))


def fails(number: int, work: Callable[[], object]) -> None:
    """The call fails with this error, and says why."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what is compared
        work()
    assert caught.value.errno == number, errno.errorcode[caught.value.errno or 0]
    assert isinstance(caught.value.__cause__, CallRefused)


def test_files_open_is_what_open_is(as_job: Runs) -> None:
    """Every mode reads, writes, seeks, cuts and appends as the built-in does, in text and in bytes."""

    def work() -> None:
        with files.open(f"{W}/t", "w") as text:
            text.write("eins\nzwei\nüç\n")
        with files.open(f"{W}/t") as text:
            assert list(text) == ["eins\n", "zwei\n", "üç\n"]
        with files.open(f"{W}/t", "a") as text:
            text.write("drei\n")
        with files.open(f"{W}/t", "rb") as raw:
            assert raw.read() == "eins\nzwei\nüç\ndrei\n".encode()
        with files.open(f"{W}/b", "w+b") as raw:
            assert raw.write(BIG) == len(BIG)
            raw.seek(100_005)
            assert raw.read(5) == b"56789"
            raw.seek(-3, os.SEEK_END)
            raw.write(b"end")
            raw.truncate(150_000)
            raw.seek(0)
            assert raw.read() == BIG[:150_000]
        with files.open(f"{W}/b", "r+b") as raw:
            raw.seek(10)
            raw.write(b"xyz")
            assert raw.tell() == 13
        assert files.get(f"{W}/b")[8:15] == b"89xyz34"
        with files.open(f"{W}/x", "xb"):
            pass
        fails(errno.EEXIST, lambda: files.open(f"{W}/x", "x"))
        for mode in ("", "rw", "b", "r+", "rbt", "z"):
            with pytest.raises(ValueError, match=r"mode|text"):
                files.open(f"{W}/x", mode)  # type: ignore[call-overload] # no mode at all

    as_job(work)


def test_errors_are_those_of_open(as_job: Runs) -> None:
    """A refusal is the OSError that a program expects."""

    def work() -> None:
        files.mkdir(f"{W}/d/e/f", parents=True)
        files.mkdir(f"{W}/d/e", parents=True)
        files.put(f"{W}/a", b"1")
        for number, call in (
            (errno.ENOENT, lambda: files.get(f"{W}/none")),
            (errno.EACCES, lambda: files.get("/state/a")),
            (errno.EROFS, lambda: files.put("/policy/a", b"")),
            (errno.EISDIR, lambda: files.open(f"{W}/d")),
            (errno.ENOTDIR, lambda: files.get(f"{W}/a/b")),
            (errno.ENOTEMPTY, lambda: files.remove(f"{W}/d", directory=True)),
            (errno.EEXIST, lambda: files.mkdir(f"{W}/d")),
            (errno.EINVAL, lambda: files.get("a")),
            (errno.ESTALE, lambda: files.put(f"{W}/a", b"", if_version=0)),
            (errno.EFBIG, lambda: files.put(f"{W}/big", bytes(2 << 20))),
            (errno.EEXIST, lambda: files.mkdir(f"{W}/a", parents=True)),
        ):
            fails(number, call)
        with pytest.raises(files.Conflict):
            files.put(f"{W}/a", b"", if_version=0)
        assert files.get(f"{W}/none", default=b"x") == b"x"
        assert [found.path for found in files.listdir(W)] == [f"{W}/a", f"{W}/d"]

    as_job(work)


def test_a_big_file_is_there_whole_or_not_at_all(as_job: Runs) -> None:
    """What is over one call's bound is written aside: the old content stays until the new one is all there."""

    def work() -> None:
        files.put(f"{W}/a", b"old")
        with pytest.raises(OSError, match="at most") as caught:
            files.put(f"{W}/a", bytes((1 << 20) + 1))
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, f"{W}/a")
        assert files.get(f"{W}/a") == b"old"
        files.put(f"{W}/a", BIG, ttl_s=60)
        assert files.get(f"{W}/a") == BIG
        found = files.stat(f"{W}/a")
        assert (found.size, found.directory) == (len(BIG), False)
        assert found.expires_in_s is not None
        assert [one.path for one in files.listdir(W)] == [f"{W}/a"]

    as_job(work)


def test_a_file_may_be_used_by_any_thread_but_by_no_other_process(as_job: Runs) -> None:
    """Threads share the process's files; the child of a fork has none of them, and can open its own."""

    def work() -> None:
        log = files.open(f"{W}/log", "ab")

        def write(number: int) -> None:
            for _ in range(20):
                files.put(f"{W}/log", f"{number}\n", append=True)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pid = os.fork()
        if not pid:
            try:
                log.write(b"child")
                log.flush()
            except OSError as error:
                files.put(f"{W}/child", errno.errorcode[error.errno or 0])
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        log.write(b"end")
        log.close()
        lines = files.get(f"{W}/log").decode().split()
        assert sorted(lines) == sorted([*"0123"] * 20 + ["end"])
        assert files.get(f"{W}/child") == b"EBADF"
        with pytest.raises(ValueError, match="closed"):
            log.write(b"x")

    as_job(work)


def test_the_next_attempt_of_a_reused_worker_has_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened in the attempt before is closed for good, and the first call of the next one just works."""

    async def main() -> None:
        left = []

        def first() -> None:
            files.put(f"{W}/a", b"1")
            left.append(files.open(f"{W}/a", "r+b"))

        def second() -> None:
            calls.forget()
            assert list(files.listdir(W)) == []
            with pytest.raises(OSError, match="session"):
                left[0].read()

        node = memory()
        await in_job(node, job(), monkeypatch, first, tidy=False)
        await in_job(node, job(), monkeypatch, second)

    asyncio.run(main())


def test_sync_publishes_and_state_saves_values(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt finds what was synced or saved; names are plain; what is not granted is refused."""

    async def main() -> None:
        async with disk(valkey) as one:
            who: Caller = job(state_bytes=1 << 20)

            def first() -> None:
                state.save("page", {"n": 1, "é": [None, True]})
                state.save("old", 1)
                state.drop("old")
                state.drop("old")
                log = files.open("/state/log", "wb")
                log.write(b"synced")
                files.sync(log)
                log.write(b" and lost")
                log.flush()
                assert files._held is not None
                files._held.close()  # as if the process died here
                log.write(b"more")
                with pytest.raises(OSError, match="session"):
                    log.close()
                for name in ("", "a/b", ".x"):
                    with pytest.raises(ValueError, match="name"):
                        state.save(name, 1)

            def second() -> tuple[object, object, list[str], bytes]:
                return state.load("page"), state.load("none", 0), state.names(), files.get("/state/log")

            await in_job(one, who, monkeypatch, first)
            found = await in_job(one, job(2, like=who), monkeypatch, second)
            assert found == ({"n": 1, "é": [None, True]}, 0, ["page"], b"synced")

    asyncio.run(main())


def test_calls_that_came_too_fast_are_made_again(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that saves in a loop waits instead of failing, but not for ever."""

    async def main() -> None:
        async with disk(valkey) as one:
            who = job(state_bytes=1 << 20)

            def many() -> str:
                for number in range(200):
                    state.save("n", number)
                monkeypatch.setattr(files, "_PATIENCE_S", 0.1)
                with pytest.raises(OSError, match="wait a moment") as caught:
                    state.save("n", -1)
                cause = caught.value.__cause__
                assert isinstance(cause, CallRefused)
                monkeypatch.setattr(files, "_PATIENCE_S", 10.0)
                clock.start()
                state.save("n", 1)
                return cause.code

            def later() -> None:
                one.now_s += 1

            clock = threading.Timer(0.05, later)
            assert await in_job(one, who, monkeypatch, many) == ErrorCode.SLOW_DOWN
            clock.join()

    asyncio.run(main())
