"""The vault's own policy: which job may have which secret, how, where to, for how long. Default deny, deny beats allow.

Called by the broker for each lease and each request, and by `ringfence vault explain`. Pure: takes a text and values,
returns values. Must never widen by combination: one allow rule gives all of the limits; what a job asks for only
narrows them. Unknown keys refuse to load.

    version = 1
    [[allow]]                          # or [[deny]]
    secrets = ["OPENAI_*"]             # names; patterns where * and ? match within the whole name
    tenants = ["acme"]                 # required, "*" must be written out; so must one of tasks and commands
    tasks = ["app.research:*"]
    commands = ["aider"]
    queues = ["*"]                     # default every queue
    tags = ["team=ml"]                 # default none needed; all listed ones must be on the job
    modes = ["proxy"]                  # default proxy; also get, file, env
    hosts = ["api.openai.com"]         # required with proxy; HOST:PORT for another port than 443
    header = "x-api-key: {value}"      # with proxy; default "Authorization: Bearer {value}"
    requests = ["POST /v1/chat/*"]     # with proxy; default every request to these hosts
    ttl_s = 900.0                      # at most this long after the attempt's start; default: as long as it runs
    uses = 100                         # at most so many releases or proxied requests; default no limit
    approve = false                    # true: a person has to say yes first
    on_leak = "redact"                 # "kill": the job ends if its output or its result shows the value
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeVar

from broker.vault import bounds, placing
from broker.vault.errors import RulesError

__all__ = ["Ask", "Decision", "Mode", "OnLeak", "Rule", "Rules", "decide", "parse"]

_N = TypeVar("_N", int, float)
Mode = Literal["proxy", "get", "file", "env"]
OnLeak = Literal["redact", "kill"]
_ON_LEAK: Final = ("redact", "kill")
_MODES: Final = ("proxy", "get", "file", "env")
_ANY: Final = ("*",)
_LISTS: Final = ("secrets", "tenants", "tasks", "commands", "queues", "tags", "modes", "hosts", "requests")
_LIMITS: Final = frozenset({"modes", "hosts", "requests", "ttl_s", "uses", "approve", "header", "on_leak"})


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the file; lists hold fnmatch patterns."""

    effect: Literal["allow", "deny"]
    index: int
    secrets: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    queues: tuple[str, ...] = _ANY
    tags: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("proxy",)
    hosts: tuple[str, ...] = ()
    ttl_s: float | None = None
    uses: int | None = None
    approve: bool = False
    header: str = placing.DEFAULT
    requests: tuple[str, ...] = ()
    on_leak: OnLeak = "redact"

    @property
    def label(self) -> str:
        """How messages name this rule."""
        return f"[[{self.effect}]] rule {self.index}"


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, the deny rules first."""

    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One secret that a job wants. Every field comes from what the node verified, never from the job's own word."""

    secret: str
    mode: Mode
    tenant: str
    queue: str
    task: str | None = None
    command: str | None = None
    host: str | None = None
    tags: Mapping[str, str] | None = None
    ttl_s: float | None = None
    uses: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say: the rule that decides, the limits it gives, or why there is none."""

    allowed: bool
    rule: str
    message: str = ""
    ttl_s: float | None = None
    uses: int | None = None
    approve: bool = False
    header: str = placing.DEFAULT
    on_leak: OnLeak = "redact"
    requests: tuple[str, ...] = ()


def parse(text: str) -> Rules:
    """Return the rules of a TOML text. Raises RulesError for anything not understood: then the old rules stay."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RulesError(f"the vault's policy is not TOML: {error}") from None
    if table.pop("version", None) != 1:
        raise RulesError("the vault's policy needs `version = 1`")
    rules: list[Rule] = []
    effects: tuple[Literal["deny", "allow"], ...] = ("deny", "allow")
    for effect in effects:
        entries = table.pop(effect, [])
        if not isinstance(entries, list):
            raise RulesError(f"[[{effect}]] must be a list of tables")
        rules += [_rule(effect, index, entry) for index, entry in enumerate(entries, 1)]
    if table:
        raise RulesError(f"unknown key {sorted(table)[0]!r} in the vault's policy")
    return Rules(tuple(rules))


def decide(rules: Rules, ask: Ask) -> Decision:
    """Return whether the job may have the secret, by the first allow rule that covers it all."""
    closest = Decision(False, "no rule", f"no rule of the vault's policy names {ask.secret} for this tenant")
    for rule in rules.rules:
        if not _match(rule.secrets, ask.secret) or not _match(rule.tenants, ask.tenant):
            continue
        if rule.effect == "deny":
            if _of_job(rule, ask) is None:
                return Decision(False, rule.label, f"{rule.label} denies {ask.secret}")
            continue
        missing = _of_job(rule, ask) or _of_way(rule, ask)
        if missing is None:
            ttl_s, uses = _least(rule.ttl_s, ask.ttl_s), _least(rule.uses, ask.uses)
            return Decision(True, rule.label, "", ttl_s, uses, rule.approve, rule.header, rule.on_leak, rule.requests)
        closest = Decision(False, rule.label, f"{rule.label} does not cover {missing}")
    return closest


def _of_job(rule: Rule, ask: Ask) -> str | None:
    """Return what of the job itself the rule does not fit."""
    if not _match(rule.queues, ask.queue):
        return f"the queue {ask.queue}"
    tags = {f"{name}={value}" for name, value in (ask.tags or {}).items()}
    for tag in rule.tags:
        if not any(fnmatchcase(found, tag) for found in tags):
            return f"a job without the tag {tag}"
    if ask.task is not None:
        return None if _match(rule.tasks, ask.task) else f"the task {ask.task}"
    return None if _match(rule.commands, ask.command or "") else f"the command {ask.command}"


def _of_way(rule: Rule, ask: Ask) -> str | None:
    if ask.mode not in rule.modes:
        return f"the mode {ask.mode}"
    if ask.mode == "proxy" and not _match(rule.hosts, ask.host or ""):
        return f"the host {ask.host}"
    return None


def _match(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _least(first: _N | None, second: _N | None) -> _N | None:
    return second if first is None else first if second is None else min(first, second)


def _rule(effect: Literal["allow", "deny"], index: int, entry: object) -> Rule:
    where = f"[[{effect}]] rule {index}"
    if not isinstance(entry, dict):
        raise RulesError(f"{where} must be a table")
    known = {field.name for field in fields(Rule)} - {"effect", "index"}
    values: dict[str, object] = {}
    for key, value in entry.items():
        if key not in known:
            raise RulesError(f"unknown key {key!r} in {where}")
        values[key] = _value(f"{where}: {key}", key, value)
    if effect == "deny" and values.keys() & _LIMITS:
        raise RulesError(f"{where}: a deny rule holds whatever the way, so it takes no {', '.join(sorted(_LIMITS))}")
    rule = Rule(effect, index, **values)  # type: ignore[arg-type]  # _value checked each type by its key
    if not rule.secrets or not rule.tenants or not (rule.tasks or rule.commands):
        raise RulesError(f'{where} needs secrets, tenants, and tasks or commands; write "*" for every one')
    if not set(rule.modes) <= set(_MODES):
        raise RulesError(f"{where}: modes are {', '.join(_MODES)}")
    if effect == "allow" and "proxy" in rule.modes and not rule.hosts:
        raise RulesError(f"{where}: proxy needs hosts, or a secret could be sent anywhere")
    for key in values.keys() & {"header", "requests"} if "proxy" not in rule.modes else ():
        raise RulesError(f"{where}: {key} is for the mode proxy")
    if "requests" in values and not rule.requests:
        raise RulesError(f"{where}: requests lists what is allowed; leave it out to allow every request")
    return rule


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or (key == "on_leak" and value not in _ON_LEAK):
        raise RulesError(f"{where} must be {'a string' if key == 'header' else 'redact or kill'}")
    return placing.check(value) if key == "header" else value


def _value(where: str, key: str, value: object) -> object:
    if key in _LISTS:
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise RulesError(f"{where} must be a list of non-empty strings")
        return tuple(map(bounds.check, value)) if key == "requests" else tuple(value)
    if key in ("header", "on_leak"):
        return _text(where, key, value)
    if key == "approve":
        if not isinstance(value, bool):
            raise RulesError(f"{where} must be true or false")
        return value
    number = int if key == "uses" else (int, float)
    if isinstance(value, bool) or not isinstance(value, number) or not 0 < value < math.inf:
        raise RulesError(f"{where} must be a positive number")
    return value if key == "uses" else float(value)
