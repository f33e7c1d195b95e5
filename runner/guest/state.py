"""A job's own notes for its next attempt: JSON values by name, below /state.

Called by jobs (`from runner.inside import state`). Standard library and wire alone. Must never leave half a value
behind: a save is there whole or not at all, on whatever node the job goes on.

    state.save("progress", {"page": 7})
    state.load("progress", default={"page": 0})
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from runner.guest import files
from runner.wire import codec
from runner.wire.codec import Json

__all__ = ["drop", "load", "names", "save"]

_END: Final = ".json"


def save(name: str, value: Json, *, ttl_s: float | None = None) -> None:
    """Keep a value under a name. Raises OSError: no state granted, or it is full; CodecError: no plain JSON."""
    files.put(_path(name), codec.dump(value), ttl_s=ttl_s)


def load(name: str, default: Json = None) -> Json:
    """Return what was saved last, by this attempt or one before; ``default`` if nothing was. Raises OSError."""
    try:
        return codec.load(files.get(_path(name)))
    except FileNotFoundError:
        return default


def names() -> list[str]:
    """Return the names of all saved values, sorted. Raises OSError."""
    found = [entry.path.rpartition("/")[2] for entry in files.listdir("/state") if not entry.directory]
    return [name.removesuffix(_END) for name in found if name.endswith(_END) and not name.startswith(".")]


def drop(name: str) -> None:
    """Forget a value; one that is not there is no error. Raises OSError."""
    with suppress(FileNotFoundError):
        files.remove(_path(name))


def _path(name: str) -> str:
    if "/" in name or name.startswith(".") or not name:
        raise ValueError("a name has at least one character, no / and no dot at its beginning")
    return f"/state/{name}{_END}"
