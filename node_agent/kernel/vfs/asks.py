"""The records of the calls about files: what a process may say, field by field. No behaviour but their own bounds.

Called by the table (decodes into them). Must never hold who asks.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from node_agent.kernel.errors import CallError
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode

__all__ = ["MAX_PAGE", "MAX_TTL_S", "Flag", "unpacked"]

Flag: TypeAlias = Literal["read", "write", "append", "create", "excl", "truncate"]
MAX_TTL_S: Final = 366 * 86_400.0
#: Most names of one answer to file.list.
MAX_PAGE: Final = 256


@dataclass(frozen=True, slots=True)
class Open:
    """file.open. ``ttl_s``: the file ends so long after this, if it is opened for writing."""

    path: str
    flags: tuple[Flag, ...] = ("read",)
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """file.close."""

    fd: int


@dataclass(frozen=True, slots=True)
class Read:
    """file.read. ``at``: from there, and the descriptor's own place stays where it is."""

    fd: int
    count: int = MAX_DATA_BYTES
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """file.write. ``data``: base64; ``at``: as in file.read."""

    fd: int
    data: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """file.seek."""

    fd: int
    offset: int
    whence: Literal["start", "here", "end"] = "start"


@dataclass(frozen=True, slots=True)
class Truncate:
    """file.truncate."""

    fd: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """file.sync: one descriptor, or everything below a path that this attempt changed, at once."""

    fd: int | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Stat:
    """file.stat: a path or a descriptor."""

    path: str | None = None
    fd: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """file.list. ``after``: the last name of the page before."""

    path: str
    after: str = ""
    limit: int = MAX_PAGE


@dataclass(frozen=True, slots=True)
class Get:
    """file.get."""

    path: str


@dataclass(frozen=True, slots=True)
class Put:
    """file.put. ``if_version``: only over this version, 0: only if there is nothing. ``append``: at the end instead."""

    path: str
    data: str
    ttl_s: float | None = None
    if_version: int | None = None
    append: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """file.remove."""

    path: str
    directory: bool = False


@dataclass(frozen=True, slots=True)
class Rename:
    """file.rename."""

    path: str
    to: str


@dataclass(frozen=True, slots=True)
class Mkdir:
    """file.mkdir."""

    path: str


def unpacked(data: str) -> bytes:
    """Return the bytes of a field. Raises CallError: no base64, or over MAX_DATA_BYTES."""
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise CallError(ErrorCode.BAD_REQUEST, "data is base64") from None
    if len(found) > MAX_DATA_BYTES:
        raise CallError(ErrorCode.BAD_REQUEST, f"data has at most {MAX_DATA_BYTES} bytes in one call")
    return found


def packed(data: bytes) -> str:
    """Return bytes as a field holds them."""
    return base64.b64encode(data).decode("ascii")
