"""rq after the hardening: no pickle, no import by name, no bomb, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.store.desk import Desk
from tests.support.valkey import Valkey

ROOT = Path(__file__).parents[2]

# In front of each program below: a pickle that is loaded, a command that runs and a URL that is opened all stop it.
GUARD = """
import os, pickle, sys, urllib.request, zlib, json
import redis
def forbid(what):
    def call(*args, **kwargs):
        print("FORBIDDEN", what)
        os._exit(99)
    return call
store = redis.Redis(unix_socket_path=sys.argv[1])
class Evil:
    def __reduce__(self):
        return (os.system, ("true",))
EVIL = pickle.dumps(Evil())
def packed(value):
    return zlib.compress(json.dumps(value).encode())
def write(**fields):
    base = {"data": packed(["runner.jobs.run", None, [], {"envelope": "", "sig": ""}]), "status": "started",
            "origin": "agents", "created_at": "2026-01-01T00:00:00.000000Z", "timeout": "60"}
    store.hset("rq:job:x", mapping={**base, **fields})
pickle.loads = forbid("pickle")
os.system = forbid("os.system")
urllib.request.urlopen = forbid("urlopen")
"""


def run(valkey: Valkey, program: str, *, late: bool = False) -> str:
    """Run a program with the hardening imported before rq, or after it; return what it printed."""
    first = (
        "import rq, rq.cli\nimport runner.hardening as hardening" if late else "import runner.hardening as hardening"
    )
    text = f"{GUARD}\n{first}\n{textwrap.dedent(program)}"
    command = [sys.executable, "-c", text, str(valkey.socket)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("late", [False, True])
def test_readers_load_no_pickle(valkey: Valkey, desk: Desk, late: bool) -> None:
    """Job.fetch with RQ's default serializer reads a hash with pickled meta and result without unpickling them."""
    program = """
        from rq.job import Job
        write(meta=EVIL, result=EVIL)
        job = Job.fetch("x", connection=store)
        print(job.kwargs, type(job.meta).__name__)
        store.flushall()
    """
    assert run(valkey, program, late=late) == "{'envelope': '', 'sig': ''} dict\n"


@pytest.mark.parametrize("late", [False, True])
def test_no_name_from_redis_is_imported(valkey: Valkey, desk: Desk, late: bool) -> None:
    """Functions, callbacks and serializers named in Redis are not imported; our one function refuses to run."""
    program = """
        from rq.job import Job
        from rq.serializers import resolve_serializer
        write(data=packed(["os.system", None, ["true"], {}]), failure_callback_name="os.system",
              success_callback_name="os.system", stopped_callback_name="os.system")
        job = Job.fetch("x", connection=store, serializer="json")
        for name in ("func", "failure_callback", "success_callback", "stopped_callback"):
            try:
                print("imported", getattr(job, name))
            except hardening.HardeningError as error:
                print("refused")
        try:
            resolve_serializer("os.path")
        except hardening.HardeningError:
            print("refused")
        write()
        try:
            Job.fetch("x", connection=store).perform()
        except RuntimeError as error:
            print("only a node agent" in str(error))
        store.flushall()
    """
    assert run(valkey, program, late=late) == "refused\n" * 5 + "True\n"


def test_a_count_runs_no_callback_and_calls_no_webhook(valkey: Valkey, desk: Desk) -> None:
    """Counting a registry with a lapsed entry imports nothing and opens nothing."""
    program = """
        from rq.registry import StartedJobRegistry
        write(failure_callback_name="os.system",
              webhooks=json.dumps([{"url": "http://127.0.0.1:1/", "status": "failed", "timeout": 1}]))
        store.zadd("rq:wip:agents", {"x:1": 1})
        print(StartedJobRegistry("agents", connection=store).count)
        store.flushall()
    """
    assert run(valkey, program) == "0\n"


def test_attack_25_readers_unpack_no_bomb(valkey: Valkey, desk: Desk) -> None:
    """Job.fetch and latest_result of a bomb give a note instead, and the job has no arguments."""
    program = """
        import base64
        from rq.job import Job
        bomb = zlib.compress(bytes(400_000_000), 9)
        write(data=bomb, exc_info=bomb)
        store.xadd("rq:results:x", {"type": "2", "exc_string": base64.b64encode(bomb)})
        job = Job.fetch("x", connection=store)
        store.expire("rq:results:x", 60)
        texts = [job.data.decode(), job._exc_info, job.latest_result().exc_string]
        print(all("not shown" in text for text in texts))
        try:
            job.kwargs
        except Exception as error:
            print(type(error).__name__)
        store.flushall()
    """
    assert run(valkey, program) == "True\nDeserializationError\n"


def test_the_check_can_fail(valkey: Valkey) -> None:
    """A module of rq that got its stock import back is found."""
    program = """
        import rq.utils
        real = [value for value in vars(hardening).values() if getattr(value, "__name__", "") == "import_attribute"]
        rq.utils.import_attribute = real[0]
        try:
            hardening.check()
        except hardening.HardeningError as error:
            print(error)
    """
    assert "rq.utils.import_attribute" in run(valkey, program)
