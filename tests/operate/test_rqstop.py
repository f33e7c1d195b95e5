"""RQ's own stop command stops a job where policy says so, and does nothing anywhere else."""

from __future__ import annotations

import json

from rq.command import send_command, send_stop_job_command

from node_agent.errors import PolicyError
from node_agent.policy import parse
from runner import hardening
from tests.support.rig import Rig
from tests.support.wait import wait_until


def test_policy_decides_and_only_a_stop_is_heard(pair: Rig) -> None:
    """On the node that allows it the job is killed, with the reason; RQ's shutdown and odd words change nothing."""
    hardening.check()
    deaf, node = pair.nodes["a"], pair.nodes["b"]
    line = ("sh", "-c", "echo up; sleep 600")
    job, other = (pair.command(*line, node=one.name) for one in (node, deaf))
    for one in (job, other):
        pair.wait_output(one, "up")
    channel = f"rq:pubsub:{node.name}.x"
    wait_until(lambda: pair.redis.pubsub_numpat() == 1, "the node to listen", 5)
    for worker in (f"{node.name}.x", f"{deaf.name}.x"):
        send_command(pair.redis, worker, "shutdown")
        send_command(pair.redis, worker, "stop-job", job_id=other.id)
    for odd in (b"", b"{", b"[]", b'{"command":"stop-job","job_id":7}', b"x" * 5000, json.dumps(["stop-job"])):
        pair.redis.publish(channel, odd)
    send_stop_job_command(pair.redis, job.id)
    end = job.outcome(20)
    assert (end.state, end.attempt) == ("killed", 1)
    ended = next(event for event in pair.app.events() if event.type == "job.ended" and event.job == job.id)
    assert ended.detail["kill_reason"] == "RQ's stop command"
    assert pair.state(other) == "running"
    assert not node.dead()
    other.kill(wait=20)


def test_the_policy_takes_nothing_else_for_it() -> None:
    """True or false, at the top alone."""
    assert parse("version = 1\nrq_stop = true").rq_stop
    assert not parse("version = 1").rq_stop
    for wrong in ("version = 1\nrq_stop = 1", "version = 1\n[[allow]]\nrq_stop = true"):
        try:
            parse(wrong)
        except PolicyError:
            continue
        raise AssertionError(wrong)
