"""The scrubber's loop: values and descriptors from the broker, a job's bytes through them.

Called by __main__, once it is confined. Must never say a value, keep one after `forget`, read on while nobody takes
what it has (a job that floods waits, nobody else does), or let a job's two streams share what is held back.

    broker → scrubber   {"op": "value", "attempt", "name", "value" (base64), "kill"} · {"op": "streams", "attempt"} +
                        the read ends of the job's stdout and stderr, the write ends towards the agent, and the agent's
                        alarm · {"op": "file", "attempt", "id"} + a file to read and one to write · {"op": "forget",
                        "attempt"}
    scrubber → broker   {"file": id, "leaked"} · {"leak": attempt, "hits", "names"} when a stream ended with something
                        masked
    scrubber → agent    {"name", "kill"} on the alarm, a line for each secret that a stream shows for the first time
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker.vault.redact import Redactor

__all__ = ["MAX_FILE_BYTES", "Scrubber"]

CHUNK_BYTES: Final = 64 * 1024
#: What may wait for a slow reader before the job's next bytes are read.
MOST_WAITING_BYTES: Final = 256 * 1024
MAX_FILE_BYTES: Final = 32 << 20
_MAX_RECORD_BYTES: Final = 64 * 1024
_MAX_FDS: Final = 5


@dataclass(slots=True, eq=False)
class _Stream:
    attempt: str
    source: int
    target: int
    redactor: Redactor
    alarm: int
    told: set[str] = field(default_factory=set)
    waiting: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Scrubber:
    """One process's streams."""

    def __init__(self, broker: socket.socket) -> None:
        self._broker = broker
        self._selector = selectors.EpollSelector()
        self._values: dict[str, dict[str, bytes]] = {}
        #: The secrets that end their job when they are found, by attempt.
        self._kills: dict[str, set[str]] = {}
        self._streams: set[_Stream] = set()
        self._selector.register(broker, selectors.EVENT_READ, self._hear)
        self.over = False

    def turn(self, timeout_s: float | None = None) -> None:
        """Serve what is ready."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._broker, _MAX_RECORD_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # A broker that ended with words of ours unread.
            data, fds = b"", []
        if not data:
            self.over = True
            return
        order = json.loads(data)
        attempt = order["attempt"]
        match order["op"]:
            case "value":
                self._values.setdefault(attempt, {})[order["name"]] = base64.b64decode(order["value"])
                if order["kill"]:
                    self._kills.setdefault(attempt, set()).add(order["name"])
            case "streams":
                self._open(attempt, fds)
            case "file":
                self._file(attempt, order["id"], fds)
            case "forget":
                self._values.pop(attempt, None)
                self._kills.pop(attempt, None)

    def _open(self, attempt: str, fds: list[int]) -> None:
        os.set_blocking(fds[4], False)
        for source, target, alarm in ((fds[0], fds[2], fds[4]), (fds[1], fds[3], os.dup(fds[4]))):
            os.set_blocking(source, False)
            os.set_blocking(target, False)
            stream = _Stream(attempt, source, target, Redactor(self._values.get(attempt, {})), alarm)
            self._streams.add(stream)
            self._selector.register(source, selectors.EVENT_READ, self._bound(self._read, stream))

    def _bound(self, act: Callable[[_Stream], None], stream: _Stream) -> Callable[[], None]:
        return lambda: act(stream)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.source, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stream.waiting += stream.redactor.feed(data) if data else stream.redactor.finish()
        # Before the masked bytes: who has read a stream to its end has heard all about it.
        for name in stream.redactor.found.keys() - stream.told:
            self._alarm(stream, name)
        if not data:
            stream.ended = True
            self._selector.unregister(stream.source)
        elif len(stream.waiting) >= MOST_WAITING_BYTES:
            self._selector.unregister(stream.source)
        self._write(stream)

    def _write(self, stream: _Stream) -> None:
        try:
            while stream.waiting:
                del stream.waiting[: os.write(stream.target, stream.waiting[:CHUNK_BYTES])]
        except BlockingIOError:
            self._watch(stream.target, selectors.EVENT_WRITE, self._bound(self._write, stream))
            return
        except OSError:
            # Nobody reads it any more: the job learns that from its own pipe.
            stream.waiting.clear()
            stream.ended = True
            self._unwatch(stream.source)
        self._unwatch(stream.target)
        if stream.ended:
            self._finish(stream)
        else:
            self._watch(stream.source, selectors.EVENT_READ, self._bound(self._read, stream))

    def _finish(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        os.close(stream.source)
        os.close(stream.target)
        os.close(stream.alarm)
        if stream.redactor.hits:
            self._say({"leak": stream.attempt, "hits": stream.redactor.hits, "names": list(stream.redactor.found)})

    def _alarm(self, stream: _Stream, name: str) -> None:
        stream.told.add(name)
        line = json.dumps({"name": name, "kill": name in self._kills.get(stream.attempt, ())}).encode() + b"\n"
        # An agent that is gone has nothing to end any more; lines this short are written whole.
        with suppress(OSError):
            os.write(stream.alarm, line)

    def _file(self, attempt: str, number: int, fds: list[int]) -> None:
        """Copy a file without the values; it may be a result that a job wrote, so its size is bounded."""
        source, target = fds
        redactor = Redactor(self._values.get(attempt, {}))
        try:
            data = _read_all(source)
            clean = memoryview(redactor.whole(data))
            while clean:
                clean = clean[os.write(target, clean) :]
            kills = self._kills.get(attempt, set())
            self._say({"file": number, "leaked": {name: name in kills for name in redactor.found}})
        except (OSError, ValueError) as error:
            self._say({"file": number, "leaked": {}, "err": type(error).__name__})
        finally:
            os.close(source)
            os.close(target)

    def _watch(self, fd: int, events: int, act: Callable[[], None]) -> None:
        with suppress(KeyError):
            self._selector.register(fd, events, act)

    def _unwatch(self, fd: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(fd)

    def _say(self, record: dict[str, object]) -> None:
        with suppress(OSError):
            self._broker.send(json.dumps(record).encode(), socket.MSG_NOSIGNAL)


def _read_all(fd: int) -> bytes:
    size = os.lseek(fd, 0, os.SEEK_END)
    if size > MAX_FILE_BYTES:
        raise ValueError("too large")
    parts, at = [], 0
    while at < size and (part := os.pread(fd, size - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
