"""A policy tried on made-up jobs and calls: what `ringfence policy explain` and `policy test` do. Pure.

Called by the command line. Must never judge otherwise than the node does: the same functions decide here and there.

    [[case]]
    name = "nobody deploys to production at night"
    job = { task = "jobs:ship", queue = "night", grants = { tools = ["deploy"] } }     # fields of a job spec
    key = "0123456789abcdef"        # the signing key's id; default one that no rule names
    action = "tool.call"            # without it: is the job let in?
    resource = "deploy"
    args = { env = "prod" }
    expect = "deny"                 # allow, deny, and for calls ask
    rule = "[[call]] rule 2 (deny)" # optional
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node_agent.errors import PolicyError
from node_agent.policy import Policy, decide
from node_agent.policycalls import Subject, judge
from runner.wire import ids, record
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec

__all__ = ["NO_KEY", "Said", "Tried", "explained", "spec_of", "tried"]

NO_KEY: Final = "0" * 16
_FAR_MS: Final = 4_000_000_000_000
_KNOWN: Final = frozenset({"name", "job", "key", "action", "resource", "args", "expect", "rule"})
_EFFECTS: Final = ("allow", "deny", "ask")


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy says."""

    decision: str
    rule: str
    reason: str
    policy: str


@dataclass(frozen=True, slots=True)
class Tried:
    """One case: what was expected and what was said."""

    name: str
    expected: str
    expected_rule: str | None
    said: Said

    @property
    def right(self) -> bool:
        """Whether the policy does as the case says."""
        return self.said.decision == self.expected and self.expected_rule in (None, self.said.rule)


def spec_of(fields: Mapping[str, object]) -> JobSpec:
    """Return a job spec of these fields; what every job has and no rule looks at is filled in. Raises PolicyError."""
    tenant = fields.get("tenant", ids.DEFAULT_TENANT)
    try:
        base = {
            "id": ids.new_job_id(str(tenant)),
            "tenant": tenant,
            "queue": "agents",
            "nonce": ids.new_nonce(),
            "not_before_ms": 0,
            "not_after_ms": _FAR_MS,
        }
        return record.decode(JobSpec, {**base, **fields}, "job")
    except WireError as error:
        raise PolicyError(f"this is no job: {error}") from None


def explained(
    policy: Policy,
    spec: JobSpec,
    key: str,
    action: str = "",
    resource: str = "",
    args: Mapping[str, object] | None = None,
) -> Said:
    """Return what the policy says of a job, or of a call of it."""
    decision = decide(policy, spec, key)
    if not action or not decision.allowed:
        effect = "allow" if decision.allowed else "deny"
        return Said(effect, decision.rule, decision.message or f"{decision.rule} allows it", policy.version)
    verdict = judge(policy.calls, Subject(spec, key, 1), action, resource, args or {})
    return Said(verdict.effect, verdict.rule, verdict.reason, verdict.policy)


def tried(policy: Policy, text: str) -> list[Tried]:
    """Return what became of each case of a TOML text. Raises PolicyError for one that is not understood."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"the cases are not TOML: {error}") from None
    cases = table.pop("case", None)
    if table or not isinstance(cases, list) or not cases:
        raise PolicyError("a file of cases holds [[case]] tables, and nothing else")
    return [_tried(policy, index, case) for index, case in enumerate(cases, 1)]


def _tried(policy: Policy, index: int, case: object) -> Tried:
    where = f"[[case]] {index}"
    if not isinstance(case, dict) or not case.keys() <= _KNOWN or not isinstance(case.get("job"), dict):
        raise PolicyError(f"{where} has a job, an expect, and of {', '.join(sorted(_KNOWN))} nothing else")
    texts = {name: case.get(name, "") for name in ("name", "key", "action", "resource", "rule")}
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(case.get("args", {}), dict):
        raise PolicyError(f"{where}: {', '.join(texts)} are texts, args is a table")
    if case.get("expect") not in _EFFECTS:
        raise PolicyError(f"{where}: expect is one of {', '.join(_EFFECTS)}")
    if not texts["action"] and ("resource" in case or "args" in case):
        raise PolicyError(f"{where}: resource and args go with an action")
    said = explained(
        policy,
        spec_of(case["job"]),
        str(texts["key"] or NO_KEY),
        str(texts["action"]),
        str(texts["resource"]),
        case.get("args"),
    )
    return Tried(str(texts["name"] or where), str(case["expect"]), case.get("rule"), said)
