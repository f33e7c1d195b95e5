"""Port: runner.signing. The flight recorder of one node: one line before each action, in a chain that shows any change.

Called by the witness (what the node does), the kernel's session and its parts (what jobs ask for). Must never let an
action go on whose line was not written, hold a value of a secret, leave a torn line between two whole ones, or stop a
kill: what is on the safe side is noted as far as it can be.

A line is with the kernel (write(2)) before its action begins, so it outlives the agent; it is on disk (fdatasync) a
second later at most, at once after a kill, a rotation and at a stop, so power loss takes at most that second.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

from broker.vault.disk import FILE_MODE, FOLDER_MODE, Folder
from broker.vault.errors import VaultError
from broker.vault.reserve import Reserve
from node_agent.kernel import recordlines, segments
from node_agent.kernel.errors import CallError
from node_agent.kernel.recordlines import Field
from node_agent.kernel.rooms import Rooms
from node_agent.kernel.segments import Segment
from runner.signing import Signer, sealed_for
from runner.wire import flight
from runner.wire.calls import ErrorCode

__all__ = ["KEEP_BYTES", "SEGMENT_BYTES", "Recorder"]

log = logging.getLogger(__name__)

#: A file is closed at this size, and the oldest are given up when all are larger than KEEP_BYTES.
SEGMENT_BYTES: Final = 16 << 20
KEEP_BYTES: Final = 2 << 30
#: Fields in which a job's own words may stand.
_SAID: Final = frozenset({"resource", "why", "name", "host", "what", "note", "path", "reason"})


class Recorder:
    """The open record of one node, for one agent process. Never raises from its constructor: see ``failed``.

    ``fleet``: the public key that the seeds are sealed for; None seals them for the node itself, which then could make
    lines of before. ``boot`` is the agent start that lines belong to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        signer: Signer,
        fleet: str | None,
        clock: Callable[[], int] = time.time_ns,
        write: Callable[[int, bytes], int] = os.write,
        segment_bytes: int = SEGMENT_BYTES,
        keep_bytes: int = KEEP_BYTES,
        reserve_bytes: int | None = None,
    ) -> None:
        self.path = folder
        self.node = node
        self.signer = signer
        self.boot = ""
        #: Why nothing can be written, empty while it can.
        self.failed = ""
        #: What was found wrong with what an earlier start has left; told once.
        self.fault = ""
        #: Lines and bytes of this process, and lines that could not be written.
        self.lines = self.bytes = self.misses = 0
        #: Attempts of jobs that hold values themselves.
        self.veiled: set[str] = set()
        #: Called when what was written last should be on disk soon.
        self.hurry: Callable[[], None] = lambda: None
        self._fleet = fleet or signer.public
        self._clock, self._write = clock, write
        self._segment_bytes, self._keep_bytes, self._reserve_bytes = segment_bytes, keep_bytes, reserve_bytes
        self._folder: Folder | None = None
        self._reserve: Reserve | None = None
        self._fd = -1
        self._segments: list[Segment] = []
        self._number = self._size = 0
        self._torn = False
        self._count, self._link, self._key = 0, flight.GENESIS, b""
        self._closed = False
        self._closing: list[int] = []
        self._dirty = self._new = False
        self._rooms = Rooms(lambda: clock() / 1e9)
        self.heal()

    @property
    def count(self) -> int:
        """Lines in the chain, of all starts."""
        return self._count

    @property
    def link(self) -> bytes:
        """The hash of the last line."""
        return self._link

    @property
    def head(self) -> str:
        """``COUNT:HASH`` of the last line, for receipts and events."""
        return flight.head_text(self._count, self._link)

    @property
    def dirty(self) -> bool:
        """Whether there is something that may not be on disk."""
        return self._dirty or bool(self._closing)

    def write(self, kind: str, attempt: str, **fields: Field) -> None:
        """Write one line that ``attempt`` has caused, before what it tells of.

        Raises:
            CallError: UNRECORDED: the line was not written, and nothing of it is left; SLOW_DOWN: the attempt, or its
                tenant, has used up its room. The action must not happen.
        """
        self._append(kind, attempt, self.veil(attempt, fields), bounded=bool(attempt))

    def about(self, kind: str, attempt: str, **fields: Field) -> None:
        """Write one line about ``attempt`` that others have caused: its node, an operator, another job.

        Whatever the attempt has filled the record with does not hold up what is done to it. Raises
        CallError(UNRECORDED).
        """
        self._append(kind, attempt, self.veil(attempt, fields), bounded=False)

    def must(self, kind: str, attempt: str, fields: Mapping[str, Field]) -> None:
        """Write one line of what the node itself is about to do. Raises CallError(UNRECORDED): it must not happen."""
        self._append(kind, attempt, fields, bounded=False)

    def note(self, kind: str, attempt: str = "", fields: Mapping[str, Field] = MappingProxyType({})) -> bool:
        """Write one line of what happens in any case; return whether it is written. Never raises."""
        try:
            self._append(kind, attempt, fields, bounded=False)
        except CallError:
            return False
        except Exception:
            # A kill that could not be recorded is a kill all the same.
            log.exception("a line of the flight record could not be made", extra={"kind": kind})
            self.misses += 1
            return False
        return True

    def veil(self, attempt: str, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """Return the fields without words of a job that was handed a secret's value, and could say it in them."""
        if attempt not in self.veiled:
            return fields
        return {
            name: recordlines.veiled(value) if name in _SAID and isinstance(value, str) else value
            for name, value in fields.items()
        }

    def forget(self, attempt: str) -> None:
        """The attempt is over."""
        self._rooms.forget(attempt)
        self.veiled.discard(attempt)

    def heal(self) -> bool:
        """Open what is not open, and try to write if nothing could be; return whether the record takes lines."""
        if self._closed:
            return False
        try:
            self._open()
        except (OSError, VaultError, CallError) as error:
            self._fail(f"{error.strerror} ({self.path})" if isinstance(error, OSError) else str(error))
            return False
        return not self.failed or self.note("record.healed", fields={"why": self.failed})

    def syncing(self) -> Callable[[], None] | None:
        """Return what puts everything written so far on disk, for another thread; None if that has happened.

        It raises OSError; then call ``unsynced``.
        """
        if not self.dirty:
            return None
        fds, self._closing = self._closing, []
        if self._fd >= 0:
            fds.append(os.dup(self._fd))
        if self._new and self._folder is not None:
            fds.append(os.dup(self._folder.fd))
        self._dirty = self._new = False

        def work() -> None:
            try:
                for fd in fds:
                    os.fdatasync(fd)
            finally:
                for fd in fds:
                    os.close(fd)

        return work

    def unsynced(self, error: OSError) -> None:
        """What was written may not be on disk."""
        self._dirty = True
        self._fail(f"what was written is not on disk: {error.strerror}")

    def close(self) -> None:
        """Put all on disk and let go of it. Idempotent."""
        if self._closed:
            return
        work = self.syncing()
        self._closed = True
        if work is not None:
            with suppress(OSError):
                work()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for held in (self._reserve, self._folder):
            if held is not None:
                held.close()

    def _append(self, kind: str, attempt: str, fields: Mapping[str, Field], *, bounded: bool) -> None:
        if self._fd < 0 or self._torn:
            self._ready()
        body = recordlines.body(self._count + 1, self._clock() // 1_000_000, kind, attempt, fields)
        if bounded:
            self._take_room(attempt, len(body))
        link = flight.linked(self._link, body)
        line = b"%b %b\n" % (body, flight.mac(self._key, link).encode())
        # On a full disk the record lives on its reserve for a while.
        if not self._put(line) and not (self._reserve and self._reserve.give() and self._put(line)):
            self._refuse(f"the disk of {self.path} is full: free some space on it")
        self._took(line, link)
        if self._size >= self._segment_bytes:
            self._rotate()

    def _took(self, line: bytes, link: bytes) -> None:
        self._link, self._key = link, flight.evolve(self._key)
        self._count += 1
        self._size += len(line)
        self.lines += 1
        self.bytes += len(line)
        self._dirty = True
        if self.failed:
            log.warning("the flight recorder writes again", extra={"node": self.node})
            self.failed = ""

    def _put(self, line: bytes) -> bool:
        """Write a line whole; False if there is no room for it. Raises CallError: it was not written."""
        try:
            done = self._write(self._fd, line)
        except OSError as error:
            self._cut()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False
            self._refuse(f"{error.strerror} ({self.path})")
        if done != len(line):
            self._cut()
            return False
        return True

    def _cut(self) -> None:
        """Take a torn line back. Until that has worked, nothing more is written."""
        self._torn = True
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self._refuse(f"a torn line can't be taken back: {error.strerror}")
        self._torn = False

    def _ready(self) -> None:
        if self._torn:
            self._cut()
        try:
            self._open()
        except (OSError, VaultError) as error:
            self._refuse(f"{error.strerror} ({self.path})" if isinstance(error, OSError) else str(error))

    def _refuse(self, why: str) -> NoReturn:
        self.misses += 1
        self._fail(why)
        raise CallError(ErrorCode.UNRECORDED, f"the node's record can't be written: {why}")

    def _fail(self, why: str) -> None:
        if not self.failed:
            log.error("the flight recorder can't write, the node takes no work", extra={"why": why})
        self.failed = why

    def _take_room(self, attempt: str, size: int) -> None:
        if whose := self._rooms.take(attempt, size):
            raise CallError(ErrorCode.SLOW_DOWN, f"{whose} filled the room in the node's record: call less often")

    def _open(self) -> None:
        """Go on after what an earlier start has left, in a file of our own. Raises OSError, VaultError, CallError."""
        if self._closed:
            raise OSError(errno.EBADF, "the record is closed")
        if self._fd >= 0:
            return
        if self._folder is None:
            self.path.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self._folder = Folder(self.path)
            size = {} if self._reserve_bytes is None else {"size_bytes": self._reserve_bytes}
            self._reserve = Reserve(self._folder, **size)
            self._segments = segments.found(self._folder.fd)
            if self._segments:
                end = segments.end_of(self._folder.fd, self._segments[-1])
                self._count, self._link, self.fault = end.count, end.link, end.fault
                self._number = self._segments[-1].number
        self._begin()

    def _begin(self) -> None:
        """Make the next file with its first line; whatever fails leaves nothing of it, and the old one in use."""
        if self._folder is None:
            raise OSError(errno.EBADF, "the record is not open")
        number, name = self._number + 1, segments.name_of(self._number + 1)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        seed, before = os.urandom(flight.SEED_BYTES), self.head
        fields: dict[str, Field] = {
            "node": self.node,
            "file": number,
            "before": before,
            "signer": self.signer.public,
            "seed": base64.b64encode(sealed_for(self._fleet, seed)).decode(),
            "for": self._fleet,
        }
        if self.fault:
            fields["fault"] = self.fault
        body = recordlines.body(self._count + 1, self._clock() // 1_000_000, flight.OPENED, "", fields)
        link = flight.linked(self._link, body)
        line = b"%b %b\n" % (body, flight.mac(seed, link).encode())
        fd = os.open(name, flags, FILE_MODE, dir_fd=self._folder.fd)
        try:
            done = self._write(fd, line)
        except OSError:
            done = -1
        if done != len(line):
            os.close(fd)
            os.unlink(name, dir_fd=self._folder.fd)
            raise OSError(errno.ENOSPC, "no new file can be begun: is the disk full?")
        if self._fd >= 0:
            self._closing.append(self._fd)
        self._fd, self._number, self._size, self._key, self._new = fd, number, 0, seed, True
        self._segments.append(Segment(number, 0, before))
        self._took(line, link)

    def _rotate(self) -> None:
        """Begin another file; where none can be made, the old one grows on."""
        size = self._size
        try:
            self._begin()
        except OSError as error:
            log.warning("no new file for the flight record", extra={"error": str(error)})
            return
        old = self._segments[-2]
        self._segments[-2] = Segment(old.number, size, old.before)
        while len(self._segments) > 1 and sum(each.size_bytes for each in self._segments) > self._keep_bytes:
            oldest, then = self._segments[:2]
            if self._folder is None or not self.note(
                flight.DROPPED, fields={"file": oldest.number, "upto": then.before}
            ):
                return
            with suppress(OSError):
                os.unlink(segments.name_of(oldest.number), dir_fd=self._folder.fd)
            del self._segments[0]
