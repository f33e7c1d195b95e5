"""The table of calls: op → record of its fields, handler, grant, errors. The one place where a call comes to exist.

Called by the session (looks calls up), docs (docs/reference/kernel.md is made from it) and tests. Must never hold an op
that is not carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from node_agent.errors import InvariantError
from node_agent.kernel.caller import Caller
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json

__all__ = ["ALWAYS", "BY_POLICY", "Entry", "Handler", "table_of"]

#: (caller, the op's decoded record) → the answer. Raises CallError. Synchronous where nothing has to be waited for.
Handler = Callable[[Caller, Any], "Json | Awaitable[Json]"]

#: Errors that every call may be answered with.
ALWAYS: Final = (
    ErrorCode.BAD_REQUEST,
    ErrorCode.SLOW_DOWN,
    ErrorCode.DENIED,
    ErrorCode.ENDED,
    ErrorCode.UNRECORDED,
    ErrorCode.FAULT,
)
#: And those by which a rule of policy that asks a person, or has a quota, holds a call up.
BY_POLICY: Final = (ErrorCode.PENDING, ErrorCode.QUOTA, ErrorCode.CONFLICT, ErrorCode.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One call.

    ``ask``: a frozen dataclass of its fields. ``grant``: what of a job's grants it needs, for people; the handler
    checks it. ``changes``: whether it acts, so that a record is written before (reads are only counted). ``errors``:
    what it may be answered with beyond ALWAYS. ``what``: one sentence for the reference. ``resource``: what of the
    record policy judges the call by (tool name, mailbox, path); without it policy sees an empty text. ``late``: still
    carried out for a job that was told to end, during its grace (what puts things in order: files, progress).
    """

    op: str
    ask: type[object]
    handle: Handler
    what: str
    answer: str
    grant: str = ""
    changes: bool = False
    errors: tuple[ErrorCode, ...] = ()
    resource: Callable[[Any], str] | None = None
    late: bool = False


def table_of(*parts: Iterable[Entry]) -> Mapping[str, Entry]:
    """Return one table of all parts. Raises InvariantError: an op is there twice."""
    table: dict[str, Entry] = {}
    for part in parts:
        for entry in part:
            if entry.op in table:
                raise InvariantError(f"the call {entry.op} is in the table twice")
            table[entry.op] = entry
    return table
