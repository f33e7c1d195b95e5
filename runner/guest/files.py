"""Files that the node keeps for a job: /mem, /state, and what it shows in /tools, /policy and /ipc.

Called by jobs (`from runner.inside import files`) and by ringfence-guest. Standard library and wire alone. Must never
look like a file of the sandbox: these names exist for the calls of this module only.

    files.put("/mem/working/plan", b"…")                    # a whole file, there at once
    with files.open("/mem/episodic/log", "a") as log:       # like open(): r, w, a, x, +, b
        log.write("…")
    files.get("/state/page", default=b"0")

Errors are those of `open` (FileNotFoundError, PermissionError, …); ``__cause__`` is the CallRefused behind it.
"""

from __future__ import annotations

import base64
import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, Literal, TypeAlias, cast, overload

from runner.guest.calls import CallRefused, Session, forgetting
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json

__all__ = ["Conflict", "Found", "command", "get", "listdir", "mkdir", "open", "put", "remove", "rename", "stat", "sync"]

#: How long a call is made again that the node could not carry out now, in seconds.
_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = (0.02, 0.5)
#: Calls that do the same however often they are made.
_AGAIN: Final = frozenset({"file.close", "file.sync", "file.get", "file.read", "file.stat", "file.list"})
_ERRNO: Final = {
    ErrorCode.BAD_REQUEST: errno.EINVAL,
    ErrorCode.DENIED: errno.EACCES,
    ErrorCode.QUOTA: errno.EDQUOT,
    ErrorCode.TOO_LARGE: errno.EFBIG,
    ErrorCode.NOT_FOUND: errno.ENOENT,
    ErrorCode.EXISTS: errno.EEXIST,
    ErrorCode.NOT_A_DIRECTORY: errno.ENOTDIR,
    ErrorCode.IS_A_DIRECTORY: errno.EISDIR,
    ErrorCode.NOT_EMPTY: errno.ENOTEMPTY,
    ErrorCode.READ_ONLY: errno.EROFS,
    ErrorCode.BAD_DESCRIPTOR: errno.EBADF,
    ErrorCode.TIMEOUT: errno.ETIMEDOUT,
}
TextMode: TypeAlias = Literal["r", "w", "a", "x", "rt", "wt", "at", "xt"]
BinaryMode: TypeAlias = Literal["rb", "wb", "ab", "xb", "r+b", "w+b", "a+b", "x+b", "rb+", "wb+", "ab+", "xb+"]
_MODES: Final = {"r": ["read"], "w": ["write", "create", "truncate"], "a": ["append", "create"]}


class Conflict(OSError):
    """Somebody else changed the file first: read it again, then decide."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is at a path. ``version`` changes with the content; ``expires_in_s`` None: it does not end by itself.

    What `listdir` yields has path, kind and size alone; `stat` tells the rest.
    """

    path: str
    directory: bool
    size: int
    version: int | None = None
    owner: str = ""
    modified_ms: int = 0
    expires_in_s: float | None = None
    writable: bool | None = None


@overload
def open(path: str, mode: TextMode = "r", *, ttl_s: float | None = None, encoding: str = "utf-8") -> IO[str]: ...
@overload
def open(path: str, mode: BinaryMode, *, ttl_s: float | None = None, encoding: str = "utf-8") -> IO[bytes]: ...
def open(path: str, mode: str = "r", *, ttl_s: float | None = None, encoding: str = "utf-8") -> IO[str] | IO[bytes]:
    """Open a file as Python's open does. ``ttl_s``: it ends so many seconds from now. Raises OSError, Conflict.

    What was written to a kept file is there for others, and for the job's next attempt, once it is closed or synced.
    """
    text, flags = _parsed(mode)
    # typeshed wants a protocol of its own here, which no RawIOBase has.
    raw = cast("io.FileIO", _Raw(path, flags, ttl_s))
    if "read" in flags and len(flags) > 1:
        buffered: IO[bytes] = io.BufferedRandom(raw, MAX_DATA_BYTES)
    elif "read" in flags:
        buffered = io.BufferedReader(raw, MAX_DATA_BYTES)
    else:
        buffered = io.BufferedWriter(raw, MAX_DATA_BYTES)
    return io.TextIOWrapper(buffered, encoding=encoding) if text else buffered


def get(path: str, *, default: bytes | None = None) -> bytes:
    """Return a whole file; ``default`` if there is none. Raises OSError."""
    try:
        return _data(_call("file.get", path, path=path))
    except FileNotFoundError:
        if default is None:
            raise
        return default
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
    with open(path, "rb") as file:
        return file.read()


def put(
    path: str,
    data: bytes | str,
    *,
    append: bool = False,
    ttl_s: float | None = None,
    if_version: int | None = None,
) -> int | None:
    """Write a whole file, there for others once this returns: the old content or the new one, never a part.

    ``append``: one piece at the end instead, whoever else appends. ``if_version``: only over this version (stat), 0:
    only if there is none. Both take at most 32 KiB. Return the new version. Raises OSError, Conflict.
    """
    content = data.encode() if isinstance(data, str) else bytes(data)
    if len(content) <= MAX_DATA_BYTES:
        more: dict[str, Json] = {"ttl_s": ttl_s, "if_version": if_version, "append": append}
        answer = _call("file.put", path, path=path, data=base64.b64encode(content).decode("ascii"), **more)
        return cast("int | None", cast("dict[str, Json]", answer)["version"])
    if append or if_version is not None:
        raise OSError(errno.EFBIG, f"append and if_version take at most {MAX_DATA_BYTES} bytes", path)
    _put_aside(path, content, ttl_s)
    return stat(path).version


def stat(path: str) -> Found:
    """Return what is at a path. Raises OSError."""
    answer = cast("dict[str, Json]", _call("file.stat", path, path=path))
    return Found(
        path,
        answer["type"] == "directory",
        cast("int", answer.get("size", 0)),
        cast("int | None", answer.get("version")),
        cast("str", answer.get("owner", "")),
        cast("int", answer.get("modified_ms", 0)),
        cast("float | None", answer.get("expires_in_s")),
        bool(answer.get("writable", True)),
    )


def listdir(path: str) -> Iterator[Found]:
    """Yield what a directory holds, sorted by name. Raises OSError."""
    after, more = "", True
    while more:
        page = cast("dict[str, Json]", _call("file.list", path, path=path, after=after))
        for entry in cast("list[dict[str, Json]]", page["entries"]):
            after = cast("str", entry["name"])
            size = cast("int", entry.get("size", 0))
            yield Found(f"{path.rstrip('/')}/{after}", entry["type"] == "directory", size)
        more = bool(page["more"])


def mkdir(path: str, *, parents: bool = False) -> None:
    """Make a directory; with ``parents`` also those above it, and none of them has to be new. Raises OSError."""
    if not parents:
        _call("file.mkdir", path, path=path)
        return
    try:
        _call("file.mkdir", path, path=path)
    except FileExistsError:
        if not stat(path).directory:
            raise
    except FileNotFoundError:
        above = path.rstrip("/").rpartition("/")[0]
        if not above.strip("/"):
            raise
        mkdir(above, parents=True)
        mkdir(path, parents=True)


def remove(path: str, *, directory: bool = False) -> None:
    """Remove a file, or with ``directory`` an empty directory. Raises OSError."""
    _call("file.remove", path, path=path, directory=directory)


def rename(path: str, to: str) -> None:
    """Rename inside a mount, over a file or an empty directory that has the name. Raises OSError."""
    _call("file.rename", path, path=path, to=to)


def sync(what: str | IO[str] | IO[bytes]) -> None:
    """Publish an open file now, or all that this job changed below a path in one step. Raises OSError, Conflict."""
    if isinstance(what, str):
        _call("file.sync", what, path=what)
        return
    what.flush()
    raw = getattr(getattr(what, "buffer", what), "raw", None)
    if not isinstance(raw, _Raw):
        raise OSError(errno.EINVAL, "sync takes a path, or a file of files.open")
    raw.sync()


def command(words: list[str]) -> int:
    """Carry `ringfence-guest files …` out; return its exit code. Raises OSError."""
    usage = (
        "usage: ringfence-guest files get PATH | put PATH | append PATH | ls PATH | rm PATH | mkdir PATH | mv PATH TO\n"
        "put and append read from stdin what to write, get prints to stdout\n"
    )
    verb, paths = words[0] if words else "", words[1:]
    if verb not in _COMMANDS or len(paths) != (2 if verb == "mv" else 1):
        sys.stderr.write(usage)
        return 2
    _COMMANDS[verb](*paths)
    return 0


def _show(path: str) -> None:
    sys.stdout.buffer.write(get(path))


def _take(path: str) -> None:
    put(path, sys.stdin.buffer.read())


def _add(path: str) -> None:
    put(path, sys.stdin.buffer.read(), append=True)


def _names(path: str) -> None:
    for found in listdir(path):
        sys.stdout.write(f"{found.path.rpartition('/')[2]}{'/' if found.directory else ''}\n")


_COMMANDS: Final[dict[str, Callable[..., object]]] = {
    "get": _show,
    "put": _take,
    "append": _add,
    "ls": _names,
    "rm": remove,
    "mkdir": mkdir,
    "mv": rename,
}


class _Raw(io.RawIOBase):
    """One descriptor at the node, on the session that it was opened in."""

    def __init__(self, path: str, flags: list[str], ttl_s: float | None) -> None:
        super().__init__()
        self._fd = -1
        self.name = path
        self._reads, self._writes = "read" in flags, bool({"write", "append"} & set(flags))
        with _lock:
            self._session = _session(None)
            told = _call("file.open", path, self._session, path=path, flags=cast("list[Json]", flags), ttl_s=ttl_s)
        self._fd = cast("int", cast("dict[str, Json]", told)["fd"])

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # any writable buffer
        data = _data(self._call("file.read", count=min(len(buffer), MAX_DATA_BYTES)))
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override] # any buffer
        piece = bytes(memoryview(data)[:MAX_DATA_BYTES])
        self._call("file.write", data=base64.b64encode(piece).decode("ascii"))
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        told = self._call("file.seek", offset=offset, whence=("start", "here", "end")[whence])
        return cast("int", cast("dict[str, Json]", told)["offset"])

    def truncate(self, size: int | None = None) -> int:
        wanted = self.tell() if size is None else size
        self._call("file.truncate", size=wanted)
        return wanted

    def sync(self) -> None:
        """Publish what was written."""
        self._call("file.sync")

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._fd >= 0:
                self._call("file.close")
        finally:
            super().close()

    def _call(self, op: str, **fields: Json) -> Json:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return _call(op, self.name, self._session, fd=self._fd, **fields)


#: One session for all files of the process, so that any of its threads may use them.
_lock = threading.RLock()
_held: Session | None = None


def _forget() -> None:
    """Give the session up, see calls.forget; in the child of a fork another thread may have held the lock."""
    global _held, _lock
    held, _held, _lock = _held, None, threading.RLock()
    if held is not None:
        held.busy = False
        held.close()


forgetting.append(_forget)


def _session(wanted: Session | None) -> Session:
    """Return the session for a call: the process's own, or ``wanted`` if it still stands."""
    global _held
    if wanted is not None:
        if wanted is not _held or not wanted.mine:
            raise OSError(errno.EBADF, "the file was opened in another process, or its session has ended")
        return wanted
    if _held is not None and _held.busy:
        raise OSError(errno.EDEADLK, "files can't be used in a signal's handler that interrupted a call about files")
    if _held is None or not _held.mine:
        _held = Session()
    return _held


def _call(op: str, path: str, wanted: Session | None = None, /, **fields: Json) -> Json:
    """Make one call; again where that helps and does no harm. Raises OSError, Conflict."""
    sent = {name: value for name, value in fields.items() if value is not None}
    until_s, pause_s = time.monotonic() + _PATIENCE_S, _PAUSE_S[0]
    while True:
        try:
            with _lock:
                return _session(wanted).call(op, **sent)
        except CallRefused as refused:
            busy = refused.code == ErrorCode.SLOW_DOWN or (refused.code == ErrorCode.UNAVAILABLE and op in _AGAIN)
            if not busy or time.monotonic() > until_s:
                raise _error(refused, path) from refused
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])


def _error(refused: CallRefused, path: str) -> OSError:
    number = _ERRNO.get(ErrorCode(refused.code), errno.EIO)
    if refused.code == ErrorCode.CONFLICT:
        return Conflict(errno.ESTALE, refused.why, path)
    return OSError(number, refused.why or refused.code, path)


def _data(answer: Json) -> bytes:
    return base64.b64decode(cast("str", cast("dict[str, Json]", answer)["data"]))


def _put_aside(path: str, content: bytes, ttl_s: float | None) -> None:
    """Write beside the name, then give it the name: nobody sees a part."""
    above, _, name = path.rstrip("/").rpartition("/")
    aside = f"{above}/.{name[:64]}.{os.urandom(6).hex()}"
    try:
        with _Raw(aside, ["write", "create", "excl"], ttl_s) as raw:
            rest = memoryview(content)
            while rest:
                rest = rest[raw.write(rest) :]
        rename(aside, path)
    except BaseException as error:
        with suppress(OSError):
            remove(aside)
        if isinstance(error, OSError):
            error.filename = path
        raise


def _parsed(mode: str) -> tuple[bool, list[str]]:
    """Return (text?, flags) of a mode. Raises ValueError."""
    kind: Literal["r", "w", "a", "x"] | str = mode[:1]
    rest = mode[1:]
    plain = sorted(rest.replace("t", ""))
    if kind not in ("r", "w", "a", "x") or plain not in ([], ["+"], ["b"], ["+", "b"]) or ("b" in rest and "t" in rest):
        raise ValueError(f"no mode: {mode!r}")
    flags = ["write", "create", "excl"] if kind == "x" else list(_MODES[kind])
    if "+" in rest:
        flags += ["write"] if kind == "r" else ["read"]
    if "+" in rest and "b" not in rest:
        raise ValueError("a text file is read or written, not both: add b")
    return "b" not in rest, flags
