"""Random grants on random hosts: what is asked is enforced, or the job is refused; there is no third way (promise 3).

Judged by an oracle of its own, written from the mechanisms and not from the project's list of promises: each grant says
which facts of a host it takes, and what the plan must then hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final, cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent import ground as grounds
from node_agent import sandbox
from node_agent.admission import Admitted, Denial, Offer, Rules, admit
from node_agent.containment import plan as plans
from node_agent.containment import promises
from node_agent.containment.host import HostReport
from node_agent.containment.plan import Mount, Plan
from node_agent.ground import MOST_PIDS, Ground
from node_agent.policy import Policy, parse
from node_agent.sandbox import Defaults
from node_agent.settings import AgentSettings
from runner.trust import Trust
from runner.wire import spec as specs
from runner.wire.card import TrustedKey
from runner.wire.grants import Grants, NetGrant, PathGrant, SecretGrant
from runner.wire.spec import JobSpec, Limits
from runner.wire.states import RefuseReason
from tests.agent.build import envelope, job, signer

KEY: Final = signer()
OPEN_TEXT: Final = (
    'version = 1\n[[allow]]\ncommands = ["*"]\ntasks = ["*"]\nread = ["*"]\nwrite = ["*"]\nnet = ["*"]\n'
    'secrets = ["*"]\ntools = ["*"]\ntrusted = true\nservice = true\nunix = true\n'
)
OPEN: Final = parse(OPEN_TEXT)
#: The same, but for one thing.
UNTRUSTING: Final = parse(OPEN_TEXT.replace("trusted = true", "trusted = false"))
SLOTS: Final = 4
RAM_BYTES: Final = 16 << 30
LEVELS: Final = ("A", "B", "C", "D", "E", "F")

hosts = st.builds(
    HostReport,
    level=st.sampled_from(("A", "B", *LEVELS, "none")),
    kernel=st.just("6.1.0"),
    machine=st.just("x86_64"),
    python=st.just("3.11.2"),
    user=st.just(0),
    cgroup=st.sampled_from(("v2", "hybrid", "v1", "none")),
    enforces=st.sets(st.sampled_from(("kill", "freeze", "pids", "memory", "cpu"))).map(
        lambda each: tuple(sorted(each))
    ),
    landlock_abi=st.sampled_from((0, 1, 3, 5, 6, 7)),
    job_uids=st.sampled_from(("", "1900000000-1900000999")),
)


def absolute(name: str) -> str:
    """A path to grant."""
    return f"/srv/{name}"


paths = st.lists(
    st.builds(
        PathGrant,
        path=st.sampled_from(("a", "a/b", "c", "d")).map(absolute),
        mode=st.sampled_from(("read", "write")),
        all=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda grant: grant.path,
).map(tuple)
grants = st.builds(
    Grants,
    paths=paths,
    net=st.sampled_from(((), (), (NetGrant("api.example.com", 443),))),
    secrets=st.sampled_from((*((),) * 3, (SecretGrant("KEY", "get"),))),
    tools=st.sampled_from((*((),) * 7, ("search",))),
    memory_bytes=st.none() | st.integers(1 << 20, 1 << 34),
    cpus=st.none() | st.sampled_from((0.5, 1.0, 4.0)),
    pids=st.none() | st.integers(1, 1000),
    disk_bytes=st.none() | st.integers(1 << 20, 1 << 34),
    no_exec=st.booleans(),
    service=st.sampled_from((False, False, True)),
    unix=st.sampled_from((False, False, True)),
)
jobs = st.builds(
    lambda **fields: job(**fields),
    grants=grants,
    trusted=st.sampled_from((True, True, False)),
    min_level=st.sampled_from(("F", "F", "F", *LEVELS)),
    profile=st.sampled_from(("default", "default", "fresh")),
    limits=st.builds(Limits, files=st.none() | st.integers(8, 4096), result_bytes=st.none() | st.integers(1, 1 << 30)),
)


@dataclasses.dataclass(frozen=True)
class Grant:
    """What one field of Grants takes: ``can`` on a host, and ``held`` in the plan of an admitted job."""

    asked: Callable[[Grants], bool]
    can: Callable[[HostReport, JobSpec], bool]
    held: Callable[[Plan, JobSpec], bool]


def view(host: HostReport) -> bool:
    """Namespaces, and a file tree of the job's own."""
    return host.level in ("A", "B")


def grouped(host: HostReport, controller: str) -> bool:
    """A total by cgroup; at D to F there is no group for each job."""
    return host.level in ("A", "B", "C") and controller in host.enforces


def countable(host: HostReport, spec: JobSpec) -> bool:
    """A number of processes: by cgroup, by user namespace (B), or by a uid that no one else has."""
    asked = spec.grants.pids or 0
    counted = grouped(host, "pids") or host.level == "B" or (not view(host) and bool(host.job_uids))
    return counted and ("cpu" in host.enforces or asked <= MOST_PIDS)


def roomy(host: HostReport, spec: JobSpec) -> bool:
    """A workspace of this size in every slot: charged to the jobs, or all fit in half the memory (attack 33)."""
    return "memory" in host.enforces or SLOTS * ((spec.grants.disk_bytes or 0) + (320 << 20)) <= RAM_BYTES // 2


def openable(host: HostReport, spec: JobSpec) -> bool:
    """Paths: by mounts; without a view by Landlock, for jobs with the agent's uid alone."""
    return view(host) or (not host.job_uids and host.landlock_abi > 0 and host.level in ("C", "D", "E"))


def mounted(plan: Plan, spec: JobSpec) -> bool:
    """Exactly the granted paths, each in its mode, and then no Unix sockets that were not asked for."""
    wanted = [(grant.path, grant.mode) for grant in spec.grants.paths]
    return [(mount.path, mount.mode) for mount in plan.mounts] == wanted and (
        not wanted or plan.allow_unix == spec.grants.unix
    )


ORACLE: Final[dict[str, Grant]] = {
    "paths": Grant(lambda g: bool(g.paths), openable, mounted),
    "net": Grant(lambda g: bool(g.net), lambda host, _: view(host), lambda *_: True),
    "secrets": Grant(lambda g: bool(g.secrets), lambda host, _: view(host), lambda plan, _: plan.broker),
    "tools": Grant(lambda g: bool(g.tools), lambda *_: False, lambda *_: False),
    "mail": Grant(lambda g: bool(g.mail), lambda *_: False, lambda *_: False),
    "agent": Grant(lambda g: g.agent is not None, lambda *_: False, lambda *_: False),
    "state_bytes": Grant(lambda g: g.state_bytes is not None, lambda *_: False, lambda *_: False),
    "watch": Grant(lambda g: bool(g.watch), lambda *_: False, lambda *_: False),
    "spawn": Grant(lambda g: g.spawn is not None, lambda *_: False, lambda *_: False),
    "memory_bytes": Grant(
        lambda g: g.memory_bytes is not None,
        lambda host, _: grouped(host, "memory"),
        lambda plan, spec: plan.memory_bytes == spec.grants.memory_bytes,
    ),
    "cpus": Grant(
        lambda g: g.cpus is not None,
        lambda host, _: grouped(host, "cpu"),
        lambda plan, spec: plan.cpus == spec.grants.cpus,
    ),
    "pids": Grant(lambda g: g.pids is not None, countable, lambda plan, spec: plan.pids == spec.grants.pids),
    "disk_bytes": Grant(
        lambda g: g.disk_bytes is not None,
        lambda host, spec: view(host) and roomy(host, spec),
        lambda plan, spec: plan.disk_bytes == spec.grants.disk_bytes,
    ),
    "service": Grant(lambda g: g.service, lambda host, _: view(host), lambda plan, _: plan.broker),
    "unix": Grant(lambda g: g.unix, lambda host, _: view(host), lambda plan, _: plan.allow_unix),
    "no_exec": Grant(lambda g: g.no_exec, lambda host, _: view(host), lambda plan, spec: not plan.allow_exec),
}


def levelled(host: HostReport, spec: JobSpec, policy: Policy) -> bool:
    """The job's own minimum holds; without trust on both sides it is at least B."""
    trusted = spec.trusted and policy is not UNTRUSTING
    least = spec.min_level if trusted else min("B", spec.min_level)
    return host.level in LEVELS and host.level <= least


def node(host: HostReport, policy: Policy) -> tuple[Rules, Defaults]:
    """What a node with this host judges by and fills in, from the agent's own code."""
    trusted = TrustedKey(KEY.key_id, KEY.public, ("enqueue", "kill"), ("main",))
    own = Ground.__new__(Ground)
    own.settings = cast(
        "AgentSettings", SimpleNamespace(name="n1", slots=SLOTS, tasks=("app",), task_path=(), labels={})
    )
    own.trust = cast("Trust", SimpleNamespace(by_id=lambda: {KEY.key_id: trusted}))
    own.policy, own.groups, own.loose, own.prices, own.fleet = policy, None, (), None, None
    with patch.object(grounds, "_ram", lambda: RAM_BYTES):
        return own.rules(host), own.defaults(host)


def decide(host: HostReport, spec: JobSpec, policy: Policy) -> tuple[Admitted | Denial, Defaults]:
    """Judge a well-signed job."""
    payload, signature = envelope(KEY, spec)
    rules, defaults = node(host, policy)
    return admit(Offer(spec.id, specs.lane_of(spec), 1, payload, signature), rules, lambda *_: "new", 1), defaults


def planned(spec: JobSpec, defaults: Defaults) -> Plan:
    """The sandbox of an admitted job, as it arrives at the worker."""
    mounts = tuple(Mount(grant.path, grant.mode, "dir") for grant in spec.grants.paths)
    return plans.loads(plans.dumps(sandbox.plan_of(spec, 1, mounts, 1000, 1000, defaults)))


@settings(max_examples=400)
@given(host=hosts, spec=jobs, policy=st.sampled_from((OPEN, OPEN, UNTRUSTING)))
def test_what_is_asked_is_enforced_or_refused(host: HostReport, spec: JobSpec, policy: Policy) -> None:
    """A job is admitted exactly if its level and every grant can be had; then the plan holds each of them as asked."""
    decision, defaults = decide(host, spec, policy)
    asked = {name: grant for name, grant in ORACLE.items() if grant.asked(spec.grants)}
    missing = [name for name, grant in asked.items() if not grant.can(host, spec)]
    possible = levelled(host, spec, policy) and not missing and (not spec.trusted or policy is not UNTRUSTING)
    if isinstance(decision, Denial):
        assert not possible, decision
        assert decision.message
        assert decision.reason in (
            RefuseReason.LEVEL,
            RefuseReason.POLICY,
            RefuseReason.UNENFORCEABLE,
            RefuseReason.BROKER_UNAVAILABLE,
        )
        return
    assert possible, f"admitted without {missing} at level {host.level}"
    plan = planned(decision.spec, defaults)
    assert {name for name, grant in asked.items() if not grant.held(plan, spec)} == set()
    _never_more(plan, host, spec)


def _never_more(plan: Plan, host: HostReport, spec: JobSpec) -> None:
    """What nobody asked for is not given: no path, no descriptor beyond the limit, no level above the host's."""
    assert plan.level == host.level
    assert len(plan.mounts) == len(spec.grants.paths)
    assert plan.files <= (spec.limits.files or plan.files)
    assert plan.result_bytes <= (spec.limits.result_bytes or plan.result_bytes)
    if "memory" not in host.enforces:
        assert plan.memory_bytes is None, "a total that no one counts is not promised by the plan either"
        assert SLOTS * (plan.disk_bytes + plan.tmp_bytes + plan.shm_bytes) <= RAM_BYTES // 2
    if "cpu" not in host.enforces:
        assert plan.pids <= MOST_PIDS
        assert plan.nice > 0


@settings(max_examples=100)
@given(host=hosts, spec=jobs)
def test_less_of_a_host_never_admits_more(host: HostReport, spec: JobSpec) -> None:
    """A host without cgroup and Landlock admits no job that the same host with them refuses."""
    bare = dataclasses.replace(host, enforces=(), cgroup="none", landlock_abi=0)
    if isinstance(decide(bare, spec, OPEN)[0], Admitted):
        assert isinstance(decide(host, spec, OPEN)[0], Admitted)


@settings(max_examples=100)
@given(host=hosts, spec=jobs)
def test_trust_needs_both_sides(host: HostReport, spec: JobSpec) -> None:
    """Below B nothing runs unless the job says trusted and the policy too."""
    if host.level in ("A", "B"):
        return
    untrusted = dataclasses.replace(spec, trusted=False)
    for policy in (OPEN, UNTRUSTING):
        assert isinstance(decide(host, untrusted, policy)[0], Denial)
    assert isinstance(decide(host, spec, UNTRUSTING)[0], Denial)


def test_the_oracle_knows_every_grant() -> None:
    """A new kind of grant has to say here what enforces it."""
    assert set(ORACLE) == {field.name for field in dataclasses.fields(Grants)}


def test_the_property_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counter-check: with one promise told as kept that is not, a job is admitted that the oracle refuses."""
    host = HostReport("B", "6.1.0", "x86_64", "3.11.2", 0)
    spec = job(grants=Grants(memory_bytes=1 << 30))
    assert isinstance(decide(host, spec, OPEN)[0], Denial)
    monkeypatch.setitem(promises._LIST, "memory", (lambda facts: (True, "a lie"), True))
    assert isinstance(decide(host, spec, OPEN)[0], Admitted)
    assert not ORACLE["memory_bytes"].can(host, spec)
