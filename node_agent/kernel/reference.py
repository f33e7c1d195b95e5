"""Port: redis. docs/reference/kernel.md, made from the table of calls: what is not in it can't be documented.

Called as ``python -m node_agent.kernel.reference`` (`make reference` writes what it prints) and by a test.
Must never describe a call in words of its own.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping
from typing import Final, cast

from redis.asyncio import Redis

from node_agent.kernel.budgets import Budgets
from node_agent.kernel.desk import Desk
from node_agent.kernel.seams import Around, Decider, Recorder, Spending
from node_agent.kernel.table import ALWAYS, BY_POLICY, Entry
from node_agent.records import Notary
from runner.wire.calls import MAX_CALL_BYTES, MAX_DATA_BYTES, MAX_SESSIONS, ErrorCode
from runner.wire.keys import Keys

__all__ = ["page", "table"]

_HEAD: Final = """# Calls of a running job

Made by `make reference` from the table of calls; docs/inside.md says how a job makes them.

A call is one record of at most {call} bytes of JSON, `{{"n": NUMBER, "op": OP, …fields}}`, on a session of the job's
own; the answer is `{{"n": NUMBER, "ok": VALUE}}` or `{{"n": NUMBER, "err": CODE, "why": TEXT}}`. Data is base64, at
most {data} bytes a call. A job has at most {sessions} sessions at a time. A record that is no call ends its session; an
unknown field is refused. Policy judges every call by its name and resource (`[[call]]` rules). What *acts* is in the
node's flight recorder before it happens. What is *late* is still served in the grace of a kill.

Every call may be answered with {always}.
"""


def table() -> Mapping[str, Entry]:
    """Return the whole table, of a desk that serves nobody."""
    nobody = cast("object", None)
    around = Around(
        redis=Redis(),
        keys=Keys(),
        node="",
        recorder=cast("Recorder", nobody),
        decider=cast("Decider", nobody),
        notary=cast("Notary", nobody),
        emit=lambda _tenant, _event: None,
        # Only its calls are looked at.
        spending=cast("Spending", object.__new__(Budgets)),
    )
    return Desk(around).table


def page(entries: Mapping[str, Entry]) -> str:
    """Return the page."""
    always = ", ".join(f"`{code.value}`" for code in ALWAYS)
    held = ", ".join(f"`{code.value}`" for code in BY_POLICY)
    always += f"; where a rule of policy asks a person or has a quota ([policy](../policy.md)), with {held}, too"
    text = _HEAD.format(call=MAX_CALL_BYTES, data=MAX_DATA_BYTES, sessions=MAX_SESSIONS, always=always)
    noun = ""
    for op in sorted(entries):
        if op.partition(".")[0] != noun:
            noun = op.partition(".")[0]
            text += f"\n## {noun}\n"
        text += _entry(entries[op])
    text += "\n## Codes\n\n" + "".join(f"- `{code.value}`\n" for code in ErrorCode)
    return text


def _entry(entry: Entry) -> str:
    marks = [word for word, holds in (("acts", entry.changes), ("late", entry.late)) if holds]
    head = f"{entry.op} ({', '.join(marks)})" if marks else entry.op
    lines = [f"\n### {head}\n", entry.what, ""]
    if entry.grant:
        lines.append(f"- Needs: {entry.grant}")
    lines += [f"- `{line}`" for line in _fields(entry.ask)]
    lines.append(f"- Answer: {entry.answer}")
    if entry.errors:
        lines.append("- Also: " + ", ".join(f"`{code.value}`" for code in entry.errors))
    return "\n".join(lines) + "\n"


def _fields(ask: type[object]) -> list[str]:
    hints = typing.get_type_hints(ask)
    found = []
    for field in dataclasses.fields(cast("typing.Any", ask)):
        line = f"{field.name}: {_type(hints[field.name])}"
        if field.default is not dataclasses.MISSING:
            line += f" = {field.default!r}"
        elif field.default_factory is not dataclasses.MISSING:
            line += f" = {field.default_factory()!r}"
        found.append(line)
    return found


def _type(hint: object) -> str:
    text = getattr(hint, "__name__", None) if isinstance(hint, type) and not typing.get_args(hint) else None
    return text or str(hint).replace("typing.", "").replace("object", "any")


if __name__ == "__main__":
    sys.stdout.write(page(table()))
