"""Paths of the files that a job asks for: normalised once, then handled as components only. Pure.

Called by the mounts (which volume a path is of) and the files part. Must never touch a file system: no path in here is
one of the host, and no text of a job is ever joined to one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, TypeAlias

from node_agent.kernel.errors import CallError
from runner.wire.calls import ErrorCode

__all__ = ["MAX_DEPTH", "MAX_NAME_BYTES", "MAX_PATH_BYTES", "ODD", "Parts", "shown", "split"]

#: Components from the root on.
Parts: TypeAlias = tuple[str, ...]

MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
#: Most components of a path.
MAX_DEPTH: Final = 16
#: What a terminal, a log line or the store's index could misread.
ODD: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def split(path: str, roots: Collection[Parts] = ()) -> Parts:
    """Return the components of an absolute path, without empty ones, ``.`` and ``..``.

    ``..`` is resolved component by component and never climbs out of ``/`` or out of one of ``roots``: what a program
    joins to a mount stays below that mount, whatever it holds. Raises CallError(BAD_REQUEST).
    """
    if not path.startswith("/") or len(path) > MAX_PATH_BYTES or ODD.search(path):
        raise CallError(ErrorCode.BAD_REQUEST, "a path begins with /, is printable and has at most 1024 bytes")
    found: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            if not found or tuple(found) in roots:
                raise CallError(ErrorCode.BAD_REQUEST, f".. does not lead out of {shown(tuple(found))}")
            found.pop()
            continue
        if len(part.encode()) > MAX_NAME_BYTES:
            raise CallError(ErrorCode.BAD_REQUEST, f"a name has at most {MAX_NAME_BYTES} bytes")
        found.append(part)
    if len(found) > MAX_DEPTH or len(shown(tuple(found)).encode()) > MAX_PATH_BYTES:
        raise CallError(
            ErrorCode.BAD_REQUEST, f"a path has at most {MAX_DEPTH} names and {MAX_PATH_BYTES} bytes in UTF-8"
        )
    return tuple(found)


def shown(parts: Parts) -> str:
    """Return the path as text."""
    return "/" + "/".join(parts)
