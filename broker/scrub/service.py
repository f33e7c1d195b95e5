"""The scrubber's loop: values and descriptors from the broker, a job's bytes through them.

Called by __main__, once it is confined. Must never say a value, keep one after `forget`, read on while nobody takes
what it has (a job that floods waits, nobody else does), or let a job's two streams share what is held back.

    broker → scrubber   {"op": "value", "attempt", "name", "value" (base64)} · {"op": "streams", "attempt"} + the read
                        ends of the job's stdout and stderr and the write ends towards the agent · {"op": "file",
                        "attempt", "id"} + a file to read and one to write · {"op": "forget", "attempt"}
    scrubber → broker   {"file": id, "hits"} · {"leak": attempt, "hits"} when a stream ended with something masked
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
_MAX_FDS: Final = 4


@dataclass(slots=True, eq=False)
class _Stream:
    attempt: str
    source: int
    target: int
    redactor: Redactor
    waiting: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Scrubber:
    """One process's streams."""

    def __init__(self, broker: socket.socket) -> None:
        self._broker = broker
        self._selector = selectors.EpollSelector()
        self._values: dict[str, dict[str, bytes]] = {}
        self._streams: set[_Stream] = set()
        self._selector.register(broker, selectors.EVENT_READ, self._hear)
        self.over = False

    def turn(self, timeout_s: float | None = None) -> None:
        """Serve what is ready."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _hear(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._broker, _MAX_RECORD_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self.over = True
            return
        order = json.loads(data)
        attempt = order["attempt"]
        match order["op"]:
            case "value":
                self._values.setdefault(attempt, {})[order["name"]] = base64.b64decode(order["value"])
            case "streams":
                self._open(attempt, fds)
            case "file":
                self._file(attempt, order["id"], fds)
            case "forget":
                self._values.pop(attempt, None)

    def _open(self, attempt: str, fds: list[int]) -> None:
        for source, target in ((fds[0], fds[2]), (fds[1], fds[3])):
            os.set_blocking(source, False)
            os.set_blocking(target, False)
            stream = _Stream(attempt, source, target, Redactor(self._values.get(attempt, {})))
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
        if stream.redactor.hits:
            self._say({"leak": stream.attempt, "hits": stream.redactor.hits})

    def _file(self, attempt: str, number: int, fds: list[int]) -> None:
        """Copy a file without the values; it may be a result that a job wrote, so its size is bounded."""
        source, target = fds
        redactor = Redactor(self._values.get(attempt, {}))
        try:
            data = _read_all(source)
            clean = memoryview(redactor.whole(data))
            while clean:
                clean = clean[os.write(target, clean) :]
            self._say({"file": number, "hits": redactor.hits})
        except (OSError, ValueError) as error:
            self._say({"file": number, "hits": 0, "err": type(error).__name__})
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
