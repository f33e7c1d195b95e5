"""From a call to the job that will be signed: options, their defaults, and one JobSpec.

Called by tasks and apps. Must never sign, open or send anything, and never let a value through that a node would have
to guess about.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict, cast

from runner.errors import UsageError
from runner.grants import Grants
from runner.wire import grants as forms
from runner.wire import ids, values
from runner.wire.errors import ValueTypeError, WireError
from runner.wire.flow import RetryRule
from runner.wire.spec import MAX_ENVELOPE_BYTES, JobSpec, Limits

__all__ = ["JobOptions", "build", "merged", "parse_tag", "parse_tags"]

#: A job that no node started within this time is void (DESIGN §4).
DEFAULT_EXPIRES_S: Final = 7 * 86_400.0
#: Arguments share the envelope with everything else.
MAX_ARGUMENTS_BYTES: Final = MAX_ENVELOPE_BYTES - 64 * 1024
_TAG: Final = re.compile(r"([a-zA-Z0-9][a-zA-Z0-9_.-]{0,63})[:=](.*)", re.DOTALL)


class JobOptions(TypedDict, total=False):
    """What a task, one call of it or a command may set. Times in seconds.

    ``tags``: a mapping, or texts ``key=value``. ``timeout``: limit of one attempt. ``expires``: void if not started by
    then. ``fresh``: a sandbox that no other job used before. ``trusted``: may run below level B where policy agrees.
    """

    queue: str
    tenant: str
    node: str
    labels: Mapping[str, str]
    retries: int
    timeout: float
    expires: float
    grants: Grants
    tags: Mapping[str, str] | Sequence[str]
    env: Mapping[str, str]
    cwd: str
    group: str
    priority: int
    min_level: str
    at_most_once: bool
    fresh: bool
    trusted: bool


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
    if isinstance(argv, str):
        raise UsageError("a command is a list of words, such as ['sh', '-c', 'echo hi']")
    try:
        tenant = ids.check_tenant(options.get("tenant") or tenant)
        return JobSpec(
            id=ids.new_job_id(tenant),
            tenant=tenant,
            queue=options.get("queue") or "agents",
            nonce=ids.new_nonce(),
            not_before_ms=now,
            not_after_ms=now + int(1000 * options.get("expires", DEFAULT_EXPIRES_S)),
            task=task,
            argv=None if argv is None else tuple(argv),
            args=tuple(cast("list[object]", values.encode(list(args), MAX_ARGUMENTS_BYTES, "args"))),
            kwargs=cast("dict[str, object]", values.encode(dict(kwargs or {}), MAX_ARGUMENTS_BYTES, "kwargs")),
            env=dict(options.get("env") or {}),
            cwd=options.get("cwd"),
            labels=dict(options.get("labels") or {}),
            node=options.get("node"),
            min_level=options.get("min_level") or ("F" if options.get("trusted", False) else "B"),
            trusted=options.get("trusted", False),
            profile="fresh" if options.get("fresh", False) else "default",
            grants=options["grants"].to_wire() if "grants" in options else forms.Grants(),
            limits=Limits(timeout_s=_timeout(options.get("timeout"))),
            retry=RetryRule(options.get("retries", 0)),
            at_most_once=options.get("at_most_once", False),
            priority=options.get("priority", 0),
            group=options.get("group"),
            tags=parse_tags(options.get("tags")),
        )
    except ValueTypeError:
        raise
    except WireError as error:
        raise UsageError(str(error)) from None


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


def _timeout(value: float | None) -> float | None:
    if value is None:
        return None
    if not 0 < value <= 366 * 86_400:
        raise UsageError("timeout is a positive number of seconds")
    return float(value)
