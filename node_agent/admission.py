"""Port: runner.signing, runner.scripts. Admission: may this claimed job run here? A doubt is a denial.

Called by the supervisor for each claim, before anything of the job exists on the host. Pure: trust, policy, host facts,
time and the ledger's answer come in, an Admitted or a Denial comes out. Must never look at the envelope's content
before the signature over the received bytes is verified, and never relax a check because another one passed.

An admitted job's path goes on in node_agent/supervisor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from node_agent import policy as policies
from node_agent.policy import Policy
from runner import lineage, signing
from runner.scripts.payload import JobData, Link
from runner.wire import reuse
from runner.wire import schedule as schedules
from runner.wire import spec as specs
from runner.wire.card import TrustedKey
from runner.wire.derived import BeyondError
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason
from runner.wire.times import iso

__all__ = ["Admitted", "Denial", "Enforcement", "Offer", "Rules", "admit", "asked_of"]

#: A node's clock may lag or lead a client's by this much, in milliseconds.
CLOCK_SLACK_MS: Final = 120_000
#: Levels at which anything runs; untrusted jobs need B. ``none`` is none of them.
_LEVELS: Final = ("A", "B", "C", "D", "E", "F")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a claim brought: the received bytes, where the store says they belong, and the limits it applied.

    ``occurrence``: the bytes are a signed schedule's, and the job is that of this due time (Unix ms). ``links``: the
    job is the child that they lead to. ``parks``: attempts that operators' words allow beside the signed ones;
    ``undecided``: one word never came (kernel/parking.py).
    """

    job_id: str
    lane: str
    attempt: int
    envelope: bytes
    signature: str
    flow: str = ""
    occurrence: int | None = None
    links: tuple[Link, ...] = ()
    parks: int = 0
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What this host really enforces, as probed: ``level`` A to F or none, and what it can't give who asks for it.

    ``lacks``: promise (read, write, net HOST:PORT, memory, cpu, pids, disk) → why it is not kept here. ``why`` and
    ``fix`` say what is missing below B and the exact command that helps. ``most_pids``: without a cpu controller a job
    with many processes starves the agent (attack 35). ``most_disk_bytes``: without a memory cgroup a workspace is
    charged to nobody (attack 33). ``prices``: this node knows what models cost.
    """

    level: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    fix: str = ""
    most_pids: int | None = None
    most_disk_bytes: int | None = None
    prices: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything a node judges by. ``tasks``: modules whose tasks it serves (the task allow-list).

    ``fleet``: the public key of the node cards; None: this home has none.
    """

    node: str
    trust: Mapping[str, TrustedKey]
    policy: Policy
    enforcement: Enforcement
    tasks: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None
    fleet: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job may run. ``rule`` is the policy rule that allows it, ``net`` what network destinations that lists."""

    spec: JobSpec
    signer: str
    rule: str
    net: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Denial:
    """The job must not run here. ``message`` says what happened, why and the next step."""

    reason: RefuseReason
    message: str
    spec: JobSpec | None = None


def admit(offer: Offer, rules: Rules, ledger: Callable[[str, int], str], now_ms: int) -> Admitted | Denial:
    """Return the decision. ``ledger(nonce, attempt)`` answers new, started or ended; ``now_ms`` is Unix time.

    An attempt that the ledger knows as ``started`` is not denied here: the supervisor reports it as lost.
    """
    known = _verified(offer, rules, now_ms)
    if isinstance(known, Denial):
        return known
    key, spec = known
    denial = (
        _bound(offer, spec)
        or _rights(key, spec)
        or _time(spec, now_ms)
        or _replay(offer, spec, ledger)
        or _place(spec, rules)
        or _secrets(spec)
    )
    if denial is not None:
        return denial
    decision = policies.decide(rules.policy, spec, key.id)
    if not decision.allowed:
        return Denial(RefuseReason.POLICY, decision.message, spec)
    denial = _task(spec, rules) or _tools(spec, rules) or _enforceable(spec, rules.enforcement)
    return denial if denial is not None else Admitted(spec, key.id, decision.rule, decision.net)


def _verified(offer: Offer, rules: Rules, now_ms: int) -> tuple[TrustedKey, JobSpec] | Denial:
    key_id = offer.signature.partition(".")[0]
    key = rules.trust.get(key_id)
    if key is None or key.revoked:
        what = "revoked" if key is not None else "not in this node's trust.toml"
        fix = f"`ringfence keys trust` on node {rules.node} adds a key"
        return Denial(RefuseReason.UNKNOWN_KEY, f"the job is signed by key {key_id[:16]!r}, which is {what}; {fix}")
    if not signing.verify(key.public, schedules.domain_of(offer.occurrence), offer.envelope, offer.signature):
        return Denial(RefuseReason.BAD_SIGNATURE, "the signature does not cover the received bytes: changed")
    try:
        # Nobody but the client signed an occurrence or a child: it is worked out again here (attack 4).
        found = JobData(offer.envelope, offer.signature, offer.occurrence, offer.links)
        return key, lineage.job_of(found, rules.fleet, now_ms)
    except lineage.ForgedLinkError as error:
        return Denial(RefuseReason.BAD_SIGNATURE, str(error))
    except BeyondError as error:
        return Denial(RefuseReason.POLICY, f"a child job asks for more than its parent was granted: {error}")
    except WireError as error:
        return Denial(RefuseReason.BAD_HASH, f"the signed job is no valid record: {error}")


def _bound(offer: Offer, spec: JobSpec) -> Denial | None:
    """The signature binds id and lane: a valid envelope moved to another job or queue is a forgery."""
    if spec.id != offer.job_id or specs.lane_of(spec) != offer.lane:
        return Denial(RefuseReason.BAD_SIGNATURE, "the signed job belongs to another id or queue", spec)
    if specs.flow_of(spec) != offer.flow:
        # Names, rates and places were taken under what the hash said (attacks 22, 56).
        message = "the stored unique name, rate or concurrency limit is not the signed one: enqueue the job again"
        return Denial(RefuseReason.BAD_HASH, message, spec)
    return None


def _rights(key: TrustedKey, spec: JobSpec) -> Denial | None:
    covers = (
        "enqueue" in key.may
        and ("*" in key.tenants or spec.tenant in key.tenants)
        and ("*" in key.queues or spec.queue in key.queues)
    )
    if covers:
        return None
    message = f"key {key.id} may not enqueue for tenant {spec.tenant} in queue {spec.queue}; see this node's trust.toml"
    return Denial(RefuseReason.POLICY, message, spec)


def _time(spec: JobSpec, now_ms: int) -> Denial | None:
    if now_ms > spec.not_after_ms + CLOCK_SLACK_MS:
        return Denial(RefuseReason.REPLAYED, "the signed job's time is over (not_after); enqueue it again", spec)
    if now_ms < spec.not_before_ms - CLOCK_SLACK_MS:
        message = (
            f"the signed job may not start before {iso(spec.not_before_ms)} and this node's clock says {iso(now_ms)}: "
            "a clock is wrong, or the store handed it out too early; check the clocks, then enqueue it again"
        )
        return Denial(RefuseReason.BAD_HASH, message, spec)
    return None


def _replay(offer: Offer, spec: JobSpec, ledger: Callable[[str, int], str]) -> Denial | None:
    most = spec.retry.count + 1 + offer.parks
    if offer.attempt == most + 1 and offer.undecided:
        return Denial(RefuseReason.POLICY, "a call of this job waited for a person, and nobody decided in time", spec)
    if offer.attempt < 1 or offer.attempt > most:
        message = f"attempt {offer.attempt} is not one of the {most} that were signed"
        return Denial(RefuseReason.REPLAYED, message, spec)
    if ledger(spec.nonce, offer.attempt) == "ended":
        return Denial(RefuseReason.REPLAYED, "this signed job already ran here; enqueue a new one", spec)
    return None


def _place(spec: JobSpec, rules: Rules) -> Denial | None:
    """Lanes are the store's word; node pin, labels and level are checked against the signed spec again."""
    labels = rules.labels or {}
    if spec.node not in (None, rules.node) or any(labels.get(key) != value for key, value in spec.labels.items()):
        return Denial(RefuseReason.POLICY, f"the job is pinned elsewhere; node {rules.node} may not serve it", spec)
    return _level(spec, rules)


def _level(spec: JobSpec, rules: Rules) -> Denial | None:
    """Below B only trusted jobs run, and only if the policy says so, too (it is asked next)."""
    facts = rules.enforcement
    needed = spec.min_level if spec.trusted else min("B", spec.min_level)
    if facts.level in _LEVELS and facts.level <= needed:
        return None
    message = f"the job needs isolation level {needed}, node {rules.node} offers {facts.level}"
    if facts.why:
        message += f": {facts.why}. Fix: {facts.fix}"
    if facts.level in _LEVELS and not spec.trusted:
        message += "; or, if the code is your own: --trusted, and trusted = true in the rule of this node's policy"
    return Denial(RefuseReason.LEVEL, message, spec)


def _task(spec: JobSpec, rules: Rules) -> Denial | None:
    if spec.task is None or spec.task.partition(":")[0] in rules.tasks:
        return None
    message = f"node {rules.node} does not serve tasks of module {spec.task.partition(':')[0]!r}"
    return Denial(RefuseReason.UNKNOWN_TASK, f"{message}; start it with --import MODULE[:DIR]", spec)


def _tools(spec: JobSpec, rules: Rules) -> Denial | None:
    missing = [name for name in spec.grants.tools if name not in rules.policy.tools]
    if not missing:
        return None
    message = f"node {rules.node} has no tool {missing[0]!r}; declare it as [[tool]] in its policy file"
    return Denial(RefuseReason.UNENFORCEABLE, message, spec)


def _enforceable(spec: JobSpec, host: Enforcement) -> Denial | None:
    if spec.reuse and (why := _unshared(spec, host)):
        return Denial(RefuseReason.UNENFORCEABLE, why, spec)
    if spec.budget is not None and spec.budget.cost_usd is not None and not host.prices:
        message = "this node has no price table, so it can't bound cost (cost_usd): write prices.toml in its home"
        return Denial(RefuseReason.UNENFORCEABLE, message, spec)
    for name in asked_of(spec) if host.lacks else ():
        if name in host.lacks:
            message = f"this host can't enforce {name!r} at level {host.level}: {host.lacks[name]}"
            return Denial(RefuseReason.UNENFORCEABLE, f"{message}; `ringfence doctor` on the node prints the fix", spec)
    if spec.grants.pids is not None and host.most_pids is not None and spec.grants.pids > host.most_pids:
        message = f"without a cpu controller a job has at most {host.most_pids} processes, not {spec.grants.pids}"
        return Denial(RefuseReason.UNENFORCEABLE, f"{message}; `ringfence doctor` on the node prints the fix", spec)
    most, disk = host.most_disk_bytes, spec.grants.disk_bytes
    if most is not None and disk is not None and disk > most:
        message = f"without a memory cgroup a job's workspace has at most {most >> 20} MiB here, not {disk >> 20}"
        return Denial(RefuseReason.UNENFORCEABLE, f"{message}; `ringfence doctor` on the node prints the fix", spec)
    return None


def _unshared(spec: JobSpec, host: Enforcement) -> str:
    """Why this job can't run where another one ran; nothing if it can."""
    if host.level not in ("A", "B"):
        return f"a worker is reused at level A or B only, this node offers {host.level}; leave reuse out"
    return reuse.problem(spec) or ""


def asked_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the promises that a job asks for, by the names of containment/promises.py."""
    grants = spec.grants
    asked = (
        ("read", any(path.mode == "read" for path in grants.paths)),
        ("write", any(path.mode == "write" for path in grants.paths)),
        ("net HOST:PORT", bool(grants.reach)),
        ("net none", not grants.reach),
        ("secrets", spec.needs_broker),
        ("memory", grants.memory_bytes is not None),
        ("cpu", grants.cpus is not None),
        ("pids", grants.pids is not None),
        ("disk", grants.disk_bytes is not None),
        ("no exec", grants.no_exec),
        ("service", grants.service),
        ("unix", grants.unix),
        ("reuse", spec.reuse > 0),
    )
    return tuple(name for name, is_asked in asked if is_asked)


def _secrets(spec: JobSpec) -> Denial | None:
    """A proxied secret goes to one host; whether there is a broker at all is asked before the start."""
    try:
        spec.grants.keyed  # noqa: B018 - raises for what names no host
    except WireError as error:
        return Denial(RefuseReason.BAD_HASH, str(error), spec)
    return None
