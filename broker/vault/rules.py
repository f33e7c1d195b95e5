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
    field = "query:api_key"            # with proxy, instead of header: {{SECRET}} there becomes the value; placing.py
    sdk = "openai"                     # with proxy; or "anthropic", "generic": whose base URL the job is told
    requests = ["POST /v1/chat/*"]     # with proxy; default every request to these hosts
    body_bytes = 1048576               # with proxy; most that one request may send; default the egress process's
    at_once = 4                        # with proxy; most requests of one job under way; default the egress process's
    ttl_s = 900.0                      # at most this long after the attempt's start; default: as long as it runs
    uses = 100                         # at most so many releases or proxied requests; default no limit
    approve = false                    # true: a person has to say yes first
    on_leak = "redact"                 # "kill": the job ends if its output or its result shows the value
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeVar

from broker.vault import bounds, placing
from broker.vault.errors import RulesError

__all__ = ["Ask", "Decision", "Mode", "OnLeak", "Rule", "Rules", "decide", "least", "parse"]

_N = TypeVar("_N", int, float)
Mode = Literal["proxy", "get", "file", "env"]
OnLeak = Literal["redact", "kill"]
_ON_LEAK: Final = ("redact", "kill")
_WAY: Final = ("header", "on_leak", "requests", "field", "sdk", "body_bytes", "at_once")
_MODES: Final = ("proxy", "get", "file", "env")
_ANY: Final = ("*",)
_LISTS: Final = ("secrets", "tenants", "tasks", "commands", "queues", "tags", "modes", "hosts", "requests")
_PROXY: Final = frozenset({"header", "field", "sdk", "requests", "body_bytes", "at_once"})
_LIMITS: Final = _PROXY | {"modes", "hosts", "ttl_s", "uses", "approve", "on_leak"}
_CHOICES: Final = {"on_leak": _ON_LEAK, "sdk": ("openai", "anthropic", "generic")}
_PLACES: Final = {"header": placing.check, "field": placing.check_field}
_WHOLE: Final = frozenset({"uses", "body_bytes", "at_once"})


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
    field: str = ""
    sdk: str = ""
    body_bytes: int | None = None
    at_once: int | None = None

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
    field: str = ""
    sdk: str = ""
    body_bytes: int | None = None
    at_once: int | None = None


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
            ttl_s, uses = least(rule.ttl_s, ask.ttl_s), least(rule.uses, ask.uses)
            way = {name: getattr(rule, name) for name in _WAY}
            return Decision(True, rule.label, "", ttl_s, uses, rule.approve, **way)
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
    if ask.mode == "proxy" and rule.field and placing.models(ask.host or ""):
        return f"{ask.host}: it answers in words, so that a value in a field of its could be asked back"
    return None


def _match(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def least(first: _N | None, second: _N | None) -> _N | None:
    """Return the smaller one; None is no limit."""
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
    _check_proxy(where, rule, values.keys())
    if "requests" in values and not rule.requests:
        raise RulesError(f"{where}: requests lists what is allowed; leave it out to allow every request")
    return rule


def _check_proxy(where: str, rule: Rule, keys: Collection[str]) -> None:
    for key in sorted(_PROXY.intersection(keys)) if "proxy" not in rule.modes else ():
        raise RulesError(f"{where}: {key} is for the mode proxy")
    if rule.field and "header" in keys:
        raise RulesError(f"{where}: a value goes into a header or into a field, not into both")
    if rule.field and rule.sdk in ("openai", "anthropic"):
        raise RulesError(f"{where}: a model gives its input back, so no value goes into a field of its requests")


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or value not in _CHOICES.get(key, (value,)):
        raise RulesError(f"{where} must be {' or '.join(_CHOICES.get(key, ('a string',)))}")
    return _PLACES[key](value) if key in _PLACES else value


def _value(where: str, key: str, value: object) -> object:
    if key in _LISTS:
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise RulesError(f"{where} must be a list of non-empty strings")
        return tuple(map(bounds.check, value)) if key == "requests" else tuple(value)
    if key in _PLACES or key in _CHOICES:
        return _text(where, key, value)
    if key == "approve":
        if not isinstance(value, bool):
            raise RulesError(f"{where} must be true or false")
        return value
    number = int if key in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, number) or not 0 < value < math.inf:
        raise RulesError(f"{where} must be a positive number")
    return value if key in _WHOLE else float(value)
