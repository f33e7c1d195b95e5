"""What a running job may do with its grants: the `[[call]]` rules of the policy file, judged one call at a time.

Called by policy (parses the file), node_agent/kernel/deciding.py and `ringfence policy`. Pure: takes values, returns a
Verdict. Must never allow by an error: a condition that can't be judged denies, and so does a call that nothing covers.
Who may open a file, reach a host or run a program is the sandbox's to enforce, never a pattern over texts here.

    calls = "granted"               # or "listed": a grant alone allows no call, an allow rule must list it, too
    [[call]]
    effect = "allow"                # or "deny", "ask"; deny beats ask beats allow
    actions = ["tool.call"]         # names of calls (docs/reference/kernel.md); fnmatch patterns
    resources = ["deploy"]          # tool, mailbox, or tree of paths such as "/state/out"; default every one
    tenants = ["main"]              # who: default every tenant, queue, key, task
    queues = ["*"]
    keys = ["*"]
    tasks = ["*"]                   # or the command's first word
    when = []                       # conditions, all of them: policyconditions.py
    per_minute = 10                 # quotas, counted in the whole fleet; rules with the same `quota` count together
    per_hour = 100
    concurrent = 2
    quota = "deploys"               # default: a name made of the rule itself
    per = "tenant"                  # or "job", "key": what each has a count of its own
    on_ask = "wait"                 # or "freeze", "requeue": what happens to the job while a person decides
    timeout_s = 3600.0              # no word by then is a no
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Final, Literal

from node_agent.errors import PolicyError
from node_agent.policyconditions import AllOf, Unknown, holds, parse_all
from runner.wire.spec import JobSpec

__all__ = [
    "OPS",
    "Ask",
    "CallRule",
    "Calls",
    "Quota",
    "Subject",
    "Verdict",
    "below",
    "judge",
    "matches",
    "parse_calls",
]

#: Every call that there is (node_agent/kernel/table.py): a rule for another one would be void, a deny rule above all.
#: tests/kernel/test_policy_ops.py compares it with the table.
OPS: Final = frozenset(
    {
        *("artifact.put", "budget.show", "job.exit", "job.spawn", "job.status", "job.wait", "job.watch"),
        *("file.close", "file.get", "file.list", "file.mkdir", "file.open", "file.put", "file.read", "file.remove"),
        *("file.rename", "file.seek", "file.stat", "file.sync", "file.truncate", "file.write"),
        *("mail.ack", "mail.ask", "mail.back", "mail.boxes", "mail.keep", "mail.receive", "mail.reply", "mail.send"),
        *("policy.ask", "progress.set", "signal.list", "signal.listen", "signal.mask", "signal.send"),
        *("tool.call", "tool.list"),
    }
)
Effect = Literal["allow", "deny", "ask"]
OnAsk = Literal["wait", "freeze", "requeue"]
_ANY: Final = ("*",)
_LISTS: Final = ("actions", "resources", "tenants", "queues", "keys", "tasks")
_COUNTS: Final = ("per_minute", "per_hour", "concurrent")
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "effect": ("allow", "deny", "ask"),
    "per": ("tenant", "job", "key"),
    "on_ask": ("wait", "freeze", "requeue"),
}
#: What outlives an attempt below /mem: under the name of an agent.
_KEPT: Final = ("/mem/episodic", "/mem/semantic", "/mem/procedural")
_QUOTA: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
#: Each use within the period is remembered by itself, so that no window ever holds more than the rule says.
MAX_COUNT: Final = 10_000
#: Longest tool name, mailbox or path that is judged, in characters.
MAX_RESOURCE: Final = 4096
#: Longest time that a person has, in seconds.
MAX_ASK_S: Final = 7 * 86_400.0
_SPANS: Final = {"per_minute": 60.0, "per_hour": 3600.0, "concurrent": 0.0}


@dataclass(frozen=True, slots=True)
class Quota:
    """One bound: at most ``count`` in any ``period_s``, or at a time if that is 0. ``name``: who counts together."""

    name: str
    count: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """What happens until a person has decided, and for how long at most."""

    how: OnAsk
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CallRule:
    """One `[[call]]` rule. Lists hold fnmatch patterns; a resource that begins with / is a tree of paths."""

    effect: Effect
    index: int
    actions: tuple[str, ...]
    resources: tuple[str, ...] = _ANY
    tenants: tuple[str, ...] = _ANY
    queues: tuple[str, ...] = _ANY
    keys: tuple[str, ...] = _ANY
    tasks: tuple[str, ...] = _ANY
    when: AllOf = AllOf()  # noqa: RUF009 - frozen
    per_minute: int | None = None
    per_hour: int | None = None
    concurrent: int | None = None
    quota: str = ""
    per: Literal["tenant", "job", "key"] = "tenant"
    on_ask: OnAsk = "wait"
    timeout_s: float = 3600.0

    @property
    def label(self) -> str:
        """How messages name this rule."""
        return f"[[call]] rule {self.index} ({self.effect})"

    def quotas(self, subject: Subject) -> tuple[Quota, ...]:
        """Return this rule's bounds, each with the name that its uses are counted under in the job's tenant."""
        scope = {"tenant": "", "job": subject.spec.id, "key": subject.key}[self.per]
        found = []
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None:
                found.append(Quota(f"{self.quota or self._own_name()}:{name}:{scope}", count, _SPANS[name]))
        return tuple(found)

    def _own_name(self) -> str:
        """The same on every node whose policy has this very rule, wherever it stands in the file."""
        text = repr(replace(self, index=0))
        return "-" + hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Calls:
    """Every `[[call]]` rule. ``listed``: a grant alone allows nothing. ``version``: SHA-256 of the policy file."""

    rules: tuple[CallRule, ...] = ()
    listed: bool = False
    version: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """Who calls: the verified job, the id of the key that signed it, its attempt and node."""

    spec: JobSpec
    key: str
    attempt: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one call: what, by which rule, why; ``policy`` is the hash of the file that it was made by."""

    effect: Effect
    rule: str = ""
    reason: str = ""
    policy: str = ""
    quotas: tuple[Quota, ...] = ()
    ask: Ask | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but the effect is to be carried out."""
        return self.effect != "ask" and not (self.effect == "allow" and self.quotas)

    @property
    def allowed(self) -> bool:
        """Whether the call may be carried out. Only an allow is one: ``if verdict`` is an error, see __bool__."""
        return self.effect == "allow"

    def __bool__(self) -> bool:
        raise TypeError("a verdict is no truth value: look at its effect, or at allowed")


def judge(calls: Calls, subject: Subject, action: str, resource: str, args: Mapping[str, object]) -> Verdict:
    """Return the decision on one call. Deny beats ask beats allow; what nothing covers is denied; never raises."""
    odd = _odd(resource)
    if odd:
        return Verdict("deny", "no rule", odd, calls.version)
    candidates = [rule for rule in calls.rules if _concerns(rule, subject, action, resource)]
    facts = _facts(subject, action, resource, args) if any(rule.when.parts for rule in candidates) else {}
    hit: list[CallRule] = []
    for rule in candidates:
        found = holds(rule.when, facts) if rule.when.parts else True
        if isinstance(found, Unknown):
            reason = f"a condition of {rule.label} can't be judged: {found.why}"
            return Verdict("deny", rule.label, reason, calls.version)
        if found:
            hit.append(rule)
    return _weighed(calls, subject, f"{action} {resource}".rstrip(), hit, _ungranted(subject.spec, action, resource))


def _weighed(calls: Calls, subject: Subject, what: str, hit: Sequence[CallRule], missing: str) -> Verdict:
    """Return the verdict of the rules that hold. ``missing``: the grant that the job does not have."""
    denies = next((rule for rule in hit if rule.effect == "deny"), None)
    if denies is not None:
        return Verdict("deny", denies.label, f"{denies.label} of this node's policy denies {what}", calls.version)
    if missing:
        return Verdict("deny", "no grant", f"this job was not granted {missing}", calls.version)
    if not hit:
        if not calls.listed:
            return Verdict("allow", "grants", "the job's grants cover it", calls.version)
        reason = f'no [[call]] rule of this node\'s policy allows {what} (calls = "listed")'
        return Verdict("deny", "no rule", reason, calls.version)
    quotas = tuple(quota for rule in hit for quota in rule.quotas(subject))
    asks = next((rule for rule in hit if rule.effect == "ask"), None)
    if asks is not None:
        reason = f"{asks.label} of this node's policy leaves it to a person"
        return Verdict("ask", asks.label, reason, calls.version, quotas, Ask(asks.on_ask, asks.timeout_s))
    return Verdict("allow", hit[0].label, f"{hit[0].label} allows it", calls.version, quotas)


def parse_calls(entries: object, mode: object, version: str) -> Calls:
    """Return the `[[call]]` rules of the file. Raises PolicyError for anything not understood."""
    if mode not in ("granted", "listed"):
        raise PolicyError('calls is "granted" or "listed"')
    if not isinstance(entries, list):
        raise PolicyError("[[call]] must be a list of tables")
    return Calls(tuple(_rule(index, entry) for index, entry in enumerate(entries, 1)), mode == "listed", version)


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether one of the fnmatch patterns matches."""
    return "*" in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def below(trees: tuple[str, ...], path: str) -> bool:
    """Return whether a path is one of the trees or lies in one, by its components."""
    return any(tree == "*" or path == tree or path.startswith(tree.rstrip("/") + "/") for tree in trees)


def _odd(resource: str) -> str:
    """Another spelling of a path must not slip past a rule, whoever made it; and no pattern looks at a long text."""
    if len(resource) > MAX_RESOURCE:
        return f"what a call is made on has at most {MAX_RESOURCE} characters"
    if not resource.startswith("/") or posixpath.normpath(resource) == resource:
        return ""
    return "the path has //, . or .. in it"


def _concerns(rule: CallRule, subject: Subject, action: str, resource: str) -> bool:
    spec = subject.spec
    return (
        matches(rule.actions, action)
        and matches(rule.tenants, spec.tenant)
        and matches(rule.queues, spec.queue)
        and matches(rule.keys, subject.key)
        and matches(rule.tasks, spec.name)
        and any(_covers(pattern, resource) for pattern in rule.resources)
    )


def _covers(pattern: str, resource: str) -> bool:
    return below((pattern,), resource) if pattern.startswith("/") else fnmatchcase(resource, pattern)


def _facts(subject: Subject, action: str, resource: str, args: Mapping[str, object]) -> Mapping[str, object]:
    spec = subject.spec
    return {
        "tenant": spec.tenant,
        "queue": spec.queue,
        "task": spec.task,
        "command": spec.argv[0] if spec.argv is not None else None,
        "key": subject.key,
        "node": subject.node,
        "group": spec.group,
        "priority": spec.priority,
        "attempt": subject.attempt,
        "action": action,
        "resource": resource,
        "tags": spec.tags,
        "labels": spec.labels,
        "args": args,
    }


def _ungranted(spec: JobSpec, action: str, resource: str) -> str:
    """Name the grant that a call needs and the job does not have. The handlers check theirs in full all the same."""
    grants = spec.grants
    noun = action.partition(".")[0]
    if action == "tool.call":
        if not resource:
            return "a tool without a name: the resource of tool.call is the tool"
        return "" if resource in grants.tools else f"the tool {resource} (--tool {resource})"
    if action == "job.spawn":
        return "" if grants.spawn else "jobs of its own (--spawn N)"
    if noun == "mail" and resource and not resource.startswith("@"):
        named = any(one.name == resource for one in grants.mail)
        return "" if named else f"the mailbox {resource} (--mail {resource})"
    if noun == "file" and below(("/state",), resource):
        return "" if grants.state_bytes else "a /state (--state SIZE)"
    if noun == "file" and below(_KEPT, resource):
        return "" if grants.agent else "an agent's memory (--agent NAME)"
    return ""


def _rule(index: int, entry: object) -> CallRule:
    where = f"[[call]] rule {index}"
    if not isinstance(entry, dict):
        raise PolicyError(f"{where} must be a table")
    known = {field.name for field in fields(CallRule)} - {"index"}
    values: dict[str, object] = {}
    for key, value in entry.items():
        if key not in known:
            raise PolicyError(f"unknown key {key!r} in {where}")
        values[key] = _value(f"{where}: {key}", key, value)
    if "effect" not in values or not values.get("actions"):
        raise PolicyError(f"{where} needs an effect and actions")
    rule = CallRule(index=index, **values)  # type: ignore[arg-type]  # _value checked each type by its key
    _check(where, rule, values)
    return rule


def _check(where: str, rule: CallRule, given: Mapping[str, object]) -> None:
    """What a rule would ignore is refused."""
    for pattern in rule.actions:
        if not any(fnmatchcase(op, pattern) for op in OPS):
            raise PolicyError(f"{where}: there is no call {pattern!r} (docs/reference/kernel.md)")
    if rule.effect == "deny" and not given.keys().isdisjoint({*_COUNTS, "quota", "per"}):
        raise PolicyError(f"{where}: a deny rule has no quota")
    if rule.effect != "ask" and not given.keys().isdisjoint({"on_ask", "timeout_s"}):
        raise PolicyError(f'{where}: on_ask and timeout_s go with effect = "ask"')
    if not given.keys().isdisjoint({"quota", "per"}) and given.keys().isdisjoint(_COUNTS):
        raise PolicyError(f"{where}: quota and per go with {', '.join(_COUNTS)}")


def _value(where: str, key: str, value: object) -> object:
    if key in _LISTS:
        return _texts(where, key, value)
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise PolicyError(f"{where} is one of {', '.join(_CHOICES[key])}")
        return value
    if key == "when":
        return parse_all(where, value)
    if key == "quota":
        if not isinstance(value, str) or not _QUOTA.fullmatch(value):
            raise PolicyError(f"{where} is 1 to 64 letters, digits, _ . and -")
        return value
    return _number(where, key, value)


def _number(where: str, key: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise PolicyError(f"{where} must be a positive number")
    if key in _COUNTS:
        if not isinstance(value, int) or value > MAX_COUNT:
            raise PolicyError(f"{where} is a whole number, at most {MAX_COUNT}")
        return value
    if not value <= MAX_ASK_S:
        raise PolicyError(f"{where} is at most {MAX_ASK_S:g}")
    return float(value)


def _texts(where: str, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise PolicyError(f"{where} must be a list of non-empty strings")
    if key != "resources":
        return tuple(value)
    found = []
    for item in value:
        plain = item.rstrip("/") or "/"
        if item.startswith("/") and posixpath.normpath(plain) != plain:
            raise PolicyError(f"{where}: {item} must have no //, . or .. in it")
        found.append(plain if item.startswith("/") else item)
    return tuple(found)
