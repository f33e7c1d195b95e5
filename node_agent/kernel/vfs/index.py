"""Port: redis. A tree's index and contents in the store, changed by one script (runner/scripts/files.lua).

Called by kept volumes. Must never wait longer than its caller's deadline, and never repeat a call by itself: a change
whose answer got lost is sent again by its token, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

from redis.asyncio import Redis

from node_agent.errors import StoreAwayError
from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.nodes import ENTRY_BYTES, Bounds
from node_agent.kernel.vfs.paths import MAX_DEPTH, ODD, Parts
from node_agent.storelink import answered
from runner.scripts import loader
from runner.wire import codec
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys

__all__ = ["Change", "Done", "Entry", "Index", "Loaded", "Lost", "Store", "Where"]

_ENTRY: Final = re.compile(rb"([fd]) (\d{1,16}) (\d{1,16}) (\d{1,16}) (\d{1,16}) (\S{1,64}) (\S{1,128})")
#: The largest number that both ends know exactly.
_MOST_VERSION: Final = 2**53 - 1
#: As paths.split makes them.
_PATH: Final = re.compile(rb"(?:/(?!\.\.?(?:/|\Z))[^/]{1,255}){1,%d}" % MAX_DEPTH)
_FAULTS: Final = {
    b"conflict": (ErrorCode.CONFLICT, "somebody else changed it first: read it again"),
    b"exists": (ErrorCode.EXISTS, "somebody else made it first"),
    b"not_found": (ErrorCode.NOT_FOUND, "it, or its directory, was removed elsewhere"),
    b"not_empty": (ErrorCode.NOT_EMPTY, "the directory is not empty"),
    b"quota": (ErrorCode.QUOTA, "the volume is full"),
    b"too_large": (ErrorCode.TOO_LARGE, "the file is too large"),
    b"swollen": (ErrorCode.TOO_LARGE, "the store holds more there than a job may write: somebody else wrote it"),
}


class Lost(Exception):
    """The store does not have the tree any more that this attempt loaded."""


class Entry(NamedTuple):
    """One line of an index. ``ends_in_ms``: 0 = no end."""

    directory: bool
    version: int
    size: int
    modified_ms: int
    ends_in_ms: int
    owner: str


class Index(NamedTuple):
    """A whole index by path."""

    version: int
    entries: Mapping[Parts, Entry]


class Loaded(NamedTuple):
    """A whole index as it came; reading it takes about as long as using it."""

    version: int
    now_ms: int
    flat: list[bytes]

    def entries(self) -> dict[Parts, Entry]:
        """Return the entries by path."""
        rows = zip(self.flat[::2], self.flat[1::2], strict=True)
        read = ((_parts(name), _entry(value, self.now_ms)) for name, value in rows)
        return {parts: entry for parts, entry in read if parts and entry is not None}


class Done(NamedTuple):
    """What a change came to. ``files``: (size, whether the caller's base was the newest) of each put and add."""

    before: int
    version: int
    files: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One change; see files.lua. ``data``: of put and add."""

    op: str
    path: Parts
    base: int = 0
    data: bytes | None = None
    ttl_ms: int = 0
    token: str = "-"  # noqa: S105 # tells a change from another, no secret
    skip: int = 0
    to: Parts = ()
    over: int = 0


@dataclass(frozen=True, slots=True)
class Where:
    """One tree in the store. ``fence``: the attempt that owns it, 0 = shared. ``depth``: see files.lua."""

    index: str
    contents: str
    owner: str
    ttl_s: int
    bounds: Bounds = field(repr=False)
    fence: int = 0
    depth: int = 0


class Store:
    """The files' side of the store. Every method raises CallError or StoreAwayError."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._script = redis.register_script(loader.load("files").text)

    async def load(self, where: Where, known: int) -> Loaded | None:
        """Return the index unless it is still ``known``, and own the tree from here on if it has an owner."""
        reply = await self._run(where, {"op": "load", "known": known, "list": []}, ())
        if reply[0] == b"same":
            return None
        return Loaded(int(cast("bytes", reply[1])), int(cast("bytes", reply[2])), cast("list[bytes]", reply[3]))

    async def change(self, where: Where, changes: Sequence[Change]) -> Done:
        """Carry all of ``changes`` out, or none. Raises CallError: what stands in the way; Lost."""
        blobs: list[bytes] = []
        told: list[codec.Json] = []
        for one in changes:
            if one.data is not None:
                blobs.append(one.data)
            told.append(_told(one, len(blobs) + 1))
        reply = await self._run(where, {"op": "change", "known": 0, "list": told}, blobs)
        sizes = cast("list[bytes]", reply[3])
        files = tuple((int(size), matched == b"1") for size, matched in zip(sizes[::2], sizes[1::2], strict=True))
        before, version = (int(cast("bytes", number)) for number in reply[1:3])
        return Done(before, version, files)

    async def content(self, where: Where, path: Parts) -> bytes | None:
        """Return what the store has of a file; None: nothing."""
        reply = await self._run(where, {"op": "read", "known": 0, "list": [{"path": _name(path)}]}, ())
        return cast("bytes", reply[1]) if reply[0] == b"content" else None

    async def _run(self, where: Where, doc: dict[str, codec.Json], blobs: Sequence[bytes]) -> list[object]:
        bounds = where.bounds
        doc |= {"rq": self._keys.rq, "rf": self._keys.rf, "fence": where.fence, "ttl": where.ttl_s}
        doc |= {"depth": where.depth, "owner": where.owner, "merge": where.fence == 0}
        doc |= {"cap": bounds.total_bytes, "file": bounds.file_bytes, "entries": bounds.entries, "entry": ENTRY_BYTES}
        reply = await answered(self._script(keys=[where.index, where.contents], args=[codec.dump(doc), *blobs]))
        if not isinstance(reply, list) or not reply:
            raise StoreAwayError("an answer of files.lua has another form")
        if reply[0] == b"fence":
            raise CallError(ErrorCode.ENDED, "a newer attempt of this job has its files now")
        if reply[0] == b"gone":
            raise Lost
        if reply[0] in _FAULTS:
            code, why = _FAULTS[reply[0]]
            raise CallError(code, why)
        return reply


def _told(one: Change, data: int) -> dict[str, codec.Json]:
    """Return one change as files.lua takes it. ``data``: the number of the argument that holds its bytes."""
    told: dict[str, codec.Json] = {"op": one.op, "path": _name(one.path), "base": one.base, "data": data}
    told |= {"ttl": one.ttl_ms, "token": one.token, "skip": one.skip, "to": _name(one.to), "over": one.over}
    return told


def _entry(value: bytes, now_ms: int) -> Entry | None:
    """Read one line; None for what is none: whoever may write the store can write nonsense into it."""
    match = _ENTRY.fullmatch(value)
    if match is None:
        return None
    version, size, modified_ms, ends_ms = (int(match[number]) for number in range(2, 6))
    if version > _MOST_VERSION:
        return None
    ends_in_ms = max(1, ends_ms - now_ms) if ends_ms else 0
    return Entry(match[1] == b"d", version, size, modified_ms, ends_in_ms, match[7].decode("ascii", "replace"))


def _name(parts: Parts) -> str:
    return "".join(f"/{part}" for part in parts)


def _parts(name: bytes) -> Parts:
    """Return a stored path; nothing for what no job can have written there: it would be no path at all to it."""
    text = name.decode("utf-8", "replace")
    if _PATH.fullmatch(name) is None or ODD.search(text):
        return ()
    return tuple(text[1:].split("/"))
