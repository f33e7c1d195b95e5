"""Values, exceptions and output on their way between an application and a real node."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from runner import Grants, Job, JobFailed, keyring
from runner.home import Home
from runner.testing import PrivateFleet, in_place
from runner.wire.errors import ValueTypeError
from tests.flow_shape.jobs import flow_jobs as jobs
from tests.support.fleet import CLI
from tests.support.wait import wait_until

STEP_S = 30.0
#: `RINGFENCE_TEST_FULL=1` goes as many rounds as the scenario asks for.
ROUNDS = 200 if os.environ.get("RINGFENCE_TEST_FULL") else 4
PROGRAMS = Path(__file__).parent / "jobs"
#: Where the fault lies in each value that has no form on the wire, as a result and as the first argument.
PLACES = {
    "file": "TextIOWrapper has no form on the wire",
    "lambda": "function has no form on the wire",
    "generator": "generator has no form on the wire",
    "nan": ".deep[1]: NaN and Infinity have no JSON form",
    "infinity": ": NaN and Infinity have no JSON form",
    "surrogate": ": holds a lone surrogate",
    "set": "set has no form on the wire",
    "large": ": an integer of more than 64 bits",
    "reduce": "Unpicklable has no form on the wire",
    "cycle": "[0]: contains itself",
    "naive": ": a datetime without zone",
    "key": ": a key is int, JSON keys are text",
}


def test_a_p01_exceptions_that_can_not_be_rebuilt(fleet: PrivateFleet) -> None:
    """Each ends as failed with its type, a message and a traceback; reading needs none of the job's modules."""
    ways = {
        "keyword": ("NeedsKey", "no answer"),
        "lock": ("Locked", "locked"),
        "silent": ("Unspeakable", "the exception can't be shown"),
        "group": ("ExceptionGroup", "several (2 sub-exceptions)"),
        "exit": ("SystemExit", "3"),
        "interrupt": ("KeyboardInterrupt", ""),
        "chain": ("RuntimeError", "number 499"),
    }
    handles = fleet.app.enqueue_many([jobs.break_down.s(how).set(retries=1) for how in ways])
    for (how, (kind, message)), job in zip(ways.items(), handles, strict=True):
        with pytest.raises(JobFailed) as failed:
            fleet.app.job(job.id).result(STEP_S)
        error = failed.value.error
        assert (error["type"], error["message"]) == (kind, message)
        assert failed.value.reason == "exception"
        assert failed.value.evidence.attempt == 2, how
        assert how == "silent" or f"{kind}" in error["traceback"]


def test_a_p02_results_that_do_not_serialise(fleet: PrivateFleet) -> None:
    """The job ends as result_not_storable with type and path, and the function does not run again."""
    handles = fleet.app.enqueue_many([jobs.unstorable.s(kind).set(retries=2) for kind in PLACES])
    for (kind, told), job in zip(PLACES.items(), handles, strict=True):
        with pytest.raises(JobFailed) as failed:
            job.result(STEP_S)
        assert failed.value.reason == "result_not_storable", kind
        assert "result" in (failed.value.evidence.detail or "")
        assert told in (failed.value.evidence.detail or "")
        assert b"".join(data for _, data in job.logs()) == b"ran\n"


@pytest.mark.parametrize("kind", PLACES)
def test_a_p02_arguments_that_do_not_serialise(kind: str) -> None:
    """They are refused before anything is sent, in a list, a dict or a keyword; the message names the path."""
    value = jobs.UNSTORABLE[kind]()
    try:
        calls: tuple[tuple[list[object], dict[str, object], str], ...] = (
            ([value], {}, "args[0]"),
            ([{"a b": [1, value]}], {}, "args[0]['a b'][1]"),
            ([], {"value": value}, "kwargs.value"),
        )
        for args, kwargs, path in calls:
            with pytest.raises(ValueTypeError) as refused:
                jobs.same.apply_async(args, kwargs)
            assert str(refused.value).startswith(path)
            assert PLACES[kind] in str(refused.value)
    finally:
        if kind == "file":
            value.close()  # type: ignore[attr-defined]  # an open file


@pytest.mark.usefixtures("fleet")
def test_a_p02_what_travels_comes_back_equal() -> None:
    """Bytes, Decimal, UUID, aware datetimes and dicts with our own tag, as arguments and results."""
    assert jobs.same.delay(jobs.STORABLE).result(STEP_S) == jobs.STORABLE
    assert jobs.kinds.delay(jobs.STORABLE).result(STEP_S) == ["bytes", "Decimal", "UUID", "datetime", "dict", "str"]
    assert in_place(jobs.same.s(jobs.STORABLE)) == jobs.STORABLE


def test_too_deep_and_too_large_arguments_are_refused() -> None:
    """The message names where the limit was crossed."""
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueTypeError, match=r"^args\[0\](\[0\]){26,27}: nested deeper than 28"):
        jobs.same.delay(deep)
    with pytest.raises(ValueTypeError, match=r"^args\[0\]\.a: larger than \d+ bytes up to here: pass a path instead"):
        jobs.same.delay({"a": "x" * (1 << 20)})


def test_a_p03_output_that_is_not_utf8(fleet: PrivateFleet) -> None:
    """Every byte of both streams is kept, and the command line shows it in a C locale without failing."""
    code = (
        "import os, sys, time\n"
        "os.write(1, b'\\x97\\xff\\x00\\n'); os.write(2, b'\\x97\\xff\\x00\\n')\n"
        "os.write(1, b'\\xe2\\x82'); time.sleep(0.05); os.write(1, b'\\xac\\n')\n"
        "for stream in (1, 2):\n"
        "    with open(stream, 'wb', closefd=False) as out:\n"
        "        for number in range(20000): out.write(b'line %d of many that follow\\n' % number)\n"
    )
    job = fleet.app.command(["python3", "-c", code])
    assert job.outcome(STEP_S).exit_code == 0
    lines = b"".join(b"line %d of many that follow\n" % number for number in range(20000))
    assert _stream(job, 1) == b"\x97\xff\x00\n\xe2\x82\xac\n" + lines
    assert _stream(job, 2) == b"\x97\xff\x00\n" + lines
    shown = subprocess.run(
        [*CLI, "--home", str(fleet.home), "logs", job.id],
        env={"PATH": os.defpath, "LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        timeout=STEP_S,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert b"line 19999 of many that follow\n" in shown.stdout
    printed = fleet.app.command(["printf", "a\\xffb"])
    assert printed.outcome(STEP_S).exit_code == 0
    assert _stream(printed, 1) == b"a\xffb"


@pytest.mark.parametrize("code", [0, 1])
def test_a_p05_the_last_lines_before_the_exit_are_there(fleet: PrivateFleet, code: int) -> None:
    """Twenty thousand lines and a word without a newline, then the exit: nothing of it is missing; a follower ends."""
    program = f"import sys; [print(n) for n in range(1, 20001)]; sys.stdout.write('END'); sys.exit({code})"
    expected = "".join(f"{number}\n" for number in range(1, 20001)).encode() + b"END"
    rounds = [fleet.app.command(["python3", "-c", program]) for _ in range(ROUNDS)]
    for job in rounds:
        assert b"".join(data for _, data in job.logs(follow=True)) == expected
        assert job.outcome(STEP_S).exit_code == code


def test_a_p05_what_a_killed_job_had_written_is_there(fleet: PrivateFleet) -> None:
    """Every line whose write had returned before the kill: the job notes each in a file after it has written it."""
    done = fleet.work / "written"
    done.touch()
    done.chmod(0o666)
    code = (
        f"import os, itertools\nnoted = os.open({str(done)!r}, os.O_WRONLY)\n"
        "for n in itertools.count():\n    os.write(1, b'%d\\n' % n)\n    os.pwrite(noted, b'%d' % n, 0)\n"
    )
    job = fleet.app.command(["python3", "-c", code], grants=Grants(write=(str(fleet.work),)))
    wait_until(lambda: done.read_text() > "", "the job to write", STEP_S)
    for _ in range(3):
        before = int(done.read_text() or "0")
        wait_until(lambda before=before: int(done.read_text()) > before + 50, "more lines", STEP_S)  # type: ignore[misc]  # a default fixes the value
    assert job.kill().outcome == "killed"
    last = int(done.read_text())
    numbers = [int(line) for line in _stream(job, 1).split(b"\n")[:-1]]
    assert numbers[: last + 1] == list(itertools.chain(range(last + 1)))


def test_a_p05_what_was_written_while_the_store_was_away_is_there(fleet: PrivateFleet) -> None:
    """The tail arrives after the store has come back, and a follower ends by itself, with everything."""
    done = fleet.work / "through"
    code = (
        f"import os\nwhile not os.path.exists({str(fleet.work / 'go')!r}): pass\n"
        f"for n in range(500): os.write(1, b'%d\\n' % n)\n"
        f"os.write(1, b'END'); open({str(done)!r}, 'w').close()\n"
    )
    fleet.work.chmod(0o777)
    job = fleet.app.command(["python3", "-c", code], grants=Grants(write=(str(fleet.work),)))
    wait_until(lambda: job.status().state == "running", "the job to run", STEP_S)
    with redis.Redis.from_url(keyring.load_client(Home(fleet.home)).redis_url) as client:
        facts: Any = client.info("server")  # its types name both of redis-py's clients
        store = int(facts["process_id"])
    os.kill(store, signal.SIGSTOP)
    try:
        (fleet.work / "go").touch()
        wait_until(done.exists, "the job to have written all", STEP_S)
    finally:
        os.kill(store, signal.SIGCONT)
    assert b"".join(data for _, data in job.logs(follow=True)) == b"".join(b"%d\n" % n for n in range(500)) + b"END"
    assert job.outcome(STEP_S).exit_code == 0


def _stream(job: Job[None], number: int) -> bytes:
    return b"".join(data for stream, data in job.logs() if stream == number)


def test_what_readers_see_of_a_value_is_plain_json(fleet: PrivateFleet) -> None:
    """`show`, `result` and the API's view print the wire's form; nothing of ours is a bare NaN."""
    job = jobs.same.delay([1.5, None, {"ü": b"x"}])
    assert job.result(STEP_S) == [1.5, None, {"ü": b"x"}]
    assert fleet.app.job(job.id).status().result == [1.5, None, {"ü": {"$": "bytes", "v": "eA=="}}]
