"""Looks for one value wherever a fleet could have left it: in any encoding, in stores, files, processes and memory.

Called by the tests of secrets. Each search is worth nothing without its counter-check: the same one has to find a word
that is known to be there.
"""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from redis import Redis

__all__ = ["encodings", "environ_of", "family", "files", "memory", "process_list", "stored", "traces"]

_READ: Final[Mapping[bytes, Callable[[Redis, bytes], Any]]] = {
    b"string": lambda store, key: store.get(key),
    b"hash": lambda store, key: store.hgetall(key),
    b"list": lambda store, key: store.lrange(key, 0, -1),
    b"set": lambda store, key: store.smembers(key),
    b"zset": lambda store, key: store.zrange(key, 0, -1),
    b"stream": lambda store, key: store.xrange(key),
}


def encodings(value: bytes) -> dict[str, bytes]:
    """Return the texts that stand for ``value``, by name; written anew, not taken from what is tested."""
    found = {"raw": value, "hex": value.hex().encode(), "HEX": value.hex().upper().encode(), "reversed": value[::-1]}
    for phase in range(3):
        for name, encode in (("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)):
            coded = encode(bytes(phase) + value + bytes(-(phase + len(value)) % 3))
            # Characters that a neighbour's bits have no part in.
            first, last = -(-8 * phase // 6), 8 * (phase + len(value)) // 6
            found[f"{name}+{phase}"] = coded[first:last]
    text = value.decode()
    found["url"] = urllib.parse.quote(text, safe="").encode()
    found["form"] = urllib.parse.quote_plus(text).encode()
    found["json"] = json.dumps(text)[1:-1].encode()
    found["json twice"] = json.dumps(json.dumps(text))[3:-3].encode()
    found["repr"] = repr(text)[1:-1].encode()
    return found


def traces(data: bytes, looked_for: Mapping[str, bytes]) -> set[str]:
    """Return which of these texts ``data`` holds, by name."""
    return {name for name, text in looked_for.items() if text in data}


def stored(url: str) -> bytes:
    """Return every key and value of a store as they are: `DUMP` would compress them."""
    with Redis.from_url(url) as store:
        keys = list(store.scan_iter(count=1000))
        return b"\n".join(part for key in keys for part in (key, *_flat(_READ[store.type(key)](store, key))))


def files(*folders: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield every file below some folders with what is in it, but for the audit's reserve, which is zeros."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.name != "audit.reserve":
                yield path, path.read_bytes()


def process_list() -> bytes:
    """Return what `ps` shows of all processes of this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((entry / "cmdline").read_bytes())
    return b"\n".join(found)


def family(pid: int) -> dict[int, bytes]:
    """Return a process and its descendants, each with its environment; b"" where it can't be read."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return {one: environ_of(one) for one in found}


def environ_of(pid: int) -> bytes:
    """Return a process's environment, or b"" if it has ended or is not ours to read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def memory(pid: int, looked_for: Mapping[str, bytes]) -> set[str]:
    """Return which of these texts a process has in memory that it can write. Raises OSError: it can't be read."""
    found: set[str] = set()
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match is None:
                continue
            start, end = (int(part, 16) for part in match.groups())
            mem.seek(start)
            with suppress(OSError):
                found |= traces(_whole(mem.fileno(), end - start), looked_for)
    return found


def _whole(fd: int, count: int) -> bytes:
    parts = []
    while count > 0 and (part := os.read(fd, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _flat(value: object) -> Iterator[bytes]:
    """Yield the bytes in what a store returned, in their order."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _flat(pair)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _flat(item)
