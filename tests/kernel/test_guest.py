"""What a job calls its node with: sessions per thread and process, progress, artifacts, and the command."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from redis.asyncio import Redis

from node_agent.kernel.artifacts import Artifacts
from node_agent.kernel.progress import Progress
from node_agent.kernel.table import table_of
from runner.guest import calls, progress, signals
from runner.guest.calls import CallRefused, Session
from runner.wire.artifact import MAX_ARTIFACT_BYTES, PIECE_BYTES
from runner.wire.calls import ErrorCode
from runner.wire.event import EventType
from runner.wire.frames import FD_KERNEL
from tests.kernel import rig
from tests.kernel.line import Line, in_line, talk
from tests.support.valkey import Valkey
from tests.support.wait import await_until

ROOT = Path(__file__).parents[2]
GUEST_MAIN = ROOT / "runner" / "guest" / "command.py"
GUEST = ROOT / "runner" / "guest" / "bin" / "ringfence-guest"


@pytest.fixture
def as_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """`call` in this process goes to the line that the test sets."""
    return monkeypatch


def set_line(patch: pytest.MonkeyPatch, line: Line) -> None:
    """Make the line's far end this process's way to its node."""
    patch.setattr(calls, "FD_KERNEL", line.attempt.far.fileno())


def test_each_thread_has_a_session_of_its_own_and_gives_it_back(as_job: pytest.MonkeyPatch) -> None:
    """Threads never get each other's answers, and leave no session."""

    async def scenario(line: Line) -> None:
        set_line(as_job, line)

        def process() -> list[bool]:
            found: list[bool] = []

            def thread(number: int) -> None:
                mine = f"thread {number} "
                found.extend(calls.call("test.echo", text=mine, times=3) == mine * 3 for _ in range(20))

            threads = [threading.Thread(target=thread, args=(number,)) for number in range(8)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            return found

        found = await talk(process)
        assert len(found) == 160
        assert all(found)
        await await_until(lambda: not line.channel._sessions, "the sessions of ended threads to be given back")

    in_line(scenario)


def test_a_child_of_a_fork_opens_a_session_of_its_own(as_job: pytest.MonkeyPatch) -> None:
    """Its answers never mix with its parent's."""

    async def scenario(line: Line) -> None:
        set_line(as_job, line)

        def process() -> tuple[object, bytes, object]:
            first = calls.call("test.who")
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    os.write(writer, repr(calls.call("test.who")).encode())
                finally:
                    os._exit(0)
            os.close(writer)
            said = os.read(reader, 1000)
            os.close(reader)
            os.waitpid(pid, 0)
            return first, said, calls.call("test.who")

        first, said, last = await talk(process)
        assert first == last == [line.caller.job, 1]
        assert said == repr([line.caller.job, 2]).encode()

    in_line(scenario)


def test_a_process_without_a_way_to_a_node_is_told_so() -> None:
    """Outside a job nothing hangs."""
    with socket.socket() as free:
        number = free.fileno()
    with pytest.raises(CallRefused) as caught:
        Session(number)
    assert caught.value.code == ErrorCode.ENDED


def test_a_node_that_answers_nothing_costs_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPEN without an answer ends as a timeout."""
    monkeypatch.setattr(calls, "OPEN_S", 0.05)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far, pytest.raises(CallRefused) as caught:
        Session(far.fileno())
    assert caught.value.code == ErrorCode.TIMEOUT


def test_the_command_makes_calls_through_the_inherited_descriptor() -> None:
    """A shell of a command job needs no package of its own; refusals are exit code 1, wrong words 2."""

    async def scenario(line: Line) -> None:
        env = {"RINGFENCE_PYTHON": sys.executable, "PATH": f"{GUEST.parent}:/bin:/usr/bin"}

        def guest(*words: str) -> subprocess.CompletedProcess[str]:
            far = os.dup(line.attempt.far.fileno())
            try:
                return subprocess.run(
                    ["ringfence-guest", *words],
                    env=env,
                    text=True,
                    capture_output=True,
                    check=False,
                    pass_fds=(FD_KERNEL,),
                    preexec_fn=lambda: os.dup2(far, FD_KERNEL),
                )
            finally:
                os.close(far)

        os.dup2(line.attempt.far.fileno(), FD_KERNEL)
        try:
            said = await talk(lambda: guest("call", "test.echo", '{"text": "ab", "times": 2}'))
            refused = await talk(lambda: guest("call", "test.refuse", '{"text": "why"}'))
            wrong = await talk(lambda: guest("call"))
        finally:
            os.close(FD_KERNEL)
        assert (said.returncode, said.stdout) == (0, '"abab"\n'), said.stderr
        assert (refused.returncode, refused.stderr) == (1, "ringfence-guest: not_found: why\n")
        assert wrong.returncode == 2

    in_line(scenario)


def test_guest_calls_are_loaded_by_nobody_who_makes_none() -> None:
    """The zygote and a task without calls hold neither the client nor any part."""
    code = "import sys, runner.guest.bootstrap as b; b.preload(); print([n for n in sys.modules if 'guest.calls' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def with_parts(valkey: Valkey) -> Redis:
    """A client of the store for the parts of one test."""
    return Redis(unix_socket_path=str(valkey.socket))


async def served(line: Line, redis: Redis, valkey: Valkey) -> None:
    """Put progress and artifacts into the line's table."""
    around = rig.around(redis, told=line.around.told)
    line.exchange.desk.table = table_of(Artifacts(around).entries(), Progress(around, 0.05).entries())  # type: ignore[union-attr] # a line has one
    line.around.ending.extend(around.ending)


def test_attack_10_an_artifact_is_bytes_and_never_a_path(
    valkey: Valkey, as_job: pytest.MonkeyPatch, home: Path
) -> None:
    """The node is told a name that can be no path; a link is followed by the job itself, with the job's rights."""

    async def scenario(line: Line) -> None:
        redis = with_parts(valkey)
        set_line(as_job, line)
        await served(line, redis, valkey)
        body = os.urandom(3 * PIECE_BYTES + 17)
        file = home / "body"
        file.write_bytes(body)

        def process() -> None:
            for name in ("../x", "/etc/shadow", ".x", "a/b", "", "a\0b", "x" * 129, "-x"):
                with pytest.raises(CallRefused) as caught:
                    progress.artifact(name, b"data")
                assert caught.value.code == ErrorCode.BAD_REQUEST
            progress.artifact("report.bin", file)
            progress.artifact("note", "text")

        await talk(process)
        key = line.around.keys.artifacts(line.caller.job)
        names = set(await redis.hkeys(key))
        assert {b"m:report.bin", b"m:note", b"used"} <= names
        assert len(names) == 2 + 1 + 4 + 1
        assert await redis.ttl(key) > 0
        await redis.aclose()

    in_line(scenario)


def test_attack_10_artifacts_are_bounded_and_what_is_given_up_leaves_nothing(
    valkey: Valkey, as_job: pytest.MonkeyPatch
) -> None:
    """Over 8 MiB a job is refused and its pieces are gone; a session that dies in the middle leaves none."""

    async def scenario(line: Line) -> None:
        redis = with_parts(valkey)
        set_line(as_job, line)
        await served(line, redis, valkey)
        key = line.around.keys.artifacts(line.caller.job)

        def process() -> None:
            with pytest.raises(CallRefused) as caught:
                progress.artifact("big", b"x" * (MAX_ARTIFACT_BYTES + 1))
            assert caught.value.code == ErrorCode.QUOTA
            progress.artifact("a", b"x" * 100)
            progress.artifact("a", b"y" * 200)
            held = progress.Artifact("torn")
            held.write(b"z" * (2 * PIECE_BYTES))
            with pytest.raises(CallRefused) as caught:
                calls.call("artifact.put", name="torn", data="eA==", offset=5, last=True)
            assert caught.value.code == ErrorCode.CONFLICT

        await talk(process)

        async def settled() -> bool:
            gc.collect()  # the refusals hold the thread's session in a cycle
            return await redis.hlen(key) == 3

        await await_until(settled, "the pieces of the dead session to go")
        assert int(await redis.hget(key, "used") or 0) == 200 + 4096
        await redis.aclose()

    in_line(scenario)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "policy, progress, signals, tools"),
        ("call op {bad", "no JSON"),
        ("policy may tool.call x {bad", "no JSON"),
        ("tools call x {bad", "JSON object"),
        ("mail send box {bad", "Expecting"),
        ("signals send FOO", "there are KILL"),
        ("files put", "read from stdin"),
        ("jobs run --read /srv -- true", "not '--read'"),
        ("jobs run --name -- true", "not '--name'"),
    ],
)
def test_wrong_words_are_told_in_a_line(words: str, says: str) -> None:
    """No traceback, whatever part they are for; exit 2."""
    done = subprocess.run([sys.executable, "-S", str(GUEST_MAIN), *words.split()], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr, says in done.stderr) == (2, False, True), done.stderr


def test_a_mask_waits_for_no_thread_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the node ended the session, whoever holds signals up is told, and does not wait for ever."""
    monkeypatch.setattr(signals, "_LOOK_S", 0.01)
    ear = object.__new__(signals._Ear)
    ear._lock, ear._masked, ear._thread = threading.Lock(), threading.Event(), threading.Thread(target=lambda: None)
    ear._stirred, ear._stir = os.pipe()
    ear._thread.start()
    ear._thread.join()
    with pytest.raises(CallRefused) as caught:
        ear.mask(frozenset())
    assert caught.value.code == ErrorCode.ENDED
    for fd in (ear._stirred, ear._stir):
        os.close(fd)


def test_an_older_attempt_can_not_replace_what_a_newer_one_gave(valkey: Valkey) -> None:
    """Its piece is dropped, and it is told."""

    async def scenario() -> None:
        redis = with_parts(valkey)
        part = Artifacts(rig.around(redis))
        newer = rig.caller(attempt=2)
        older = rig.caller(newer.spec, attempt=1)
        put = {"name": "a", "data": "eA=="}
        await rig.ask(part.entries(), newer, "artifact.put", **put)
        assert await rig.refused(part.entries(), older, "artifact.put", **put) == ErrorCode.CONFLICT
        assert await redis.hlen(part._around.keys.artifacts(newer.job)) == 3
        await redis.aclose()

    asyncio.run(scenario())


def test_progress_is_told_once_a_moment_and_its_last_word_always(as_job: pytest.MonkeyPatch) -> None:
    """Ten thousand words cost a few events; what was said last is the last one, also at the end."""

    async def scenario(line: Line) -> None:
        set_line(as_job, line)
        around = line.around
        assert line.exchange.desk is not None
        line.exchange.desk.table = table_of(Progress(around, 5.0).entries())

        def process() -> None:
            for number in range(300):
                progress.set(number / 300, f"step {number}")
            for wrong in (1.5, -0.1, float("nan")):
                with pytest.raises(CallRefused) as caught:
                    progress.set(wrong)
                assert caught.value.code == ErrorCode.BAD_REQUEST

        await talk(process)
        line.channel.close()
        told = [detail["note"] for kind, detail in line.told if kind == EventType.JOB_PROGRESS]
        assert told == ["step 0", "step 299"]

    in_line(scenario)
