"""Random graphs of jobs that wait for each other, through the scripts alone: enqueued, ended, retried and killed in any
order. Whatever happens, each job is handed out once, when it may be, and nothing is left behind.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from runner.wire import ids
from runner.wire.states import State
from tests.store.desk import Agent, Desk

LANES = ("agents", "other")
JOBS = 24
#: `RINGFENCE_TEST_FULL=1` tries more graphs.
SEEDS = 400 if os.environ.get("RINGFENCE_TEST_FULL") else 12
GOOD = State.FINISHED
BAD = (State.FAILED, State.KILLED, State.REFUSED, State.EXPIRED, State.LOST)


@dataclass(frozen=True)
class Node:
    """One job of a graph."""

    job: str
    lane: str
    after: tuple[str, ...]
    failed: str


class World:
    """What is true of the jobs so far, kept beside the store."""

    def __init__(self, desk: Desk, agent: Agent, seed: int) -> None:
        self.desk, self.agent, self.chance = desk, agent, random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.ends: dict[str, State] = {}

    def enqueue(self) -> None:
        """Add a batch of one to four jobs, each after some of the earlier ones."""
        rows = []
        for _ in range(self.chance.randint(1, 4)):
            known = list(self.nodes)
            after = tuple(self.chance.sample(known, min(len(known), self.chance.choice((0, 1, 1, 2, 4)))))
            node = Node(ids.new_job_id(), self.chance.choice(LANES), after, self.chance.choice(("refuse", "run")))
            self.nodes[node.job] = node
            waits = {"after": list(after), "failed": node.failed} if after else {}
            rows.append(self.desk.row(node.job, lane=node.lane, **waits))
        self.desk.enqueue_all(rows)

    def step(self) -> bool:
        """End one job that is handed out, or retry it; False if there is none."""
        reply = self.agent.turn(free=(0,), lanes=tuple(self.chance.sample(LANES, 2)))
        for claim in reply.claims:
            self.check_may_go(claim.job)
            if self.hopeless(claim.job):
                self.agent.finish(claim, state=State.REFUSED, started=False)
                self.ends[claim.job] = State.REFUSED
            elif self.chance.random() < 0.1:
                self.agent.start(claim)
                self.agent.finish(claim, kind="retry", state=State.FAILED)
            else:
                state = GOOD if self.chance.random() < 0.8 else self.chance.choice(BAD)
                self.agent.finish(claim, state=state)
                self.ends[claim.job] = state
        return bool(reply.claims)

    def kill(self) -> None:
        """Kill any job that has not ended, and have its end signed."""
        left = [job for job in self.nodes if job not in self.ends]
        if left:
            job = self.chance.choice(left)
            assert self.desk.kill(job) == ["removed"]
            (dead,) = self.agent.run(self.agent.store.sweep(jobs=[job]))
            self.agent.finish(dead.claim, state=State.KILLED, started=False)
            self.ends[job] = State.KILLED

    def hopeless(self, job: str) -> bool:
        """Whether a job can't run any more because of those before it."""
        node = self.nodes[job]
        return node.failed == "refuse" and any(self.ends.get(one, GOOD) != GOOD for one in node.after)

    def check_may_go(self, job: str) -> None:
        """A job is handed out when all before it have ended, or when it is hopeless; and never again after its end."""
        assert job not in self.ends
        assert self.hopeless(job) or all(one in self.ends for one in self.nodes[job].after)

    def check_waiting(self) -> None:
        """Who waits in the store is who has to."""
        for job, node in self.nodes.items():
            if job not in self.ends:
                waits = not self.hopeless(job) and not all(one in self.ends for one in node.after)
                assert self.desk.job(job)["rf_state"] == ("deferred" if waits else "queued")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_graph_runs_to_its_end(desk: Desk, agent: Agent, seed: int) -> None:
    """Every job ends once, refused exactly where the rules say so; no key and no registry entry stays."""
    world = World(desk, agent, seed)
    while len(world.nodes) < JOBS:
        world.enqueue()
        for _ in range(world.chance.randint(0, 3)):
            world.step()
        if world.chance.random() < 0.3:
            world.kill()
        world.check_waiting()
    while world.step():
        world.check_waiting()
    assert world.ends.keys() == world.nodes.keys()
    ended = [job for kind, job in desk.events() if kind == "job.ended"]
    assert sorted(ended) == sorted(world.nodes)
    assert desk.redis.keys("rf:open:*") + desk.redis.keys("rf:then:*") + desk.redis.keys("rq:deferred:*") == []
