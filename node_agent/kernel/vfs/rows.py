"""The rows of the table of calls that are about files.

Called by files.py. Must never name an error that no handler gives, or leave one out that it gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from node_agent.kernel.table import Entry, Handler
from node_agent.kernel.vfs import asks
from node_agent.kernel.vfs.mounts import normal
from runner.wire.calls import ErrorCode

__all__ = ["entries"]

_GRANT: Final = "state for /state, agent for /mem/episodic, semantic and procedural; none for the others"
_LOOK: Final = (ErrorCode.NOT_FOUND, ErrorCode.NOT_A_DIRECTORY, ErrorCode.UNAVAILABLE)
_KEEP: Final = (ErrorCode.QUOTA, ErrorCode.TOO_LARGE, ErrorCode.CONFLICT, ErrorCode.UNAVAILABLE)
_CHANGE: Final = (*_LOOK, ErrorCode.READ_ONLY, ErrorCode.CONFLICT)
_FD: Final = (ErrorCode.BAD_DESCRIPTOR,)


def entries(handlers: Mapping[str, Handler]) -> tuple[Entry, ...]:
    """Return the rows; ``handlers``: by the call's name. docs/inside.md says the rules that they share."""
    rows = (*_of_open_files(handlers), *_of_looks(handlers), *_of_changes(handlers))
    # A job that was told to end may still put away what it has, for its next attempt.
    return tuple(dataclasses.replace(row, late=True) for row in rows)


def _of_open_files(do: Mapping[str, Handler]) -> tuple[Entry, ...]:
    return (
        Entry(
            "file.open",
            asks.Open,
            do["file.open"],
            "Open a file; create, excl and truncate as in open(2).",
            "{fd, size, version}",
            grant=_GRANT,
            changes=True,
            errors=(*_CHANGE, ErrorCode.IS_A_DIRECTORY, ErrorCode.EXISTS, ErrorCode.QUOTA, ErrorCode.TOO_LARGE),
            resource=lambda ask: normal(ask.path),
        ),
        Entry(
            "file.close",
            asks.Close,
            do["file.close"],
            "Publish what was written to a kept file, and close it; after unavailable or slow_down it is still open.",
            "null, or {version} of what was published",
            changes=True,
            errors=(*_FD, *_KEEP, ErrorCode.NOT_FOUND, ErrorCode.EXISTS),
        ),
        Entry(
            "file.read",
            asks.Read,
            do["file.read"],
            "Read the next bytes, or those at a place; none at the end.",
            "{data}",
            errors=(*_FD, ErrorCode.CONFLICT),
        ),
        Entry(
            "file.write",
            asks.Write,
            do["file.write"],
            "Write at the descriptor's place, at a given one, or (append) at the end: all of it or nothing.",
            "{wrote, size}",
            changes=True,
            errors=(*_FD, ErrorCode.QUOTA, ErrorCode.TOO_LARGE, ErrorCode.CONFLICT),
        ),
        Entry("file.seek", asks.Seek, do["file.seek"], "Move the descriptor's place.", "{offset}", errors=_FD),
        Entry(
            "file.truncate",
            asks.Truncate,
            do["file.truncate"],
            "Cut an open file, or fill it up with zeros.",
            "{size}",
            changes=True,
            errors=(*_FD, *_KEEP, ErrorCode.NOT_FOUND),
        ),
        Entry(
            "file.sync",
            asks.Sync,
            do["file.sync"],
            "Publish one open file, or all that this attempt changed below a path in one step.",
            "{version} or {files}",
            resource=lambda ask: normal(ask.path or ""),
            changes=True,
            errors=(*_FD, *_CHANGE, ErrorCode.QUOTA, ErrorCode.TOO_LARGE, ErrorCode.EXISTS),
        ),
    )


def _of_looks(do: Mapping[str, Handler]) -> tuple[Entry, ...]:
    return (
        Entry(
            "file.stat",
            asks.Stat,
            do["file.stat"],
            "Look at a file or directory, by path or descriptor.",
            "{type, size, version, linked, expires_in_s, owner, modified_ms, writable}",
            grant=_GRANT,
            resource=lambda ask: normal(ask.path or ""),
            errors=(*_LOOK, *_FD),
        ),
        Entry(
            "file.list",
            asks.Page,
            do["file.list"],
            "List a directory, sorted, at most 256 names at a time; the root lists the mounts of this job.",
            "{entries: [{name, type, size}], more}",
            grant=_GRANT,
            resource=lambda ask: normal(ask.path),
            errors=_LOOK,
        ),
        Entry(
            "file.get",
            asks.Get,
            do["file.get"],
            "Read a whole file of at most 32 KiB.",
            "{data, version}",
            grant=_GRANT,
            errors=(*_LOOK, ErrorCode.IS_A_DIRECTORY, ErrorCode.TOO_LARGE, ErrorCode.QUOTA),
            resource=lambda ask: normal(ask.path),
        ),
    )


def _of_changes(do: Mapping[str, Handler]) -> tuple[Entry, ...]:
    return (
        Entry(
            "file.put",
            asks.Put,
            do["file.put"],
            "Write or append to a file in one call, over a given version if one is named; published with the answer.",
            "{size, version}; both are null if others appended meanwhile",
            grant=_GRANT,
            changes=True,
            errors=(*_CHANGE, ErrorCode.IS_A_DIRECTORY, ErrorCode.EXISTS, ErrorCode.QUOTA, ErrorCode.TOO_LARGE),
            resource=lambda ask: normal(ask.path),
        ),
        Entry(
            "file.remove",
            asks.Remove,
            do["file.remove"],
            "Remove a file, or an empty directory with directory = true.",
            "null",
            grant=_GRANT,
            changes=True,
            errors=(*_CHANGE, ErrorCode.IS_A_DIRECTORY, ErrorCode.NOT_EMPTY),
            resource=lambda ask: normal(ask.path),
        ),
        Entry(
            "file.rename",
            asks.Rename,
            do["file.rename"],
            "Rename inside a volume, over a file or an empty directory: at once, also for who looks meanwhile.",
            "null",
            grant=_GRANT,
            changes=True,
            errors=(*_CHANGE, ErrorCode.IS_A_DIRECTORY, ErrorCode.NOT_EMPTY),
            resource=lambda ask: normal(ask.to),
        ),
        Entry(
            "file.mkdir",
            asks.Mkdir,
            do["file.mkdir"],
            "Make a directory.",
            "null",
            grant=_GRANT,
            changes=True,
            errors=(*_CHANGE, ErrorCode.EXISTS, ErrorCode.QUOTA),
            resource=lambda ask: normal(ask.path),
        ),
    )
