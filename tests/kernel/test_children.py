"""job.spawn, job.wait and job.status against a real store: children come to be once, and never after a kill."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import redis
from redis.asyncio import Redis

from node_agent.admission import Admitted
from node_agent.dependencies import Dependencies
from node_agent.kernel.caller import Caller
from node_agent.kernel.children import Children
from node_agent.kernel.family import Family
from node_agent.turns import Claim
from runner.scripts import payload, rows
from runner.signing import Signer
from runner.wire import access, derived, ids, record
from runner.wire.calls import ErrorCode
from runner.wire.card import TrustedKey
from runner.wire.codec import Json
from runner.wire.envelope import Domain
from runner.wire.grants import Grants, NetGrant
from runner.wire.keys import Keys
from runner.wire.receipt import Outcome
from runner.wire.spec import JobSpec
from runner.wire.states import State
from tests.kernel import rig
from tests.kernel.kin import FAR_MS, Kin, parent
from tests.store.desk import Agent, Desk, end
from tests.support.valkey import Valkey

T = TypeVar("T")
KEYS = Keys()


@dataclass
class Home:
    """A store with two agent starts, n1 and n2; a parent runs on n1."""

    valkey: Valkey
    desk: Desk
    kin: Kin
    n1: Agent
    n2: Agent

    def put(self, spec: JobSpec) -> None:
        """Enqueue a job as its client signed it."""
        found = self.kin.sign(spec)
        keys = [KEYS.seq(), KEYS.lanes(), KEYS.queues(), KEYS.job(spec.id), KEYS.queue("agents"), KEYS.active("main")]
        data = payload.pack(found.envelope, found.signature)
        self.desk.script("enqueue", keys, {"jobs": [rows.row(spec, FAR_MS)]}, data)

    def running(self, spec: JobSpec) -> Claim:
        """Have n1 claim and start a job."""
        self.put(spec)
        claim = self.n1.claim()
        assert claim.job == spec.id
        self.n1.start(claim)
        return claim

    def with_kernel(self, claim: Claim, spec: JobSpec, work: Callable[[Children, Caller], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` with the part of node n1 and a session of the claimed job."""

        async def whole() -> T:
            store = Redis(unix_socket_path=str(self.valkey.socket))
            key = TrustedKey(self.kin.client.key_id, self.kin.client.public, ("enqueue",), ("*",))
            trusted = {key.id: key}
            ends = Dependencies(store, KEYS, trusted, self.kin.fleet.public)
            part = self.kin.children(store, claim, self.n1.boot, ends=ends)
            try:
                return await work(part, self.kin.caller(claim, spec))
            finally:
                await part._watch.stop()
                await store.aclose()

        return asyncio.run(whole())

    def spawn(self, claim: Claim, spec: JobSpec, **fields: object) -> dict[str, Any]:
        """Start one child."""
        asked = {"argv": list(spec.argv or ()), **fields}
        return self.with_kernel(claim, spec, lambda part, who: rig.ask(part.entries(), who, "job.spawn", **asked))  # type: ignore[arg-type, return-value] # an object

    def refused(self, claim: Claim, spec: JobSpec, **fields: object) -> ErrorCode:
        """Start one child, which is refused; return why."""
        asked = {"argv": list(spec.argv or ()), **fields}
        return self.with_kernel(claim, spec, lambda part, who: rig.refused(part.entries(), who, "job.spawn", **asked))

    def kill(self, job: str) -> list[str]:
        """Kill a job with all that it started, as clients do."""
        keys = [KEYS.job(job), KEYS.tombstone(job), KEYS.control(), KEYS.doomed(), KEYS.kids(job)]
        keys += [KEYS.leases(), KEYS.nodes(), KEYS.clock()]
        document = {"form": "job", "job": job, "ttl": 900, "command": "{}", "sig": "kid.sig", "id": "c1"}
        reply = self.desk.script("kill", keys, {**document, "by": "kid", "reason": "test"})
        return [part.decode() if isinstance(part, bytes) else str(part) for part in reply]

    def take(self, agent: Agent) -> tuple[list[Claim], list[str]]:
        """Have an agent look into the lane: its claims, and the jobs that it found killed."""
        reply = agent.turn(free=(1,), lanes=("agents",))
        return list(reply.claims), [dead.claim.job for dead in reply.dead]

    def ended(self, claim: Claim, node: Agent, signer: Signer, state: State = State.FINISHED) -> None:
        """Finish a claimed job with an end that its node signed."""
        digest = payload.parse(claim.data).sha256
        outcome = Outcome(claim.job, claim.attempt, state, node.node, node.boot, 1, exit_code=0, envelope_sha256=digest)
        data = record.dumps(outcome)
        node.finish(claim, state=state, outcome=data, outcome_signature=signer.sign(Domain.OUTCOME, data))


@pytest.fixture
def home(valkey: Valkey) -> Iterator[Home]:
    """An empty store, two nodes."""
    with ExitStack() as stack:
        desk = stack.enter_context(Desk(valkey))
        nodes = [stack.enter_context(Agent(valkey, name, f"b00t0123456{name[1]}")) for name in ("n1", "n2")]
        for number, node in enumerate(nodes):
            node.register(host=f"host-{number}")
        kin = Kin()
        for name in ("n1", "n2"):
            desk.redis.hset(KEYS.cards(), name, kin.card(name))
        yield Home(valkey, desk, kin, *nodes)


def test_k2_a_child_is_claimed_and_admitted_on_another_node(home: Home) -> None:
    """job.spawn: the child waits as any job, and the other node's admission derives the same job from it."""
    spec = parent(tags={"team": "a"})
    claim = home.running(spec)
    made = home.spawn(claim, spec, argv=["sh", "-c", "other"], env={"A": "1"})
    assert made["known"] is False
    ((other,), dead) = home.take(home.n2)
    assert (other.job, dead) == (made["job"], [])
    found = payload.parse(other.data)
    job = derived.child_of(derived.origin_of(spec), derived.decode(found.links[0].child)).spec
    admitted = home.kin.judge(found, job)
    assert isinstance(admitted, Admitted), admitted
    assert (job.id, job.argv, job.ancestors) == (made["job"], ("sh", "-c", "other"), (spec.id,))


def test_attack_41_a_large_child_is_packed_beside_the_loop(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing what a job wrote takes milliseconds: no other job waits for it."""
    threads: list[bool] = []

    def pack(*words: Any) -> bytes:  # noqa: ANN401 - passed on as they are
        threads.append(threading.current_thread() is threading.main_thread())
        return payload.pack(*words)

    spec = parent()
    claim = home.running(spec)
    monkeypatch.setattr("node_agent.kernel.children.payload", SimpleNamespace(**{**vars(payload), "pack": pack}))
    words = ["sh", "-c", "x" * 20_000]
    made = [home.spawn(claim, spec, argv=argv)["job"] for argv in (words, words[:2])]
    assert (threads[0], all(threads[1:])) == (False, True)
    assert {claim.job for claim in home.n2.turn(free=(1, 2), lanes=("agents",)).claims} == set(made)


def test_k2_numbers_go_on_and_end(home: Home) -> None:
    """Five children, each of another id, and no sixth; a new attempt of the parent goes on where the last one was."""
    spec = parent()
    claim = home.running(spec)
    made = {home.spawn(claim, spec)["job"] for _ in range(5)}
    assert len(made) == 5
    assert home.refused(claim, spec) is ErrorCode.QUOTA


def test_k2_a_named_child_is_started_once(home: Home) -> None:
    """A parent that runs again asks for the same name and gets the same child."""
    spec = parent()
    claim = home.running(spec)
    first, again = home.spawn(claim, spec, name="index"), home.spawn(claim, spec, name="index")
    assert first["job"] == again["job"]
    assert (first["known"], again["known"]) == (False, True)
    assert len(home.desk.waiting()) == 1


@pytest.mark.parametrize("forged", ["main-01hzxw3v9b0000000000000000", "7", "-1", "1e3", "9" * 400])
def test_attack_04_the_store_can_t_call_another_job_a_child(home: Home, forged: str) -> None:
    """Whoever writes the store says which child has a name: none but one of the parent's own numbers is taken."""
    spec = parent()
    claim = home.running(spec)
    home.spawn(claim, spec)
    home.desk.redis.hset(KEYS.kids(spec.id), "n:index", forged)
    if forged in ("7", "1e3"):
        assert home.refused(claim, spec, name="index") is ErrorCode.FAULT
    else:
        made = home.spawn(claim, spec, name="index")
        assert (made["job"], made["known"]) == (derived.child_id(spec.id, 1), False)


@pytest.mark.parametrize(
    "fields",
    [
        {"argv": ["python3"]},
        {"grants": {"net": [{"host": "a.example.com", "port": 443}]}},
        {"limits": {"timeout_s": 1.0}},
        {"not_after_ms": FAR_MS + 1},
    ],
)
def test_attack_04_the_parents_own_node_refuses_more_as_well(home: Home, fields: dict[str, object]) -> None:
    """What another node would refuse is not even enqueued."""
    spec = parent()
    assert home.refused(home.running(spec), spec, **fields) is ErrorCode.DENIED
    assert home.desk.waiting() == []


def test_k2_a_job_without_the_grant_starts_none(home: Home) -> None:
    """Without --spawn there is no child, whatever is asked."""
    spec = parent(grants=Grants())
    assert home.refused(home.running(spec), spec) is ErrorCode.DENIED


def test_inherit_gives_what_the_parent_has_but_for_its_children(home: Home) -> None:
    """``inherit`` saves a job from naming its grants."""
    spec = parent(grants=Grants(spawn=2, net=(NetGrant("a.example.com", 443),)))
    claim = home.running(spec)
    home.spawn(claim, spec, inherit=True)
    ((other,), _) = home.take(home.n2)
    child = derived.decode(payload.parse(other.data).links[0].child)
    assert child.grants == Grants(net=(NetGrant("a.example.com", 443),))
    assert home.refused(claim, spec, inherit=True, grants={}) is ErrorCode.BAD_REQUEST


def test_a_kill_of_the_parent_kills_what_it_started(home: Home) -> None:
    """Waiting children are found killed in their lane, running ones get no next attempt; every live node answers."""
    spec = parent(grants=Grants(spawn=9))
    claim = home.running(spec)
    one, two = home.spawn(claim, spec)["job"], home.spawn(claim, spec)["job"]
    ((other,), _) = home.take(home.n2)
    assert other.job == one
    home.n2.start(other)
    assert sorted(home.kill(spec.id)) == ["n1", "n1", "n2", "sent"]
    assert home.take(home.n2) == ([], [two])
    reply = home.n2.turn(finishes=(end(other, kind="retry"),))
    assert [answer.result for answer in reply.finishes] == ["killed"], "no next attempt of a child after the kill"


def test_no_child_comes_to_be_after_the_kill(home: Home) -> None:
    """The kill and the start of a child are one step each: after the kill the store takes none (no window)."""
    spec = parent(grants=Grants(spawn=9))
    claim = home.running(spec)
    home.kill(spec.id)
    assert home.refused(claim, spec) is ErrorCode.ENDED
    assert home.desk.waiting() == []


@pytest.mark.parametrize("field", ["tag:team=a", "node:n1", "all", "queue:agents"])
def test_no_child_comes_to_be_after_a_kill_by_selector(home: Home, field: str) -> None:
    """A cutoff is older than the child: the parent is hit by it, so its child is refused."""
    spec = parent(tags={"team": "a"})
    claim = home.running(spec)
    home.desk.cut(field)
    assert home.refused(claim, spec) is ErrorCode.ENDED


def test_no_grandchild_comes_to_be_after_a_kill_above(home: Home) -> None:
    """A kill of the topmost job reaches the children of its children, those that are being started included."""
    spec = parent(grants=Grants(spawn=9))
    claim = home.running(spec)
    home.spawn(claim, spec, grants={"spawn": 2})
    ((middle,), _) = home.take(home.n1)
    home.n1.start(middle)
    link = derived.decode(payload.parse(middle.data).links[0].child)
    below = derived.child_of(derived.origin_of(spec), link).spec
    low = home.spawn(middle, below)["job"]
    home.kill(spec.id)
    assert home.refused(middle, below) is ErrorCode.ENDED
    assert home.take(home.n2) == ([], [low])


def test_another_attempt_starts_nothing_in_the_name_of_this_one(home: Home) -> None:
    """An agent that has lost the job to another one starts no children of it."""
    spec = parent()
    claim = home.running(spec)
    home.n1.finish(claim)
    assert home.refused(claim, spec) is ErrorCode.ENDED


def test_k5_nothing_starts_once_the_attempt_is_told_to_end(home: Home) -> None:
    """A job that has called job.exit, or is being killed, starts no child (row K5: after the end nothing is served)."""
    spec = parent()
    claim = home.running(spec)

    async def late(part: Children, who: Caller) -> ErrorCode:
        await rig.ask(part.entries(), who, "job.exit", code=3)
        await asyncio.sleep(0)
        assert (who.run.cause, who.run.exit_code) == ("exit", 3)
        return await rig.refused(part.entries(), who, "job.spawn", argv=list(spec.argv or ()))

    assert home.with_kernel(claim, spec, late) is ErrorCode.ENDED


def test_k2_wait_returns_the_end_that_the_childs_node_signed(home: Home) -> None:
    """job.wait: while the child runs a deadline ends it; then the typed end arrives, whoever ran the child."""
    spec = parent()
    claim = home.running(spec)
    job = home.spawn(claim, spec)["job"]

    async def wait(part: Children, who: Caller) -> tuple[object, object]:
        entries = part.entries()
        assert await rig.refused(entries, who, "job.wait", job=job, timeout_s=0.05) is ErrorCode.TIMEOUT
        waiting = asyncio.ensure_future(rig.ask(entries, who, "job.wait", job=job, timeout_s=10.0))
        claims, _ = await asyncio.to_thread(home.take, home.n2)
        await asyncio.to_thread(home.ended, claims[0], home.n2, home.kin.nodes["n2"])
        return await waiting, await rig.ask(entries, who, "job.status", job=job)

    end_of, status = home.with_kernel(claim, spec, wait)
    assert cast("dict[str, object]", end_of)["state"] == "finished"
    assert cast("dict[str, object]", end_of)["node"] == "n2"
    assert status == {"job": job, "state": "finished", "attempt": 1}


def test_attack_20_an_end_that_no_node_signed_is_not_told(home: Home) -> None:
    """Whoever writes the store can't tell a parent that its child finished."""
    spec = parent()
    claim = home.running(spec)
    job = home.spawn(claim, spec)["job"]
    claims, _ = home.take(home.n2)
    home.ended(claims[0], home.n2, home.kin.client)
    fault = home.with_kernel(claim, spec, lambda part, who: rig.refused(part.entries(), who, "job.wait", job=job))
    assert fault is ErrorCode.FAULT


def test_a_job_asks_only_for_its_own_children(home: Home) -> None:
    """Another job of the same tenant, an id that nobody has, and no id at all are all unknown."""
    spec, other = parent(), parent()
    claim = home.running(spec)
    home.put(other)

    async def ask(part: Children, who: Caller) -> list[ErrorCode]:
        found = []
        for op in ("job.wait", "job.status"):
            for job in (other.id, ids.new_job_id("main"), spec.id):
                found.append(await rig.refused(part.entries(), who, op, job=job))
        assert await rig.refused(part.entries(), who, "job.status", job="x") is ErrorCode.BAD_REQUEST
        return found

    assert set(home.with_kernel(claim, spec, ask)) == {ErrorCode.NOT_FOUND}


def test_attack_20_a_notice_that_nobody_signed_kills_nothing(home: Home) -> None:
    """What runs below a job dies on the signed end of that job alone, never on a word or a state in the store."""
    spec = parent()
    claim = home.running(spec)
    job = home.spawn(claim, spec)["job"]
    ((other,), _) = home.take(home.n2)
    assert other.job == job

    async def hear(part: Children, who: Caller) -> tuple[list[int], bytes]:
        below = rig.caller(parent()).run
        below.selectors = (f"job:{spec.id}",)
        family = Family(dataclasses.replace(part._around, runs=lambda: (below,)))
        seen = []
        for signer in (None, home.kin.client, home.kin.nodes["n1"]):
            if signer is None:
                home.desk.redis.hset(KEYS.job(spec.id), "rf_state", "killed")
            else:
                home.desk.redis.hset(KEYS.job(spec.id), mapping=_end(claim, "n1", signer, State.KILLED))
            await family.hear(spec.id)
            seen.append(len(below.orders))
        # Who hides that it started others hides none of them from its end.
        home.desk.redis.delete(KEYS.kids(spec.id))
        family.killed(who.run)
        await asyncio.gather(*family._tasks)
        return seen, home.desk.redis.xrevrange(KEYS.control(), count=1)[0][1][b"job"]

    assert home.with_kernel(claim, spec, hear) == ([0, 0, 1], spec.id.encode())


def _end(claim: Claim, node: str, signer: Signer, state: State) -> dict[str, bytes]:
    digest = payload.parse(claim.data).sha256
    outcome = record.dumps(Outcome(claim.job, claim.attempt, state, node, "boot", 1, envelope_sha256=digest))
    signature = signer.sign(Domain.OUTCOME, outcome).encode()
    return {"rf_state": state.encode(), "rf_outcome": outcome, "rf_outcome_sig": signature}


def test_nodes_and_clients_do_it_as_their_own_users(home: Home) -> None:
    """A node's user starts a child, a tenant's kills the tree, and can't hide a child from a kill of its parent."""
    roles = (access.agent("n1", ("main",)), access.tenant("main"))
    for role in roles:
        head, *selectors = role.line(password_sha256=hashlib.sha256(b"word").hexdigest()).split(" (")
        words = ("ACL", "SETUSER", *head.removeprefix("user ").split(), *(f"({one}" for one in selectors))
        home.desk.redis.execute_command(*words)
    spec = parent()
    claim = home.running(spec)

    async def ask(part: Children, who: Caller) -> Json:
        part._redis = Redis(unix_socket_path=str(home.valkey.socket), username="agent-n1", password="word")
        made = await rig.ask(part.entries(), who, "job.spawn", argv=list(spec.argv or ()), name="a")
        await part._redis.aclose()
        return made

    try:
        made = cast("dict[str, str]", home.with_kernel(claim, spec, ask))
        admin = home.desk.redis
        home.desk.redis = redis.Redis(unix_socket_path=str(home.valkey.socket), username="tenant-main", password="word")
        with home.desk.redis:
            with pytest.raises(redis.exceptions.NoPermissionError):
                home.desk.redis.delete(KEYS.kids(spec.id))
            assert home.kill(spec.id)[0] == "sent"
        home.desk.redis = admin
        assert home.take(home.n2) == ([], [made["job"]])
    finally:
        admin.acl_deluser(*(role.user for role in roles))


def test_a_store_that_is_away_is_an_answer(home: Home) -> None:
    """No call hangs: UNAVAILABLE after the bound."""
    spec = parent()
    claim = home.running(spec)

    async def ask(part: Children, who: Caller) -> ErrorCode:
        part._redis = Redis(unix_socket_path="/nonexistent/store")
        return await rig.refused(part.entries(), who, "job.spawn", argv=list(spec.argv or ()))

    assert home.with_kernel(claim, spec, ask) is ErrorCode.UNAVAILABLE
