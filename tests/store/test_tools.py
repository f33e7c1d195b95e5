"""Unmodified tools of RQ read our jobs and change nothing (promise 7)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from rq import Queue, Worker
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from runner.wire.states import State
from tests.store.desk import Agent, Desk
from tests.support.valkey import Valkey

RQ = Path(sys.executable).parent / "rq"


def contents(desk: Desk) -> dict[bytes, object]:
    """Return every key with its content."""
    readers: dict[bytes, Any] = {
        b"hash": desk.redis.hgetall,
        b"zset": lambda key: desk.redis.zrange(key, 0, -1, withscores=True),
        b"list": lambda key: desk.redis.lrange(key, 0, -1),
        b"set": desk.redis.smembers,
        b"stream": desk.redis.xrange,
        b"string": desk.redis.get,
    }
    keys = cast("list[bytes]", desk.redis.keys("*"))
    return {key: readers[cast("bytes", desk.redis.type(key))](key) for key in keys}


@pytest.mark.parametrize("lapsed", [False, True])
def test_rq_info_shows_and_changes_nothing(agent: Agent, desk: Desk, valkey: Valkey, lapsed: bool) -> None:
    """The command lists slots, lanes and counts; not even a lapsed lease lets it fail a running job."""
    job = desk.enqueue()
    agent.start(agent.claim())
    desk.enqueue()
    if lapsed:
        desk.redis.zadd("rf:leases", {"n1/b00t01234567": 1})
    ((_, score),) = desk.redis.zrange("rq:wip:agents", 0, -1, withscores=True)
    assert score > int(desk.redis.time()[0]) + 30 * 86_400  # RQ fails what is older
    before = contents(desk)
    command = [str(RQ), "info", "--url", valkey.url, "--raw"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "queue agents 1, 1 executing, 0 finished, 0 failed" in shown
    assert re.search(r"worker n1\.b00t01\.0 .* busy agents", shown)
    assert re.search(r"worker n1\.b00t01\.1 .* idle agents", shown)
    assert contents(desk) == before
    assert desk.job(job)["status"] == "started"


def test_jobs_and_results_read_as_rq_jobs(agent: Agent, desk: Desk) -> None:
    """Job.fetch with RQ's JSONSerializer gives the status, the description and the return value."""
    job = desk.enqueue()
    claim = agent.claim()
    assert Queue("agents", connection=desk.redis, serializer=JSONSerializer).get_job_ids() == []
    agent.start(claim)
    (worker,) = [w for w in Worker.all(connection=desk.redis, serializer=JSONSerializer) if w.get_state() == "busy"]
    assert worker.get_current_job_id() == job
    agent.finish(claim, started=True, return_value=b'{"answer":42}')
    found = Job.fetch(job, connection=desk.redis, serializer=JSONSerializer)
    assert (found.get_status(), found.description, found.func_name) == ("finished", "app:work", "runner.jobs.run")
    result = found.latest_result()
    assert result is not None
    assert (result.type, result.return_value) == (Result.Type.SUCCESSFUL, {"answer": 42})
    assert FinishedJobRegistry("agents", connection=desk.redis).get_job_ids() == [job]


def test_retries_and_failures_read_as_rq_results(agent: Agent, desk: Desk) -> None:
    """A retried attempt and a failed one are RQ results with their text, and the job is in its registry."""
    job = desk.enqueue(retries=1)
    claim = agent.claim()
    agent.start(claim)
    agent.finish(claim, kind="retry", state=State.FAILED, started=True, failure="exit 1")
    claim = agent.claim()
    agent.start(claim)
    agent.finish(claim, state=State.FAILED, reason="exit", started=True, failure="exit 2")
    found = Job.fetch(job, connection=desk.redis, serializer=JSONSerializer)
    kinds = [(result.type, result.exc_string) for result in found.results()]
    assert kinds == [(Result.Type.FAILED, "exit 2"), (Result.Type.RETRIED, "exit 1")]
    assert FailedJobRegistry("agents", connection=desk.redis).get_job_ids() == [job]
    assert StartedJobRegistry("agents", connection=desk.redis).get_job_ids() == []
    assert found.get_executions() == []


def test_registries_are_trimmed(agent: Agent, desk: Desk) -> None:
    """Entries whose time is over leave the registries with the next end, without any reader."""
    for kind in ("finished", "failed", "canceled"):
        desk.redis.zadd(f"rq:{kind}:agents", {"old": 1000})
    ended = []
    for state, started in ((State.FINISHED, True), (State.FAILED, True), (State.KILLED, False)):
        ended.append(desk.enqueue())
        agent.finish(agent.claim(), state=state, started=started)
    for kind, job in zip(("finished", "failed", "canceled"), ended, strict=True):
        assert desk.redis.zrange(f"rq:{kind}:agents", 0, -1) == [job.encode()]


def test_a_stock_worker_fails_closed(agent: Agent, desk: Desk, valkey: Valkey) -> None:
    """A worker of RQ that is pointed at our lane runs nothing of the job."""
    job = desk.enqueue()
    command = [str(RQ), "worker", "--burst", "--url", valkey.url, "--serializer", "json", "agents"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)
    assert "only a node agent may run it" in done.stdout + done.stderr
    assert desk.job(job)["status"] == "failed"


DASHBOARD = """
import runner.hardening
import json, os, pickle, sys
pickle.loads = None
from flask import Flask
import rq_dashboard
app = Flask("lists")
app.config.from_object("rq_dashboard.default_settings")
app.config["RQ_DASHBOARD_REDIS_URL"] = sys.argv[1]
rq_dashboard.web.setup_rq_connection(app)
app.register_blueprint(rq_dashboard.blueprint, url_prefix="/rq")
runner.hardening.check()
client = app.test_client()
shown = {}
for path in sys.argv[2:]:
    answer = client.get("/rq/0/data/" + path)
    assert answer.status_code == 200, (path, answer.status_code, answer.data)
    shown[path] = answer.get_json()
print(json.dumps(shown))
"""


def test_the_dashboards_lists_show_our_jobs(agent: Agent, desk: Desk, valkey: Valkey) -> None:
    """rq-dashboard, unmodified behind the hardening, lists lanes, workers with their job, and jobs of each registry."""
    done = desk.enqueue()
    agent.start(claim := agent.claim())
    agent.finish(claim, started=True, return_value=b'{"answer":42}')
    running = desk.enqueue()
    agent.start(agent.claim())
    waiting = desk.enqueue()
    lists = ["queues.json", "workers.json", *(f"jobs/agents/{kind}/10/asc/1.json" for kind in ("queued", "finished"))]
    command = [sys.executable, "-W", "ignore", "-c", DASHBOARD, valkey.url, *lists, f"job/{running}.json"]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    shown = json.loads(answer.stdout)
    assert [queue["name"] for queue in shown[lists[0]]["queues"]] == ["agents"]
    assert {worker["state"] for worker in shown[lists[1]]["workers"]} == {"busy", "idle"}
    assert [job["id"] for job in shown[lists[2]]["jobs"]] == [waiting]
    assert [job["id"] for job in shown[lists[3]]["jobs"]] == [done]
    assert shown[f"job/{running}.json"]["status"] == "started"
