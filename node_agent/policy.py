"""Port: broker.egress. The node's ceiling: which jobs this node may run at all. Default deny, deny beats allow.

Called by admission with a verified spec; the file is read by the agent's start. Pure: takes text and values, returns
values. Must never widen by combination: ONE allow rule has to cover the whole job, so that a path granted to one task
never reaches another. Unknown keys refuse to load.

    version = 1
    rq_stop = false                 # true: RQ's own stop command, which nobody signs, stops jobs here
    [[allow]]                       # or [[deny]]; every key is optional
    tenants = ["main"]              # who: default every tenant, queue and signing key
    queues = ["*"]
    keys = ["*"]
    commands = ["*"]                # what: argv[0]; default none. fnmatch patterns
    tasks = ["app.jobs:*"]          # default none
    read = ["/srv/data"]            # path trees; default none
    write = ["/srv/work"]
    net = ["api.example.com:443"]   # default none
    secrets = ["EXAMPLE_*"]         # default none
    tools = []
    mail = ["team-*"]               # mailboxes and topics; default none
    agents = ["researcher"]         # names whose /mem a job may use; default none
    watch = ["tag:team=acme"]       # selectors of jobs that a service job may watch and signal; default none
    state = "16M"                   # most bytes of /state; default none
    spawn = 10                      # most jobs that a job may start; default none
    trusted = false                 # may run below level B
    unix = false                    # may make Unix sockets beside host paths (--unix): whose sockets it then reaches
    service = false                 # may reach the broker's service on its own loopback
    reuse = false                   # may run where an attempt of the same task just ran (--reuse N)
    exec = true                     # false: only jobs that may not execute files of their own (--no-exec)
    max_memory = "4G"               # ceilings of asked totals and limits; default no ceiling
    max_cpus = 2.0
    max_pids = 1024
    max_disk = "4G"
    max_timeout_s = 86400.0

What a running job may then do with its grants: `calls` and `[[call]]` rules, in policycalls.py. What counts as a loop:
`[loop]`, in policyloop.py. The node's own tools:
`[[tool]]`, in kernel/tools.py.
"""

from __future__ import annotations

import hashlib
import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Final, Literal

from broker.egress.errors import BadRequestError
from broker.egress.rules import canonical
from node_agent.errors import PolicyError
from node_agent.kernel.tools import Tool, parse_tools
from node_agent.policycalls import Calls, below, matches, parse_calls
from node_agent.policyloop import LoopRule, parse_loop
from runner.wire.errors import WireError
from runner.wire.grants import NetGrant, parse_bytes
from runner.wire.spec import JobSpec

__all__ = ["Decision", "Policy", "Rule", "decide", "parse"]

_LISTS: Final = ("tenants", "queues", "keys", "commands", "tasks", "read", "write", "net", "secrets", "tools")
_MORE_LISTS: Final = ("mail", "agents", "watch")
_SIZES: Final = ("max_memory", "max_disk", "state")
_WHOLE: Final = ("max_pids", "spawn")
_ANY: Final = ("*",)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the file. Lists hold fnmatch patterns, ``read`` and ``write`` absolute path trees."""

    effect: Literal["allow", "deny"]
    index: int
    tenants: tuple[str, ...] = _ANY
    queues: tuple[str, ...] = _ANY
    keys: tuple[str, ...] = _ANY
    commands: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    mail: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    state: int | None = None
    spawn: int | None = None
    trusted: bool = False
    service: bool = False
    unix: bool = False
    reuse: bool = False
    exec: bool = True
    max_memory: int | None = None
    max_cpus: float | None = None
    max_pids: int | None = None
    max_disk: int | None = None
    max_timeout_s: float | None = None

    @property
    def label(self) -> str:
        """How messages name this rule."""
        return f"[[{self.effect}]] rule {self.index}"


@dataclass(frozen=True, slots=True)
class Policy:
    """All rules in file order. ``rq_stop``: RQ's own, unsigned stop command is carried out.

    ``calls``: what running jobs may do with their grants. ``version``: SHA-256 of the file's text, in hex.
    ``tools``: what node-side tools there are (`[[tool]]`, kernel/tools.py); a job still needs its rule to allow one.
    """

    rules: tuple[Rule, ...] = ()
    rq_stop: bool = False
    calls: Calls = Calls()  # noqa: RUF009 - frozen
    loop: LoopRule = LoopRule()  # noqa: RUF009 - frozen
    version: str = ""
    tools: Mapping[str, Tool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What policy says of one job: the rule that allows it, or why none does."""

    allowed: bool
    rule: str
    message: str = ""
    #: The network destinations that the rule lists, patterns and all.
    net: tuple[str, ...] = ()


def parse(text: str) -> Policy:
    """Return the policy of a TOML text. Raises PolicyError for anything not understood (fail closed)."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"the policy is not TOML: {error}") from None
    if table.pop("version", None) != 1:
        raise PolicyError("the policy needs `version = 1`")
    rq_stop = table.pop("rq_stop", False)
    if not isinstance(rq_stop, bool):
        raise PolicyError("rq_stop is true or false")
    rules: list[Rule] = []
    effects: tuple[Literal["deny", "allow"], ...] = ("deny", "allow")
    for effect in effects:
        entries = table.pop(effect, [])
        if not isinstance(entries, list):
            raise PolicyError(f"[[{effect}]] must be a list of tables")
        rules += [_rule(effect, index, entry) for index, entry in enumerate(entries, 1)]
    version = hashlib.sha256(text.encode("utf-8")).hexdigest()
    tools = parse_tools(table.pop("tool", []))
    calls = parse_calls(table.pop("call", []), table.pop("calls", "granted"), version)
    loop = parse_loop(table.pop("loop", {}))
    if table:
        raise PolicyError(f"unknown key {sorted(table)[0]!r} in the policy")
    return Policy(tuple(rules), rq_stop, calls, loop, version, tools)


def decide(policy: Policy, spec: JobSpec, signer: str) -> Decision:
    """Return whether one allow rule covers the whole job and no deny rule touches any part of it."""
    candidates = [rule for rule in policy.rules if _concerns(rule, spec, signer)]
    for rule in candidates:
        if rule.effect == "deny":
            hit = next(_denied(rule, spec), None)
            if hit is not None:
                return Decision(False, rule.label, f"{rule.label} of this node's policy denies {hit}")
    closest = ("no rule", "no [[allow]] rule of this node's policy matches this tenant, queue and key", -1)
    for rule in candidates:
        if rule.effect != "allow":
            continue
        checks = list(_uncovered(rule, spec))
        missing = [what for what in checks if what is not None]
        if not missing:
            return Decision(True, rule.label, net=rule.net)
        met = len(checks) - len(missing)
        if met > closest[2]:
            closest = (rule.label, f"{rule.label}, the closest of this node's policy, does not allow {missing[0]}", met)
    return Decision(False, closest[0], closest[1])


def _rule(effect: Literal["allow", "deny"], index: int, entry: object) -> Rule:
    if not isinstance(entry, dict):
        raise PolicyError(f"[[{effect}]] rule {index} must be a table")
    known = {field.name for field in fields(Rule)} - {"effect", "index"}
    values: dict[str, object] = {}
    for key, value in entry.items():
        if key not in known:
            raise PolicyError(f"unknown key {key!r} in [[{effect}]] rule {index}")
        values[key] = _value(f"[[{effect}]] rule {index}: {key}", key, value)
    return Rule(effect, index, **values)  # type: ignore[arg-type]  # _value checked each type by its key


def _value(where: str, key: str, value: object) -> object:
    if key in _LISTS or key in _MORE_LISTS:
        return _list(where, key, value)
    if key in _SIZES:
        try:
            return parse_bytes(str(value))
        except WireError as error:
            raise PolicyError(f"{where}: {error}") from None
    if key in ("trusted", "service", "unix", "reuse", "exec"):
        if not isinstance(value, bool):
            raise PolicyError(f"{where} must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise PolicyError(f"{where} must be a positive number")
    return int(value) if key in _WHOLE else float(value)


def _list(where: str, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise PolicyError(f"{where} must be a list of non-empty strings")
    if key in ("read", "write") and not all(item == "*" or item.startswith("/") for item in value):
        raise PolicyError(f"{where} must hold absolute paths")
    if key in ("read", "write"):
        return tuple(item if item == "*" else _tree(where, item) for item in value)
    return tuple(_net_entry(item) for item in value) if key == "net" else tuple(value)


def _tree(where: str, path: str) -> str:
    """Return a path tree without its last slash. One with . or .. would match no grant, and a deny rule be void."""
    plain = path.rstrip("/") or "/"
    if posixpath.normpath(plain) != plain or plain.startswith("//"):
        raise PolicyError(f"{where}: {path} must have no //, . or .. in it; meant {posixpath.normpath(plain)}?")
    return plain


def _concerns(rule: Rule, spec: JobSpec, signer: str) -> bool:
    return matches(rule.tenants, spec.tenant) and matches(rule.queues, spec.queue) and matches(rule.keys, signer)


def _match_net(patterns: tuple[str, ...], grant: NetGrant) -> bool:
    """Return whether a destination is listed. Brackets are part of an IPv6 address here, never of a pattern."""
    text = _destination(grant.host, grant.port)
    return any(fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)


def _destination(host: str, port: int) -> str:
    """Return the one form of a destination: another spelling of it must not slip past a deny rule."""
    try:
        return str(canonical(host, port))
    except BadRequestError:
        return f"{host.lower()}:{port}"


def _net_entry(entry: str) -> str:
    """Return a listed destination in the form that grants are compared in; a pattern only loses its capitals."""
    host, _, port = entry.rpartition(":")
    return _destination(host, int(port)) if port.isascii() and port.isdigit() and len(port) < 6 else entry.lower()


def _uncovered(rule: Rule, spec: JobSpec) -> Iterator[str | None]:
    """Yield one entry per thing asked: None if the rule covers it, else its name."""
    if spec.argv is not None:
        yield None if matches(rule.commands, spec.argv[0]) else f"the command {spec.argv[0]!r}"
    else:
        yield None if matches(rule.tasks, spec.task or "") else f"the task {spec.task!r}"
    if spec.trusted:
        yield None if rule.trusted else "trusted jobs"
    if spec.grants.service:
        yield None if rule.service else "jobs with --service"
    if spec.grants.unix:
        yield None if rule.unix else "jobs with --unix"
    if spec.reuse:
        yield None if rule.reuse else "jobs with --reuse"
    yield None if rule.exec or spec.grants.no_exec else "jobs without --no-exec (exec=False)"
    for path in spec.grants.paths:
        trees = rule.write if path.mode == "write" else rule.read + rule.write
        yield None if below(trees, path.path) else f"to {path.mode} {path.path}"
    for net in spec.grants.reach:
        yield None if _match_net(rule.net, net) else f"the network destination {net.host}:{net.port}"
    for secret in spec.grants.secrets:
        yield None if matches(rule.secrets, secret.name) else f"the secret {secret.name}"
    for tool in spec.grants.tools:
        yield None if matches(rule.tools, tool) else f"the tool {tool}"
    yield from _kernel(rule, spec)
    yield from _ceilings(rule, spec)


def _kernel(rule: Rule, spec: JobSpec) -> Iterator[str | None]:
    """Yield what is asked of the node's own services, as _uncovered does."""
    grants = spec.grants
    for box in grants.mail:
        yield None if matches(rule.mail, box.name) else f"the mailbox {box.name}"
    if grants.agent is not None:
        yield None if matches(rule.agents, grants.agent) else f"the agent's name {grants.agent}"
    for chosen in grants.watch:
        yield None if matches(rule.watch, chosen) else f"to watch {chosen}"
    for name, asked, most in (("a /state of", grants.state_bytes, rule.state), ("to spawn", grants.spawn, rule.spawn)):
        if asked is not None:
            yield None if asked <= (most or 0) else f"{name} {asked} (at most {most or 0})"


def _ceilings(rule: Rule, spec: JobSpec) -> Iterator[str | None]:
    asked = (
        ("memory", spec.grants.memory_bytes, rule.max_memory),
        ("cpus", spec.grants.cpus, rule.max_cpus),
        ("pids", spec.grants.pids, rule.max_pids),
        ("disk", spec.grants.disk_bytes, rule.max_disk),
        ("timeout", spec.limits.timeout_s, rule.max_timeout_s),
    )
    for name, value, ceiling in asked:
        if value is not None and ceiling is not None:
            yield None if value <= ceiling else f"{name} {value:g} (at most {ceiling:g})"


def _denied(rule: Rule, spec: JobSpec) -> Iterator[str]:
    """Yield what a deny rule hits. A rule that names nothing denies every job it concerns."""
    named = rule.commands + rule.tasks + rule.read + rule.write + rule.net + rule.secrets + rule.tools
    named += rule.mail + rule.agents + rule.watch
    if not named:
        yield "jobs of this tenant, queue and key"
        return
    if spec.argv is not None and matches(rule.commands, spec.argv[0]):
        yield f"the command {spec.argv[0]!r}"
    if spec.task is not None and matches(rule.tasks, spec.task):
        yield f"the task {spec.task!r}"
    for path in spec.grants.paths:
        # Who may write may read, so a denied read denies the write too.
        trees = rule.read + rule.write if path.mode == "write" else rule.read
        if below(trees, path.path) or any(tree.startswith(path.path.rstrip("/") + "/") for tree in trees):
            yield f"to {path.mode} {path.path}"
    yield from (f"the network destination {n.host}" for n in spec.grants.reach if _match_net(rule.net, n))
    yield from (f"the secret {s.name}" for s in spec.grants.secrets if matches(rule.secrets, s.name))
    yield from (f"the tool {tool}" for tool in spec.grants.tools if matches(rule.tools, tool))
    yield from (f"the mailbox {box.name}" for box in spec.grants.mail if matches(rule.mail, box.name))
    if spec.grants.agent is not None and matches(rule.agents, spec.grants.agent):
        yield f"the agent's name {spec.grants.agent}"
    yield from (f"to watch {chosen}" for chosen in spec.grants.watch if matches(rule.watch, chosen))
