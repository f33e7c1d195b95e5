"""From a call to the job that will be signed: options, their defaults, and one JobSpec.

Called by tasks and apps. Must never sign, open or send anything, and never let a value through that a node would have
to guess about.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypedDict, cast

from runner import limits, suspects
from runner.errors import UsageError
from runner.grants import Grants
from runner.wire import grants as forms
from runner.wire import ids, passing, reuse, sealed, values
from runner.wire.codec import Json
from runner.wire.errors import ValueTypeError, WireError
from runner.wire.flow import MAX_SPAN_S, After, Backoff, Budget, Concurrency, Rate, RetryRule, Unique
from runner.wire.sealed import Sealed
from runner.wire.spec import MAX_ENVELOPE_BYTES, MAX_REUSE, JobSpec, Limits

if TYPE_CHECKING:
    from runner.stencil import Draft, Stencil

__all__ = ["JobOptions", "build", "draft", "merged", "named_after", "parse_tag", "parse_tags", "spec_of"]

#: A job that no node started within this time is void (DESIGN §4).
DEFAULT_EXPIRES_S: Final = 7 * 86_400.0
#: How far ahead a job may be put off, and expire, in seconds: kills remember it for so long.
MAX_AHEAD_S: Final = 366 * 86_400.0
MAX_EXPIRES_S: Final = 390 * 86_400.0
#: Arguments share the envelope with everything else.
MAX_ARGUMENTS_BYTES: Final = MAX_ENVELOPE_BYTES - 64 * 1024
_defaults = {field.name: field.default for field in fields(JobSpec)}
#: The very defaults of JobSpec: they need neither be made nor compared for each job.
_NO_GRANTS: Final = cast("forms.Grants", _defaults["grants"])
_NO_LIMITS: Final = cast("Limits", _defaults["limits"])
_NO_RETRY: Final = cast("RetryRule", _defaults["retry"])
_TAG: Final = re.compile(r"([a-zA-Z0-9][a-zA-Z0-9_.-]{0,63})[:=](.*)", re.DOTALL)


class HasId(Protocol):
    """The handle of a job."""

    @property
    def id(self) -> str:
        """The job's id."""


class JobOptions(TypedDict, total=False):
    """What a task, one call of it or a command may set. Times in seconds.

    ``tags``: a mapping, or texts ``key=value``. ``timeout``: limit of one attempt. ``eta``, ``countdown``: not before
    this aware datetime, or so many seconds from now. ``expires``: void if not started by then, in seconds from now or
    an aware datetime; default 7 days after the job may start. ``fresh``: a sandbox that no other job used before.
    ``reuse``: up to so many jobs of one task, tenant, key and set of grants may run in one worker, one after the other.
    ``trusted``: may run below level B where policy agrees. ``after``: jobs (handles or ids) that must have ended first;
    those whose `Job.output` is an argument are among them. ``on_failure``: what to do if one of them did not finish.
    ``backoff``, ``retry_on``, ``never_on``: see RetryRule and limits.retry_rule. ``unique``: a name that one job holds
    at a time; ``on_duplicate``: raise DuplicateJobError, or return the holder's handle. ``priority``: docs/queue.md.
    ``budget``: what it may spend together with the other jobs of its key, see Budget.
    """

    queue: str
    tenant: str
    node: str
    labels: Mapping[str, str]
    retries: int
    backoff: float | Backoff
    retry_on: Sequence[str]
    never_on: Sequence[str]
    unique: str | Unique
    on_duplicate: Literal["error", "return"]
    rate: Rate
    concurrency: Concurrency
    budget: Budget
    timeout: float
    eta: datetime
    countdown: float
    expires: float | datetime
    grants: Grants
    tags: Mapping[str, str] | Sequence[str]
    env: Mapping[str, str | Sealed]
    cwd: str
    group: str
    priority: int
    min_level: str
    at_most_once: bool
    fresh: bool
    reuse: int
    trusted: bool
    after: Sequence[HasId | str] | HasId | str
    on_failure: Literal["refuse", "run"]


_RETRY: Final = frozenset({"retries", "backoff", "retry_on", "never_on"})
#: Options that jobs made alike share: few values each, and nothing that a rule of the store looks at (rules.lua).
_EVERYDAY: Final = frozenset(
    {"queue", "tenant", "node", "retries", "timeout", "expires", "cwd", "priority", "min_level"}
    | {"at_most_once", "fresh", "reuse", "trusted"}
)
_SCALARS: Final = frozenset({str, int, float, bool})
_MOST_STENCILS: Final = 256
_stencils: Final[dict[tuple[object, ...], Stencil]] = {}
_KNOWN: Final = frozenset(JobOptions.__annotations__)


def merged(defaults: JobOptions, call: JobOptions) -> JobOptions:
    """Return the options of one call over a task's defaults: tags join, all else is replaced. Raises UsageError."""
    for name in call:
        if name not in _KNOWN:
            raise UsageError(f"no option {name!r}: there are {', '.join(sorted(_KNOWN))}")
    both = cast("JobOptions", {**defaults, **{name: value for name, value in call.items() if value is not None}})
    if "tags" in defaults or "tags" in call:
        both["tags"] = {**parse_tags(defaults.get("tags")), **parse_tags(call.get("tags"))}
    return both


def build(
    options: JobOptions,
    *,
    task: str | None = None,
    argv: Sequence[str] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    tenant: str = ids.DEFAULT_TENANT,
    now_ms: int | None = None,
) -> JobSpec:
    """Return the job, with a fresh id and nonce. Raises UsageError, ValueTypeError (names the path to the argument)."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    held: list[Sealed] = []
    if isinstance(argv, str):
        raise UsageError("a command is a list of words, such as ['sh', '-c', 'echo hi']")
    try:
        tenant = ids.check_tenant(options.get("tenant") or tenant)
        words = values.encode(list(args), MAX_ARGUMENTS_BYTES, "args", held) if args else []
        named = values.encode(dict(kwargs), MAX_ARGUMENTS_BYTES, "kwargs", held) if kwargs else {}
        env = options.get("env") or {}
        if argv or args or kwargs or env:
            suspects.warn(suspects.suspects(argv, args, kwargs or {}, env))
        not_before_ms, not_after_ms = _window(options, now)
        spec = JobSpec(
            id=ids.new_job_id(tenant),
            tenant=tenant,
            queue=options.get("queue") or "agents",
            nonce=ids.new_nonce(),
            not_before_ms=not_before_ms,
            not_after_ms=not_after_ms,
            task=task,
            argv=None if argv is None else tuple(argv),
            args=tuple(cast("list[object]", words)),
            kwargs=cast("dict[str, object]", named),
            env={name: text for name, text in env.items() if isinstance(text, str)},
            sealed=_sealed(words, named, held, env),
            cwd=options.get("cwd"),
            labels=dict(options.get("labels") or {}),
            node=options.get("node"),
            min_level=options.get("min_level") or ("F" if options.get("trusted", False) else "B"),
            trusted=options.get("trusted", False),
            profile=_profile(options),
            grants=options["grants"].to_wire() if "grants" in options else _NO_GRANTS,
            limits=Limits(timeout_s=_timeout(options["timeout"])) if "timeout" in options else _NO_LIMITS,
            retry=_retry(options),
            unique=_unique(options),
            rate=options.get("rate"),
            budget=options.get("budget"),
            concurrency=options.get("concurrency"),
            at_most_once=options.get("at_most_once", False),
            priority=options.get("priority", 0),
            group=options.get("group"),
            tags=parse_tags(options.get("tags")),
            after=_after(options, (words, named)),
        )
        return _shareable(spec)
    except ValueTypeError:
        raise
    except WireError as error:
        raise UsageError(str(error)) from None


def draft(
    options: JobOptions,
    *,
    task: str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    tenant: str = ids.DEFAULT_TENANT,
) -> JobSpec | Draft:
    """Return the job that `build` does, but written already if one like it was built before. Raises as `build`."""
    key = _likeness(options, task, tenant)
    like = _stencils.get(key) if key is not None else None
    if like is not None:
        found = _drafted(like, options, args, kwargs, options.get("tenant") or tenant)
        if found is not None:
            return found
    spec = build(options, task=task, args=args, kwargs=kwargs, tenant=tenant)
    if key is not None and like is None and spec.after is None and spec.sealed is None:
        from runner.stencil import Stencil  # only at an enqueue, never in a guest

        if len(_stencils) >= _MOST_STENCILS:
            _stencils.clear()
        _stencils[key] = Stencil(spec)
    return spec


def spec_of(made: JobSpec | Draft) -> JobSpec:
    """Return a job, or one of its like: where it goes and what it asks for are the same."""
    return made if isinstance(made, JobSpec) else made.spec


def _likeness(options: JobOptions, task: str, tenant: str) -> tuple[object, ...] | None:
    """Return what jobs that are made alike have in common, None if there is more to this one."""
    if not options:
        return task, tenant
    found: list[object] = [task, tenant]
    for name, value in options.items():
        if name not in _EVERYDAY or type(value) not in _SCALARS:
            return None
        # 1 == True == 1.0, but they are not written alike.
        found += (name, type(value), value)
    return tuple(found)


def _drafted(
    like: Stencil, options: JobOptions, args: Sequence[object], kwargs: Mapping[str, object] | None, tenant: str
) -> Draft | None:
    """Return a job like one that was built before; None if its arguments are more than values, or have no form."""
    start_ms, end_ms = _window(options, time.time_ns() // 1_000_000)
    words: Json = []
    named: Json = {}
    try:
        if args or kwargs:
            held: list[Sealed] = []
            words = values.encode(list(args), MAX_ARGUMENTS_BYTES, "args", held) if args else words
            named = values.encode(dict(kwargs), MAX_ARGUMENTS_BYTES, "kwargs", held) if kwargs else named
            if held or passing.references((words, named)):
                return None
        job_id, nonce = ids.new_job_names(tenant)
        found = like.draft(job_id, nonce, start_ms, end_ms, words, named)
    except WireError:
        # Whoever builds it says what is wrong, and where.
        return None
    if args or kwargs:
        suspects.warn(suspects.suspects(None, args, kwargs or {}, {}))
    return found


def named_after(options: JobOptions) -> tuple[HasId | str, ...]:
    """Return the jobs of the option ``after``, which may be one or several."""
    asked = options.get("after") or ()
    return (asked,) if isinstance(asked, str) or not isinstance(asked, Iterable) else tuple(asked)


def parse_tag(text: str) -> tuple[str, str]:
    """Return key and value of ``key=value`` or ``key:value``. Raises UsageError."""
    match = _TAG.fullmatch(text)
    if match is None:
        raise UsageError(f"a tag is key=value, not {text[:64]!r}")
    return match[1], match[2]


def parse_tags(tags: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return tags as a dict, from a mapping or from texts. Raises UsageError."""
    if isinstance(tags, str):
        raise UsageError("tags is a mapping or a list of texts key=value, not one text")
    if isinstance(tags, Mapping):
        return dict(tags)
    return dict(parse_tag(text) for text in tags or ())


def _shareable(spec: JobSpec) -> JobSpec:
    """Return the job. Raises UsageError: it asks for reuse and for what is made for one attempt alone."""
    if why := reuse.problem(spec):
        raise UsageError(why)
    return spec


def _retry(options: JobOptions) -> RetryRule:
    if _RETRY.isdisjoint(options):
        return _NO_RETRY
    return limits.retry_rule(
        options.get("retries", 0), options.get("backoff"), options.get("retry_on"), options.get("never_on")
    )


def _profile(options: JobOptions) -> str:
    fresh = options.get("fresh", False)
    again: object = options.get("reuse")
    if again is None:
        return "fresh" if fresh else "default"
    if fresh:
        raise UsageError("fresh and reuse are opposites: give one of them")
    if isinstance(again, bool) or not isinstance(again, int) or not 1 <= again <= MAX_REUSE:
        raise UsageError(f"reuse is how many attempts one worker may run: a number from 1 to {MAX_REUSE}")
    return f"reuse={again}"


def _unique(options: JobOptions) -> Unique | None:
    if options.get("on_duplicate") not in {None, "error", "return"}:
        raise UsageError("on_duplicate is error or return")
    if options.get("on_duplicate") is not None and "unique" not in options:
        raise UsageError("on_duplicate says what happens if a unique name is taken: give one with unique")
    return limits.unique_of(options.get("unique"))


def _after(options: JobOptions, encoded: Sequence[Json]) -> After | None:
    """Return what the job waits for: the jobs of the option, and those whose results its arguments ask for."""
    found = dict.fromkeys(one if isinstance(one, str) else one.id for one in named_after(options))
    if any(encoded):
        found |= dict.fromkeys(sorted(passing.references(encoded)))
    return After(tuple(found), options.get("on_failure") or "refuse") if found else None


def _sealed(words: Json, named: Json, held: Sequence[Sealed], env: Mapping[str, object]) -> dict[str, object] | None:
    """Return the sealed values by their place; the client encrypts them once it knows for whom."""
    if not held and not env:
        return None
    found: dict[str, object] = dict(zip(sealed.places(words, named), held, strict=True))
    found |= {sealed.place_of(sealed.ENV, name): value for name, value in env.items() if isinstance(value, Sealed)}
    return found or None


def moment_ms(moment: object, option: str) -> int:
    """Return the Unix milliseconds of an aware datetime. Raises UsageError for one without a zone."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise UsageError(f"{option} needs a time with a zone, such as datetime.now(UTC) + timedelta(hours=1)")
    return round(moment.timestamp() * 1000)


def _window(options: JobOptions, now: int) -> tuple[int, int]:
    """Return from when until when the job may start, in Unix milliseconds. Raises UsageError."""
    eta, countdown, expires = options.get("eta"), options.get("countdown"), options.get("expires")
    if eta is not None and countdown is not None:
        raise UsageError("eta and countdown are two ways to say one thing: give one of them")
    start = now
    if eta is not None:
        start = max(now, moment_ms(eta, "eta"))
    elif countdown is not None:
        if not 0 <= countdown <= MAX_AHEAD_S:
            raise UsageError("countdown is a number of seconds from 0 to 366 days")
        start = now + math.ceil(1000 * countdown)
    if start > now + 1000 * MAX_AHEAD_S:
        raise UsageError("a job can be put off by at most 366 days; use a schedule (docs/schedules.md)")
    if expires is None:
        return start, start + int(1000 * DEFAULT_EXPIRES_S)
    end = moment_ms(expires, "expires") if isinstance(expires, datetime) else now + int(1000 * expires)
    if not start < end <= now + 1000 * MAX_EXPIRES_S:
        raise UsageError("expires is later than the job's start, and at most 390 days from now")
    return start, end


def _timeout(value: float | None) -> float | None:
    if value is None:
        return None
    if not 0 < value <= MAX_SPAN_S:
        raise UsageError("timeout is a positive number of seconds")
    return float(value)
