"""JobSpec: what was asked, exactly as it is signed.

Called by the client (builds and signs it) and the node agent (verifies the bytes, then decodes once). Must never carry
a secret value; ``env`` and ``args`` are public parts of the envelope.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final, cast

from runner.wire import codec, ids, record, sealed
from runner.wire.errors import RecordError
from runner.wire.flow import After, Budget, Concurrency, Rate, RetryRule, Unique
from runner.wire.grants import Grants

__all__ = [
    "MAX_DEPTH",
    "MAX_ENVELOPE_BYTES",
    "MAX_PRIORITY",
    "MAX_SPAWN",
    "MAX_STATE_BYTES",
    "NEEDS_BROKER",
    "JobSpec",
    "Limits",
    "decode",
    "flow_of",
    "lane_of",
    "priority_of",
    "selectors_of",
]

#: Largest signed job that a client sends and a node accepts, in bytes (1 MiB).
MAX_ENVELOPE_BYTES: Final = 1024 * 1024
#: Priorities are -1000 to 1000; each point counts as one second of waiting.
MAX_PRIORITY: Final = 1000
#: Most jobs that one job and those that it starts may start in all, and how deep they may stand below it.
MAX_SPAWN: Final = 1000
MAX_DEPTH: Final = 4
#: Largest ``/state`` of one job.
MAX_STATE_BYTES: Final = 64 << 20
#: Most attempts that one worker may run.
MAX_REUSE: Final = 10_000
#: Names that lanes give a meaning of their own.
_RESERVED: Final = frozenset({"node", "level", "priority"})
_PRIORITY: Final = re.compile(r"-?[1-9][0-9]{0,3}")
_TASK: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,200}:[A-Za-z_][A-Za-z0-9_.]{0,200}")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PROFILE: Final = re.compile(r"default|fresh|reuse=(10000|[1-9][0-9]{0,3})")
VERSION: Final = 1
#: What the lanes of jobs with secrets or sealed values require. No label looks like it: those have a value.
NEEDS_BROKER: Final = "broker"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one attempt. None = the node's default (wall 3,600 s, output 64 MiB, result 8 MiB, files 1,024)."""

    timeout_s: float | None = None
    output_bytes: int | None = None
    result_bytes: int | None = None
    files: int | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job. Exactly one of ``task`` (``module:qualname``) and ``argv`` is set. Times are Unix milliseconds, UTC.

    ``sealed``: place → ciphertext (text); before the client has sealed it, the value itself, which can't be written.
    ``schedule``: this is the template of that schedule, never a job by itself; its occurrences carry it as their origin
    (attack 4). ``ancestors``: of a child job (derived.py) the jobs above it, the topmost first; never signed.
    """

    id: str
    tenant: str
    queue: str
    nonce: str
    not_before_ms: int
    not_after_ms: int
    task: str | None = None
    argv: tuple[str, ...] | None = None
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    node: str | None = None
    min_level: str = "B"
    trusted: bool = False
    profile: str = "default"
    grants: Grants = Grants()
    limits: Limits = Limits()
    retry: RetryRule = RetryRule()  # noqa: RUF009 - frozen
    at_most_once: bool = False
    priority: int = 0
    group: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    trace_id: str | None = None
    after: After | None = None
    unique: Unique | None = None
    rate: Rate | None = None
    concurrency: Concurrency | None = None
    budget: Budget | None = None
    schedule: str | None = None
    sealed: dict[str, object] | None = None
    ancestors: tuple[str, ...] = ()
    v: int = VERSION

    def __post_init__(self) -> None:
        _check(self)

    @property
    def needs_broker(self) -> bool:
        """Whether this job only runs beside a vault broker: for its secrets, its sealed values, or its service."""
        return bool(self.grants.secrets) or self.sealed is not None or self.grants.service

    @property
    def reuse(self) -> int:
        """How many attempts may run in one worker, one after the other; 0: each gets a worker of its own."""
        name, _, number = self.profile.partition("=")
        return int(number) if name == "reuse" else 0

    @property
    def name(self) -> str:
        """What people see: the task's name, or the command's first word."""
        return self.task if self.task is not None else (self.argv or ("?",))[0]


def decode(data: bytes) -> JobSpec:
    """Return the validated job of verified bytes. Raises CodecError, RecordError or GrammarError."""
    return record.loads(JobSpec, data, limit_bytes=MAX_ENVELOPE_BYTES)


def lane_of(spec: JobSpec) -> str:
    """Return the lane (an RQ queue name) that this job waits in: queue and sorted requirements (DESIGN §4).

    Jobs of another priority than 0 wait in lanes of their own, so RQ's tools see each in its order.
    """
    needs = [f"{key}={value}" for key, value in spec.labels.items()]
    if spec.node is not None:
        needs.append(f"node={spec.node}")
    if spec.min_level != "B":
        needs.append(f"level={spec.min_level}")
    if spec.priority:
        needs.append(f"priority={spec.priority}")
    if spec.needs_broker:
        needs.append(NEEDS_BROKER)
    return f"{spec.queue}@{','.join(sorted(needs))}" if needs else spec.queue


def priority_of(lane: str) -> int | None:
    """Return the priority that a lane's name carries, 0 if it has none, None if it is not a valid one."""
    for need in lane.partition("@")[2].split(","):
        key, _, value = need.partition("=")
        if key == "priority":
            found = int(value) if _PRIORITY.fullmatch(value) else 0
            return found if found and -MAX_PRIORITY <= found <= MAX_PRIORITY else None
    return 0


def flow_of(spec: JobSpec) -> str:
    """Return the job's limits as its hash holds them (see runner/scripts/limits.lua); empty if it has none."""
    rows = []
    if spec.unique is not None:
        rows.append(f"u {spec.unique.until} {math.ceil(spec.unique.ttl_s * 1000)} {spec.unique.key}")
    if spec.rate is not None:
        rows.append(f"r {spec.rate.count} {math.ceil(spec.rate.period_s * 1000)} {spec.rate.key}")
    if spec.concurrency is not None:
        rows.append(f"c {spec.concurrency.count} {spec.concurrency.key}")
    return "\n".join(rows)


def selectors_of(spec: JobSpec, node: str | None = None) -> tuple[str, ...]:
    """Return every selector that hits this job, such as ``all``, ``tag:team=acme``; ``node`` once it is claimed."""
    found = ["all", f"tenant:{spec.tenant}", f"queue:{spec.queue}"]
    # A kill of a job is one of all that it started, and of what those started.
    found += [f"job:{job}" for job in spec.ancestors]
    found += [f"tag:{key}={value}" for key, value in sorted(spec.tags.items())]
    found += [f"secret:{secret.name}" for secret in spec.grants.secrets]
    if spec.task is not None:
        found.append(f"task:{spec.task}")
    if spec.group is not None:
        found.append(f"group:{spec.group}")
    if node is not None:
        found.append(f"node:{node}")
    return tuple(found)


def _check(spec: JobSpec) -> None:
    if spec.v != VERSION:
        raise RecordError(f"version {spec.v} is not supported, this is version {VERSION}", path="v")
    if ids.tenant_of(spec.id) != ids.check_tenant(spec.tenant):
        raise RecordError("the id belongs to another tenant", path="id")
    ids.check_name(spec.queue, "queue")
    if spec.node is not None:
        ids.check_node(spec.node)
    _check_work(spec)
    _check_names(spec)
    _check_sealed(spec, spec.sealed)
    if spec.min_level not in {"A", "B", "C", "D", "E", "F"}:
        raise RecordError("a level is A to F", path="min_level")
    if not _PROFILE.fullmatch(spec.profile):
        raise RecordError(f"a profile is default, fresh or reuse=N, with N at most {MAX_REUSE}", path="profile")
    if not -MAX_PRIORITY <= spec.priority <= MAX_PRIORITY:
        raise RecordError("a priority is -1000 to 1000", path="priority")
    if spec.not_after_ms <= spec.not_before_ms:
        raise RecordError("not_after must be later than not_before", path="not_after_ms")
    if spec.after is not None and any(ids.tenant_of(job) != spec.tenant or job == spec.id for job in spec.after.jobs):
        raise RecordError("a job waits for other jobs of its own tenant", path="after.jobs")
    if spec.schedule is not None:
        ids.check_name(spec.schedule, "schedule")
    _check_kernel(spec)


def _check_kernel(spec: JobSpec) -> None:
    """What the job may ask its node for has its bounds."""
    state_bytes = spec.grants.state_bytes
    if state_bytes is not None and not 0 < state_bytes <= MAX_STATE_BYTES:
        raise RecordError(f"a /state has at most {MAX_STATE_BYTES >> 20} MiB", path="grants.state_bytes")
    if spec.grants.agent is not None:
        ids.check_name(spec.grants.agent, "agent's name")
    if spec.grants.spawn is not None and not 1 <= spec.grants.spawn <= MAX_SPAWN:
        raise RecordError(f"a job may start 1 to {MAX_SPAWN} jobs", path="grants.spawn")
    if len(spec.ancestors) > MAX_DEPTH or any(ids.tenant_of(job) != spec.tenant for job in spec.ancestors):
        raise RecordError(f"at most {MAX_DEPTH} jobs of the same tenant stand above one", path="ancestors")


def _check_sealed(spec: JobSpec, held: dict[str, object] | None) -> None:
    """Every hole has its value, every value its hole: none can be put anywhere else."""
    if held is None:
        return
    if not 0 < len(held) <= sealed.MAX_SEALED:
        raise RecordError(f"a job has at most {sealed.MAX_SEALED} sealed values", path="sealed")
    for place, text in held.items():
        if len(place) > sealed.MAX_PLACE:
            raise RecordError(f"a sealed value's place has at most {sealed.MAX_PLACE} characters", path="sealed")
        good = isinstance(text, sealed.Sealed) or (isinstance(text, str) and len(text) <= sealed.MAX_TEXT_BYTES)
        if not good:
            raise RecordError("a sealed value is text of an allowed length", path=f"sealed.{place}")
    variables = {place for place in held if place.startswith(f"{sealed.ENV}/")}
    for place in variables:
        name = place.partition("/")[2]
        if not _ENV_NAME.fullmatch(name) or name in spec.env or name.startswith("RINGFENCE_"):
            what = "a variable's name is letters, digits and _, is set once, and does not begin with RINGFENCE_"
            raise RecordError(what, path=f"sealed.{place}")
    holes = sealed.places(cast("codec.Json", list(spec.args)), cast("codec.Json", spec.kwargs))
    if set(holes) != held.keys() - variables:
        raise RecordError("the sealed values do not stand where the arguments have room for them", path="sealed")


def _check_work(spec: JobSpec) -> None:
    if (spec.task is None) == (spec.argv is None):
        raise RecordError("exactly one of task and argv is needed", path="task")
    if spec.task is not None and not _TASK.fullmatch(spec.task):
        raise RecordError("a task is module:qualname", path="task")
    if spec.argv is not None and (not spec.argv or not spec.argv[0] or any("\0" in word for word in spec.argv)):
        raise RecordError("argv needs a first word and no NUL", path="argv")


def _check_names(spec: JobSpec) -> None:
    for key, value in (*spec.labels.items(), *spec.tags.items()):
        ids.check_name(key, "tag or label")
        if len(value) > 256 or "\0" in value:
            raise RecordError("a tag or label value has at most 256 characters", path="tags")
    for key, value in spec.labels.items():
        if key in _RESERVED:
            raise RecordError("no label is named node, level or priority: these have options", path=f"labels.{key}")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
            raise RecordError("a label value is 1 to 64 of letters, digits, _ . and -", path=f"labels.{key}")
    for key, value in spec.env.items():
        if not _ENV_NAME.fullmatch(key) or "\0" in value:
            raise RecordError("an environment name is letters, digits and _", path="env")
    if spec.cwd is not None and not spec.cwd.startswith("/"):
        raise RecordError("cwd is absolute", path="cwd")
