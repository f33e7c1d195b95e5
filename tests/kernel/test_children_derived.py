"""A child is never more than its parent, and every node says so (attack 4)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.admission import Admitted, Denial, Enforcement
from node_agent.policy import parse
from runner import lineage
from runner.scripts import payload
from runner.wire import derived, record
from runner.wire import schedule as schedules
from runner.wire.derived import BeyondError, Child
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError
from runner.wire.flow import Concurrency, RetryRule
from runner.wire.grants import Grants, MailGrant, NetGrant, PathGrant, SecretGrant
from runner.wire.schedule import Schedule
from runner.wire.spec import MAX_DEPTH, JobSpec, Limits
from tests.agent import build
from tests.kernel.kin import FAR_MS, Kin, child, linked, parent

KIN = Kin()
NET, PATH = NetGrant("api.example.com", 443), PathGrant("/srv/work", "write")
RICH = Grants(
    paths=(PATH, PathGrant("/srv/data", "read")),
    net=(NET,),
    secrets=(SecretGrant("KEY", "get"),),
    tools=("search",),
    memory_bytes=1 << 30,
    mail=(MailGrant("box", "send"),),
    agent="researcher",
    state_bytes=1000,
    watch=("tag:team=a",),
    spawn=5,
)
#: One thing more than the parent has, each alone.
BEYOND: dict[str, dict[str, object]] = {
    "spawn": {"grants": Grants(spawn=5)},
    "number": {"number": 5},
    "net": {"grants": Grants(net=(NetGrant("other.example.com", 443),))},
    "port": {"grants": Grants(net=(NetGrant("api.example.com", 80),))},
    "path": {"grants": Grants(paths=(PathGrant("/etc", "read"),))},
    "path below": {"grants": Grants(paths=(PathGrant("/srv/work/link", "read"),))},
    "write": {"grants": Grants(paths=(PathGrant("/srv/data", "write"),))},
    "all": {"grants": Grants(paths=(PathGrant("/srv/work", "write", all=True),))},
    "secret": {"grants": Grants(secrets=(SecretGrant("OTHER", "get"),))},
    "secret's way": {"grants": Grants(secrets=(SecretGrant("KEY", "env", "KEY"),))},
    "tool": {"grants": Grants(tools=("shell",))},
    "memory": {"grants": Grants(memory_bytes=(1 << 30) + 1)},
    "cpus, which the parent leaves to the node": {"grants": Grants(cpus=0.5)},
    "mail": {"grants": Grants(mail=(MailGrant("box", "both"),))},
    "mailbox": {"grants": Grants(mail=(MailGrant("other", "send"),))},
    "agent": {"grants": Grants(agent="other")},
    "state": {"grants": Grants(state_bytes=1001)},
    "watch": {"grants": Grants(watch=("all",))},
    "service": {"grants": Grants(service=True)},
    "unix": {"grants": Grants(unix=True)},
    "second": {"limits": Limits(timeout_s=61.0)},
    "output, which the parent leaves to the node": {"limits": Limits(output_bytes=1)},
    "not_after": {"not_after_ms": FAR_MS + 1},
    "retries": {"retries": 2},
    "priority": {"priority": 1},
    "command": {"argv": ("python3", "-c", "1")},
    "task": {"argv": None, "task": "app:other"},
}


def rich(**changes: object) -> JobSpec:
    """A parent with one of each grant, a time limit and a retry."""
    given: dict[str, object] = {"grants": RICH, "limits": Limits(timeout_s=60.0), "retry": RetryRule(1)}
    return parent(**given | changes)


def unchecked(asked: Child, spec: JobSpec) -> JobSpec:
    """The job that a node without scruples would have run: the record's fields, taken as they are."""
    fields = {name: getattr(asked, name) for name in ("task", "argv", "args", "kwargs", "env", "cwd", "grants")}
    limits = asked.limits
    return dataclasses.replace(
        spec,
        id=derived.child_id(spec.id, asked.number),
        node=asked.pin or spec.node,
        priority=asked.priority or 0,
        not_after_ms=asked.not_after_ms or spec.not_after_ms,
        limits=limits,
        **fields,
    )


def test_a_child_within_its_parent_runs_on_another_node() -> None:
    """What was asked within the parent's rights is admitted, with the parent's signer, tags and time."""
    spec = rich(tags={"team": "a"}, concurrency=Concurrency("k", 3))
    asked = child(spec, argv=("sh", "-c", "other"), grants=Grants(net=(NET,), spawn=1), limits=Limits(timeout_s=5.0))
    found = linked(KIN.sign(spec), KIN.link(asked))
    job = derived.child_of(derived.origin_of(spec), asked).spec
    admitted = KIN.judge(found, job)
    assert isinstance(admitted, Admitted), admitted
    assert admitted.spec == job
    assert admitted.signer == KIN.client.key_id
    assert (job.tags, job.concurrency, job.ancestors) == ({"team": "a"}, spec.concurrency, (spec.id,))
    assert job.grants.memory_bytes == spec.grants.memory_bytes
    assert payload.parse(payload.pack(found.envelope, found.signature, None, found.links)) == found


@pytest.mark.parametrize("what", BEYOND)
def test_attack_04_a_child_that_asks_for_more_is_refused_on_another_node(what: str) -> None:
    """A grant, secret, second or name more than the parent's: the other node refuses, though a node signed it."""
    spec = rich()
    asked = child(spec, **BEYOND[what])
    with pytest.raises(BeyondError):
        derived.child_of(derived.origin_of(spec), asked)
    denied = KIN.judge(linked(KIN.sign(spec), KIN.link(asked)), unchecked(asked, spec))
    assert isinstance(denied, Denial)
    assert denied.reason == "policy", denied
    assert "more than its parent" in denied.message


def test_attack_04_a_pinned_parent_has_children_where_it_is_pinned() -> None:
    """Another node refuses a child of a job that was pinned elsewhere; without a pin, a child may have one."""
    spec = rich(node="n1")
    asked = child(spec, pin="n2")
    denied = KIN.judge(linked(KIN.sign(spec), KIN.link(asked)), unchecked(asked, spec))
    assert isinstance(denied, Denial)
    assert "pinned to node n1" in denied.message
    free = rich()
    job = derived.child_of(derived.origin_of(free), child(free, pin="n2")).spec
    found = linked(KIN.sign(free), KIN.link(child(free, pin="n2")))
    assert isinstance(KIN.judge(found, job), Admitted)
    denied = KIN.judge(found, job, node="n3")
    assert isinstance(denied, Denial)
    assert denied.reason == "policy"


@pytest.mark.parametrize(("field", "value"), [("queue", "other"), ("tenant", "other"), ("labels", {"zone": "b"})])
def test_attack_04_a_record_has_no_room_for_another_queue(field: str, value: object) -> None:
    """Queue, tenant and placement of a child are its parent's: a record that names others is none."""
    spec = parent()
    encoded = {**record.encode(child(spec)), field: value}
    with pytest.raises(RecordError, match=field):
        record.decode(Child, encoded)


def test_attack_04_a_child_in_another_lane_is_a_forgery() -> None:
    """The store can't move a child to another queue either: its lane follows from what was signed."""
    spec, asked = parent(), child(parent())
    asked = child(spec)
    job = derived.child_of(derived.origin_of(spec), asked).spec
    denied = KIN.judge(linked(KIN.sign(spec), KIN.link(asked)), dataclasses.replace(job, queue="other"))
    assert isinstance(denied, Denial)
    assert denied.reason == "bad_signature"


def test_attack_04_only_a_node_that_could_have_run_the_parent_can_ask() -> None:
    """A record signed by no node, a stranger, another node than it names, or one of other queues counts for nothing."""
    spec = parent()
    found, asked = KIN.sign(spec), child(spec)
    job = derived.child_of(derived.origin_of(spec), asked).spec
    data, stranger = record.dumps(asked, bare=True), Kin()
    good = KIN.link(asked)
    forged = (
        dataclasses.replace(good, signature=KIN.client.sign(Domain.JOB, data)),
        dataclasses.replace(good, signature=KIN.nodes["n2"].sign(Domain.CHILD, data)),
        dataclasses.replace(good, signature=KIN.nodes["n1"].sign(Domain.EVENT, data)),
        dataclasses.replace(good, child=data.replace(b'"true"', b'"evil"')),
        stranger.link(asked),
        KIN.link(asked, "n2"),
        KIN.link(asked, queues=("other",)),
        KIN.link(asked, tenants=("other",)),
        KIN.link(asked, not_after_ms=1),
    )
    assert isinstance(KIN.judge(linked(found, good), job), Admitted)
    for link in forged:
        denied = KIN.judge(linked(found, link), job)
        assert isinstance(denied, Denial)
        assert denied.reason == "bad_signature", (link, denied)
    denied = KIN.judge(linked(found, good), job, fleet=None)
    assert isinstance(denied, Denial)
    assert "fleet.pub" in denied.message


def test_attack_04_the_origin_is_verified_as_any_job() -> None:
    """A child of a job that nobody trusted signed, or that was changed, is refused like that one."""
    spec = parent()
    asked = child(spec)
    job = derived.child_of(derived.origin_of(spec), asked).spec
    unknown = build.envelope(build.signer(), spec)
    reasons = []
    for found in (payload.JobData(*unknown), dataclasses.replace(KIN.sign(spec), envelope=record.dumps(rich()))):
        denied = KIN.judge(linked(found, KIN.link(asked)), job)
        assert isinstance(denied, Denial)
        reasons.append(str(denied.reason))
    assert reasons == ["unknown_key", "bad_signature"]


def test_attack_04_a_signature_makes_as_many_jobs_as_it_names() -> None:
    """A number is one id and one nonce; below five there are five, however they are split among children."""
    spec = parent()
    origin = derived.origin_of(spec)
    made = [derived.child_of(origin, child(spec, number=number)).spec for number in range(5)]
    again = derived.child_of(origin, child(spec, number=0, env={"A": "1"})).spec
    assert len({job.id for job in made}) == len({job.nonce for job in made}) == 5
    assert (again.id, again.nonce) == (made[0].id, made[0].nonce)
    branch = derived.child_of(origin, child(spec, number=1, grants=Grants(spawn=2)))
    assert (branch.first, branch.end) == (2, 4)
    twig = child(branch.spec, number=4)
    with pytest.raises(BeyondError, match="2 jobs in all"):
        derived.child_of(branch, twig)
    with pytest.raises(BeyondError, match="number"):
        derived.child_of(origin, child(spec, number=3, grants=Grants(spawn=2)))


def test_attack_04_a_chain_is_judged_step_by_step() -> None:
    """A grandchild has at most what its parent kept, and trees have a depth that ends."""
    spec = parent(grants=Grants(net=(NET,), spawn=20))
    found, origin = KIN.sign(spec), derived.origin_of(spec)
    for depth in range(MAX_DEPTH):
        asked = child(origin.spec, number=origin.first, grants=Grants(spawn=10 - depth))
        found, origin = linked(found, KIN.link(asked)), derived.child_of(origin, asked)
    assert isinstance(KIN.judge(found, origin.spec), Admitted)
    assert len(origin.spec.ancestors) == MAX_DEPTH
    with pytest.raises(BeyondError, match="deep"):
        derived.child_of(origin, child(origin.spec, number=origin.first))
    first = derived.child_of(derived.origin_of(spec), child(spec, grants=Grants(spawn=3)))
    greedy = child(first.spec, number=1, grants=Grants(net=(NET,)))
    chain = linked(KIN.sign(spec), KIN.link(child(spec, grants=Grants(spawn=3))), KIN.link(greedy))
    denied = KIN.judge(chain, unchecked(greedy, first.spec))
    assert isinstance(denied, Denial)
    assert denied.reason == "policy"


def test_attack_04_nobody_signs_a_place_below_another_job() -> None:
    """A client can't put a job among another one's children: `kill` of that one would hit it."""
    found = KIN.sign(parent(ancestors=(parent().id,)))
    with pytest.raises(RecordError, match="no jobs above"):
        lineage.job_of(found, KIN.fleet.public, 1)


def test_a_childs_policy_is_the_other_nodes_own() -> None:
    """Within the parent's rights is not enough: the node that runs the child judges it as any job."""
    spec, asked = parent(), child(parent())
    asked = child(spec)
    job = derived.child_of(derived.origin_of(spec), asked).spec
    found = linked(KIN.sign(spec), KIN.link(asked))
    denied = KIN.judge(found, job, policy=parse('version = 1\n[[allow]]\ncommands = ["python3"]\n'))
    assert isinstance(denied, Denial)
    assert "does not allow the command" in denied.message
    denied = KIN.judge(found, job, enforcement=Enforcement("C"))
    assert isinstance(denied, Denial)
    assert denied.reason == "level"


def test_an_occurrence_of_a_schedule_starts_jobs_too() -> None:
    """The origin of such a child is the schedule, and its due time says which occurrence."""
    template = parent(schedule="nightly")
    planned = Schedule("nightly", "main", 1000, template, every_ms=60_000, expires_ms=30 * 86_400_000)
    due_ms = schedules.next_due(planned, FAR_MS - 2 * 86_400_000)
    assert due_ms is not None
    data = record.dumps(planned)
    spec = schedules.occurrence(planned, due_ms)
    asked = child(spec)
    found = payload.JobData(data, KIN.client.sign(Domain.SCHEDULE, data), due_ms, (KIN.link(asked),))
    job = derived.child_of(derived.origin_of(spec), asked).spec
    assert isinstance(KIN.judge(found, job), Admitted)
    assert payload.parse(payload.pack(data, found.signature, due_ms, found.links)) == found


HOSTS = st.sampled_from([NetGrant("a.example.com", 443), NetGrant("b.example.com", 443), NetGrant("a.example.com", 80)])
PATHS = st.builds(PathGrant, st.sampled_from(["/a", "/a/b", "/c"]), st.sampled_from(["read", "write"]))
SECRETS = st.builds(SecretGrant, st.sampled_from(["K", "L"]), st.sampled_from(["get", "file"]))
SIZES = st.none() | st.integers(1, 3)
GRANTS = st.builds(
    Grants,
    paths=st.lists(PATHS, max_size=3).map(tuple),
    net=st.lists(HOSTS, max_size=2).map(tuple),
    secrets=st.lists(SECRETS, max_size=2).map(tuple),
    tools=st.lists(st.sampled_from(["x", "y"]), max_size=2).map(tuple),
    memory_bytes=SIZES,
    pids=SIZES,
    no_exec=st.booleans(),
    service=st.booleans(),
    state_bytes=SIZES,
    spawn=st.none() | st.integers(1, 6),
)
LIMITS = st.builds(Limits, timeout_s=st.none() | st.floats(1, 3), files=SIZES)


FIELDS = st.sets(
    st.sampled_from(["paths", "net", "secrets", "tools", "memory_bytes", "no_exec", "service"]), max_size=2
)


@given(GRANTS, LIMITS, GRANTS, LIMITS, FIELDS, st.integers(0, 3), st.integers(-1, 1))
def test_attack_04_what_is_derived_is_never_more(
    held: Grants, bound: Limits, other: Grants, limits: Limits, changed: set[str], number: int, later_ms: int
) -> None:
    """Whatever is asked: the child is refused, or each single thing that it has its parent has, too."""
    held = dataclasses.replace(held, spawn=4)
    fields = {name: getattr(other, name) for name in changed - {"limits"}}
    asked = dataclasses.replace(held, **{"spawn": None, **fields})
    spec = parent(grants=held, limits=bound)
    wanted = limits if "limits" in changed else Limits()
    ask = child(spec, grants=asked, limits=wanted, number=number, not_after_ms=FAR_MS + later_ms)
    try:
        made = derived.child_of(derived.origin_of(spec), ask)
    except BeyondError:
        return
    has = made.spec.grants
    reach = {(path.path, mode) for path in held.paths for mode in ("read", path.mode)}
    assert {(path.path, path.mode) for path in has.paths} <= reach
    assert set(has.net) <= set(held.net)
    assert set(has.secrets) <= set(held.secrets)
    assert set(has.tools) <= set(held.tools)
    assert has.no_exec >= held.no_exec
    assert has.service <= held.service
    for mine, theirs in (
        (has.memory_bytes, held.memory_bytes),
        (has.pids, held.pids),
        (made.spec.limits.timeout_s, bound.timeout_s),
        (made.spec.limits.files, bound.files),
    ):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or mine <= theirs
    assert has.state_bytes is None or has.state_bytes <= (held.state_bytes or 0)
    assert made.spec.not_after_ms <= spec.not_after_ms
    assert number + 1 + (has.spawn or 0) <= (held.spawn or 0)
    assert (made.first, made.end) == (number + 1, number + 1 + (has.spawn or 0))
