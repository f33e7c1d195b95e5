"""Child jobs: what a running job may have started, and why that is never more than its signer started.

Called by the node that starts one (writes the record), admission, clients and other readers (work the job out again).
Pure. Must never let a child be more than its parent in any way: nobody who holds a key for jobs has signed it (attack
4). A child is its parent's signed envelope and one record for each step down from it; what a record does not say, the
child has from its parent, and what the parent left to the node's defaults, the child leaves, too.

    root        numbers 0 … spawn-1, each of which is one job id: nobody can make more jobs of one signature
    child       takes one number, and as many after it as it may start jobs itself
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Final

from runner.wire import ids, record
from runner.wire.errors import RecordError
from runner.wire.flow import RetryRule
from runner.wire.grants import Grants, PathGrant
from runner.wire.spec import MAX_DEPTH, MAX_PRIORITY, JobSpec, Limits

__all__ = ["MAX_CHILD_BYTES", "BeyondError", "Child", "Origin", "child_id", "child_of", "decode", "origin_of"]

#: Largest record of one child, in bytes.
MAX_CHILD_BYTES: Final = 64 * 1024
VERSION: Final = 1
_RANDOM_BYTES: Final = 10
_NONCE_DIGITS: Final = 32
_STAMP_BITS: Final = 80
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_TOTALS: Final = ("memory_bytes", "cpus", "pids", "disk_bytes", "state_bytes")
_LIMITS: Final = ("timeout_s", "output_bytes", "result_bytes", "files")


class BeyondError(RecordError):
    """A child asks for something that its parent does not have."""

    code = "beyond"


@dataclass(frozen=True, slots=True)
class Child:
    """What was asked for one child, as the node of its parent signed it.

    ``parent``, ``attempt``, ``node``: who asked, and where. ``number``: the child's own, among those of the tree.
    Exactly one of ``task`` and ``argv`` is set. ``pin``: the node that it must run on. None = as the parent has it.
    """

    parent: str
    attempt: int
    node: str
    number: int
    task: str | None = None
    argv: tuple[str, ...] | None = None
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    grants: Grants = Grants()
    limits: Limits = Limits()
    retries: int = 0
    priority: int | None = None
    not_after_ms: int | None = None
    pin: str | None = None
    fresh: bool = False
    at_most_once: bool = False
    v: int = VERSION

    def __post_init__(self) -> None:
        if self.v != VERSION:
            raise RecordError(f"version {self.v} is not supported, this is version {VERSION}", path="v")
        ids.check_job_id(self.parent)
        ids.check_node(self.node)
        if self.number < 0 or self.attempt < 1 or self.retries < 0:
            raise RecordError("a number is 0 or more, an attempt 1 or more", path="number")


@dataclass(frozen=True, slots=True)
class Origin:
    """A job, and the numbers that it may give to those that it starts: ``first`` up to but not ``end``."""

    spec: JobSpec
    root: str
    first: int
    end: int


def decode(data: bytes) -> Child:
    """Return the validated record. Raises CodecError, RecordError or GrammarError."""
    return record.loads(Child, data, limit_bytes=MAX_CHILD_BYTES)


def origin_of(spec: JobSpec) -> Origin:
    """Return a job that a client signed as one that may start others."""
    return Origin(spec, spec.id, 0, spec.grants.spawn or 0)


def child_of(origin: Origin, child: Child) -> Origin:
    """Return the job that a record makes of its parent. Two parties that derive it get the same job.

    Raises:
        BeyondError: it would be more than its parent is. RecordError, GrammarError: it is no valid job.
    """
    parent = origin.spec
    below = child.number + 1 + (child.grants.spawn or 0)
    if child.parent != parent.id:
        raise RecordError("the record belongs to another parent", path="parent")
    if len(parent.ancestors) >= MAX_DEPTH:
        raise BeyondError(f"jobs start jobs at most {MAX_DEPTH} deep", path="parent")
    if not origin.first <= child.number or below > origin.end:
        most = origin.end - origin.first
        raise BeyondError(f"the parent may start {most} jobs in all, those that they start included", path="number")
    problem = _work(parent, child) or _beyond(parent, child)
    if problem is not None:
        raise BeyondError(problem[1], path=problem[0])
    return Origin(_derived(origin, child), origin.root, child.number + 1, below)


def child_id(root: str, number: int) -> str:
    """Return the one job id of a number: no second job of it can be enqueued while the first is known."""
    tenant, _, stamp = root.partition("-")
    return f"{tenant}-{ids.ulid(_stamp_ms(stamp), _digest('id', root, number)[:_RANDOM_BYTES])}"


def _derived(origin: Origin, child: Child) -> JobSpec:
    parent = origin.spec
    fresh = child.fresh or parent.profile == "fresh"
    limits = Limits(**{name: _inherited(parent.limits, child.limits, name) for name in _LIMITS})  # type: ignore[arg-type] # fields of the same class
    return replace(
        parent,
        id=child_id(origin.root, child.number),
        nonce=_digest("nonce", origin.root, child.number).hex()[:_NONCE_DIGITS],
        not_after_ms=parent.not_after_ms if child.not_after_ms is None else child.not_after_ms,
        task=child.task,
        argv=child.argv,
        args=child.args,
        kwargs=child.kwargs,
        env=child.env,
        cwd=child.cwd,
        node=child.pin or parent.node,
        profile="fresh" if fresh else "default",
        grants=_granted(parent.grants, child.grants),
        limits=limits,
        retry=replace(parent.retry, count=child.retries) if child.retries else RetryRule(),
        at_most_once=child.at_most_once or parent.at_most_once,
        priority=parent.priority if child.priority is None else child.priority,
        ancestors=(*parent.ancestors, parent.id),
        after=None,
        unique=None,
        schedule=None,
        sealed=None,
    )


def _inherited(parent: Limits, child: Limits, name: str) -> object:
    own: object = getattr(child, name)
    return getattr(parent, name) if own is None else own


def _granted(parent: Grants, child: Grants) -> Grants:
    """A total that the child does not name is its parent's: it has no more than that one by saying nothing."""
    totals = {name: getattr(parent, name) for name in _TOTALS[:-1] if getattr(child, name) is None}
    return replace(child, no_exec=child.no_exec or parent.no_exec, **totals)


def _work(parent: JobSpec, child: Child) -> tuple[str, str] | None:
    """A child is of the parent's own program: another task of its module, or the same command with other words."""
    if (child.task is None) == (child.argv is None):
        return "task", "exactly one of task and argv is needed"
    if child.task is not None:
        module = child.task.partition(":")[0]
        if parent.task is None or parent.task.partition(":")[0] != module:
            return "task", f"the parent is no task of module {module}: a task starts tasks of its own module"
    elif parent.argv is None or not child.argv or child.argv[0] != parent.argv[0]:
        return "argv", "a command starts its own program: argv[0] has to be the parent's"
    return None


def _beyond(parent: JobSpec, child: Child) -> tuple[str, str] | None:
    """Return the first thing that the child has and its parent has not, as (field, what to say)."""
    if child.not_after_ms is not None and child.not_after_ms > parent.not_after_ms:
        return "not_after_ms", "a child ends its time with its parent's not_after, or before"
    if child.retries > parent.retry.count:
        return "retries", f"the parent has {parent.retry.count} retries"
    if child.priority is not None and not -MAX_PRIORITY <= child.priority <= parent.priority:
        return "priority", f"the parent has priority {parent.priority}"
    if child.pin is not None and parent.node is not None and child.pin != parent.node:
        return "pin", f"the parent is pinned to node {parent.node}"
    return _more_limits(parent, child) or _more_grants(parent.grants, child.grants)


def _more_limits(parent: JobSpec, child: Child) -> tuple[str, str] | None:
    for name, held, asked in (
        *((f"limits.{name}", getattr(parent.limits, name), getattr(child.limits, name)) for name in _LIMITS),
        *((f"grants.{name}", getattr(parent.grants, name), getattr(child.grants, name)) for name in _TOTALS),
    ):
        if asked is not None and held is None:
            return name, "the parent leaves it to the node, so its children can't ask for it: give the parent one"
        if asked is not None and not 0 < asked <= held:
            return name, f"more than nothing and at most the parent's {held:g} is possible"
    return None


def _more_grants(parent: Grants, child: Grants) -> tuple[str, str] | None:
    """Grants are compared whole, paths too: a place below a granted path may be a link that a job has put there."""
    mail = {(box.name, mode) for box in parent.mail for mode in _modes(box.mode)}
    checks: tuple[tuple[str, bool], ...] = (
        ("paths", all(_has_path(parent.paths, path) for path in child.paths)),
        ("net", set(child.net) <= set(parent.net)),
        ("secrets", set(child.secrets) <= set(parent.secrets)),
        ("tools", set(child.tools) <= set(parent.tools)),
        ("mail", all((box.name, mode) in mail for box in child.mail for mode in _modes(box.mode))),
        ("agent", child.agent in (None, parent.agent)),
        ("watch", set(child.watch) <= set(parent.watch)),
        ("service", parent.service or not child.service),
        ("unix", parent.unix or not child.unix),
        # The numbers bound how many; none is no grant at all.
        ("spawn", child.spawn is None or child.spawn >= 1),
    )
    for name, fits in checks:
        if not fits:
            return f"grants.{name}", "the parent was not granted it"
    return None


def _modes(mode: str) -> tuple[str, ...]:
    return ("send", "receive") if mode == "both" else (mode,)


def _has_path(held: tuple[PathGrant, ...], asked: PathGrant) -> bool:
    for path in held:
        writes = asked.mode == "read" or path.mode == "write"
        if path.path == asked.path and writes and (path.all or not asked.all):
            return True
    return False


def _stamp_ms(ulid: str) -> int:
    number = 0
    for character in ulid:
        number = number << 5 | _ALPHABET.index(character)
    return number >> _STAMP_BITS


def _digest(what: str, root: str, number: int) -> bytes:
    return hashlib.sha256(f"ringfence/child/1\n{what}\n{root}\n{number}".encode("ascii")).digest()
