"""Port: runner.signing. Admission: may this claimed job run on this node? Every check on values; a doubt is a denial.

Called by the supervisor for each claim, before anything of the job exists on the host. Pure: trust, policy, host facts,
time and the ledger's answer come in, an Admitted or a Denial comes out. Must never look at the envelope's content
before the signature over the received bytes is verified, and never relax a check because another one passed.

An admitted job's path goes on in node_agent/supervisor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from node_agent import policy as policies
from node_agent.policy import Policy
from runner import signing
from runner.wire import spec as specs
from runner.wire.card import TrustedKey
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason

__all__ = ["Admitted", "Denial", "Enforcement", "Offer", "Rules", "admit"]

#: A node's clock may lag or lead a client's by this much, in milliseconds.
CLOCK_SLACK_MS: Final = 120_000
#: Levels that untrusted jobs may run at; lower ones (and ``none``) come with the ladder's own issue.
_LEVELS: Final = ("A", "B")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a claim brought: the received bytes, and where the store says they belong."""

    job_id: str
    lane: str
    attempt: int
    envelope: bytes
    signature: str


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What this host really enforces, as probed: ``level`` A, B or none, and the totals it can bound.

    ``totals``: subset of memory, cpu, pids. ``why`` and ``fix`` say what is missing and the exact command that helps.
    """

    level: str
    totals: frozenset[str] = frozenset()
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything a node judges by. ``tasks``: modules whose tasks it serves (the task allow-list)."""

    node: str
    trust: Mapping[str, TrustedKey]
    policy: Policy
    enforcement: Enforcement
    tasks: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job may run. ``rule`` is the policy rule that allows it."""

    spec: JobSpec
    signer: str
    rule: str


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
    known = _verified(offer, rules)
    if isinstance(known, Denial):
        return known
    key, spec = known
    denial = (
        _bound(offer, spec)
        or _rights(key, spec)
        or _time(spec, now_ms)
        or _replay(offer, spec, ledger)
        or _place(spec, rules)
    )
    if denial is not None:
        return denial
    decision = policies.decide(rules.policy, spec, key.id)
    if not decision.allowed:
        return Denial(RefuseReason.POLICY, decision.message, spec)
    denial = _task(spec, rules) or _enforceable(spec, rules.enforcement) or _secrets(spec)
    return denial if denial is not None else Admitted(spec, key.id, decision.rule)


def _verified(offer: Offer, rules: Rules) -> tuple[TrustedKey, JobSpec] | Denial:
    key_id = offer.signature.partition(".")[0]
    key = rules.trust.get(key_id)
    if key is None or key.revoked:
        what = "revoked" if key is not None else "not in this node's trust.toml"
        fix = f"`ringfence keys trust` on node {rules.node} adds a key"
        return Denial(RefuseReason.UNKNOWN_KEY, f"the job is signed by key {key_id[:16]!r}, which is {what}; {fix}")
    if not signing.verify(key.public, Domain.JOB, offer.envelope, offer.signature):
        return Denial(RefuseReason.BAD_SIGNATURE, "the signature does not cover the received bytes: changed")
    try:
        return key, specs.decode(offer.envelope)
    except WireError as error:
        return Denial(RefuseReason.BAD_HASH, f"the signed job is no valid record: {error}")


def _bound(offer: Offer, spec: JobSpec) -> Denial | None:
    """The signature binds id and lane: a valid envelope moved to another job or queue is a forgery."""
    if spec.id != offer.job_id or specs.lane_of(spec) != offer.lane:
        return Denial(RefuseReason.BAD_SIGNATURE, "the signed job belongs to another id or queue", spec)
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
    return None


def _replay(offer: Offer, spec: JobSpec, ledger: Callable[[str, int], str]) -> Denial | None:
    if offer.attempt < 1 or offer.attempt > spec.retry.count + 1:
        message = f"attempt {offer.attempt} is not one of the {spec.retry.count + 1} that were signed"
        return Denial(RefuseReason.REPLAYED, message, spec)
    if ledger(spec.nonce, offer.attempt) == "ended":
        return Denial(RefuseReason.REPLAYED, "this signed job already ran here; enqueue a new one", spec)
    return None


def _place(spec: JobSpec, rules: Rules) -> Denial | None:
    """Lanes are the store's word; node pin, labels and level are checked against the signed spec again."""
    labels = rules.labels or {}
    if spec.node not in (None, rules.node) or any(labels.get(key) != value for key, value in spec.labels.items()):
        return Denial(RefuseReason.POLICY, f"the job is pinned elsewhere; node {rules.node} may not serve it", spec)
    level = rules.enforcement.level
    if level not in _LEVELS or level > min("B", spec.min_level):
        facts = rules.enforcement
        message = f"the job needs isolation level {spec.min_level}, node {rules.node} offers {level}"
        return Denial(RefuseReason.LEVEL, f"{message}: {facts.why}. Fix: {facts.fix}" if facts.why else message, spec)
    return None


def _task(spec: JobSpec, rules: Rules) -> Denial | None:
    if spec.task is None or spec.task.partition(":")[0] in rules.tasks:
        return None
    message = f"node {rules.node} does not serve tasks of module {spec.task.partition(':')[0]!r}"
    return Denial(RefuseReason.UNKNOWN_TASK, f"{message}; start it with --import MODULE[:DIR]", spec)


def _enforceable(spec: JobSpec, host: Enforcement) -> Denial | None:
    if spec.grants.net:
        return Denial(RefuseReason.UNENFORCEABLE, "network grants are not in this version; only --net none is", spec)
    if spec.grants.tools:
        return Denial(RefuseReason.UNENFORCEABLE, "tools are not in this version", spec)
    if spec.profile.startswith("reuse="):
        return Denial(RefuseReason.UNENFORCEABLE, "the reuse profile is not in this version", spec)
    asked = (("memory", spec.grants.memory_bytes), ("cpu", spec.grants.cpus), ("pids", spec.grants.pids))
    for name, value in asked:
        if value is not None and name not in host.totals:
            message = f"this host can't enforce a {name} total at level {host.level} (it needs a cgroup)"
            return Denial(RefuseReason.UNENFORCEABLE, f"{message}; `ringfence doctor` on the node prints the fix", spec)
    return None


def _secrets(spec: JobSpec) -> Denial | None:
    if not spec.grants.secrets:
        return None
    names = ", ".join(secret.name for secret in spec.grants.secrets)
    message = f"the job asks for {names}, and this version has no vault broker; it never runs without"
    return Denial(RefuseReason.BROKER_UNAVAILABLE, message, spec)
