"""Random lives of jobs, agents and kills: whatever the order, each job is in one place and ends once."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node_agent.turns import Claim, Dead, Orphan
from runner.wire import ids
from runner.wire.states import END_STATES, State
from tests.store.desk import Agent, Desk
from tests.support.valkey import Valkey

NODES = ("n1", "n2", "n3")


class Fleet(RuleBasedStateMachine):
    """Three agent starts, a client and a killer; agents may die and answers may get lost at any point."""

    valkey: Valkey

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.desk = self.stack.enter_context(Desk(self.valkey))
        self.desk.redis.flushall()
        self.boots = 0
        self.agents: dict[str, Agent] = {}
        self.held: dict[str, list[Claim]] = {}
        self.running: set[tuple[str, int]] = set()
        self.dead_members: set[str] = set()
        self.jobs: list[str] = []
        for node in NODES:
            self._boot(node)

    def teardown(self) -> None:
        self.desk.redis.flushall()
        self.stack.close()

    def _boot(self, node: str) -> None:
        self.boots += 1
        agent = self.stack.enter_context(Agent(self.valkey, node, f"{self.boots:06d}abcdef"))
        agent.register(f"host-{node}")
        self.agents[node], self.held[node] = agent, []

    @rule(lane=st.sampled_from(["agents", "misc"]))
    def enqueue(self, lane: str) -> None:
        job = ids.new_job_id()
        self.desk.enqueue(job=job, lane=lane, sel=f"tag:lane={lane}")
        self.jobs.append(job)

    @rule(node=st.sampled_from(NODES), lost=st.booleans())
    def claim(self, node: str, lost: bool) -> None:
        agent = self.agents[node]
        names = tuple(claim.job for claim in self.held[node])
        used = {claim.slot for claim in self.held[node]}
        free = tuple(slot for slot in (0, 1) if slot not in used)
        reply = agent.turn(free=free, lanes=("agents", "misc"), held=names)
        if not lost:
            self.held[node] += [*reply.claims, *(dead.claim for dead in reply.dead)]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        node, claim = self._pick(data)
        if claim.slot is not None:
            self.agents[node].start(claim)
            self.running.add((claim.job, claim.attempt))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), kind=st.sampled_from(["end", "end", "retry", "release"]))
    def finish(self, data: st.DataObject, kind: str) -> None:
        node, claim = self._pick(data)
        started = (claim.job, claim.attempt) in self.running
        if (kind == "release") == started or (kind != "end" and claim.slot is None):
            kind = "end"
        reply = self.agents[node].finish(claim, kind=kind, state=State.FAILED, started=started)
        assert reply.result in {"done", "killed"}
        if reply.result == "done":
            self.held[node].remove(claim)

    @precondition(lambda self: bool(self.jobs))
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.desk.kill(data.draw(st.sampled_from(self.jobs)))

    @rule(field=st.sampled_from(["all", "tag:lane=misc", "tenant:main"]))
    def cut(self, field: str) -> None:
        self.desk.cut(field)

    @rule(node=st.sampled_from(NODES))
    def sweep(self, node: str) -> None:
        agent = self.agents[node]
        self._take(node, agent.run(agent.store.sweep(("agents", "misc"))))

    @rule(node=st.sampled_from(NODES))
    def die(self, node: str) -> None:
        agent = self.agents[node]
        self.dead_members.add(f"{node}/{agent.boot}")
        self._boot(node)

    @rule(node=st.sampled_from(NODES))
    def recover(self, node: str) -> None:
        orphans, dead = self.agents[node].recover(named=tuple(sorted(self.dead_members)))
        self._take(node, [*orphans, *dead])

    def _take(self, node: str, found: list[Dead | Orphan] | tuple[Dead, ...]) -> None:
        self.held[node] += [each.claim for each in found]

    def _pick(self, data: st.DataObject) -> tuple[str, Claim]:
        pairs = [(node, claim) for node, claims in self.held.items() for claim in claims]
        return data.draw(st.sampled_from(pairs))

    @invariant()
    def each_job_is_in_one_place(self) -> None:
        """In a lane, held by one start, waiting for its burial, or ended: exactly one of them."""
        places: Counter[str] = Counter()
        for lane in ("agents", "misc"):
            places.update(self.desk.waiting(lane))
        for key in self.desk.redis.keys("rf:claims:*"):
            places.update(job.decode() for job in self.desk.redis.hkeys(key))
        for job in self.jobs:
            found = self.desk.job(job)
            doomed = found["rf_state"] == "killing" and "rf_claim" not in found
            ended = found["rf_state"] in END_STATES
            assert places[job] + doomed + ended == 1, (job, found, places[job])

    @invariant()
    def each_job_ends_once(self) -> None:
        """One end event for an ended job, none for another."""
        ends = Counter(job for kind, job in self.desk.events() if kind == "job.ended")
        for job in self.jobs:
            assert ends[job] == (self.desk.job(job)["rf_state"] in END_STATES)


def test_jobs_are_in_one_place_and_end_once(valkey: Valkey) -> None:
    """No order of enqueues, claims, ends, kills, deaths and lost answers loses, doubles or ends a job twice."""
    bound: Any = type("BoundFleet", (Fleet,), {"valkey": valkey})
    machine = bound.TestCase
    machine.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()


@pytest.mark.parametrize("count", [60])
def test_every_job_ends_in_the_end(valkey: Valkey, count: int) -> None:
    """After kills and deaths, agents that keep turning bring every job to its one end."""
    with Desk(valkey) as desk, Agent(valkey, "n1", "aaaaaaaaaaaa") as dying, Agent(valkey, "n2") as agent:
        dying.register()
        agent.register()
        jobs = [desk.enqueue(sel=f"tag:n={i % 2}") for i in range(count)]
        held = [dying.claim(slot=slot) for slot in (0, 1)]
        dying.start(held[0])
        for job in jobs[::5]:
            desk.kill(job)
        desk.cut("tag:n=1")
        orphans, dead = agent.recover(named=("n1/aaaaaaaaaaaa",))
        buried = (*dead, *agent.run(agent.store.sweep()))
        claims = [*(each.claim for each in orphans), *(each.claim for each in buried)]
        while claims:
            for claim in claims:
                agent.finish(claim, state=State.LOST)
            reply = agent.turn(free=(0, 1), lanes=("agents",))
            claims = [*reply.claims, *(each.claim for each in reply.dead)]
        assert {desk.job(job)["rf_state"] for job in jobs} == {"lost"}
        assert Counter(kind for kind, _ in desk.events())["job.ended"] == count
        assert desk.redis.exists("rf:doomed", "rf:claims:n2/b00t01234567", "rq:wip:agents") == 0
