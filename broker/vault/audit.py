"""The vault's record: what was done with which secret, by name, in a chain that shows a later change.

Called by the broker before each release. Must never hold a value, never leave a torn line behind, and never let a
caller go on whose record was not written: no record, no release.

A line is ``{"n", "at", …} MAC``. Each MAC covers the line and the MAC before it, and its key is replaced by a hash of
itself after each line: who breaks in later can't rewrite what was written before. The first key is sealed to the
vault's recipients in ``audit.seed``, so `verify` needs the host's or the recovery key. A cut at the end passes the
chain: compare ``head`` with one that was kept off this host.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from broker.vault.disk import FILE_MODE, Folder, Write
from broker.vault.errors import AuditError

__all__ = ["AUDIT_FILE", "GENESIS", "Audit", "Head", "Reader", "verify"]

AUDIT_FILE: Final = "audit.log"
GENESIS: Final = bytes(32)
_EVOLVE: Final = b"ringfence/audit/1"
_MAC_HEX: Final = 64
#: Made once, because it is on the way of every release.
_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode
_MAX_LINE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the chain: how many lines, and the last MAC in hex."""

    count: int
    mac: str


class _FullDiskError(AuditError):
    """There was no room for the line."""


class _Chain:
    def __init__(self, seed: bytes) -> None:
        self.key = seed
        self.mac = GENESIS
        self.count = 0

    def next(self, body: bytes) -> bytes:
        return hmac.digest(self.key, self.mac + body, "sha256")

    def take(self, mac: bytes) -> None:
        self.mac = mac
        self.key = hashlib.sha256(_EVOLVE + self.key).digest()
        self.count += 1

    @property
    def head(self) -> Head:
        return Head(self.count, self.mac.hex())


class Audit:
    """The open record of one vault."""

    def __init__(
        self,
        folder: Folder,
        seed: bytes,
        *,
        clock: Callable[[], float] = time.time,
        write: Write = os.write,
        more_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the record and walk its chain. Raises AuditError: it was changed, or can't be opened.

        ``more_room``: frees space on a full disk; False if it can't.
        """
        self._clock, self._write, self._more_room = clock, write, more_room
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(AUDIT_FILE, flags, FILE_MODE, dir_fd=folder.fd)
        except OSError as error:
            raise AuditError(f"{folder.path / AUDIT_FILE} can't be opened: {error.strerror}") from None
        self._chain = _Chain(seed)
        self._torn = False
        try:
            self._end = _drop_torn_tail(self._fd, _walk(self._chain, _read_all(self._fd)))
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def head(self) -> Head:
        """The end of the chain, for an anchor off this host."""
        return self._chain.head

    def write(self, event: str, **fields: object) -> None:
        """Append one line; it is with the kernel when this returns (``sync`` puts it on disk).

        Raises:
            AuditError: it was not written, and nothing of it is left.
        """
        line_of = {"n": self._chain.count + 1, "at": round(self._clock(), 3), "event": event, **fields}
        body = _ENCODE(line_of).encode()
        if len(body) > _MAX_LINE_BYTES:
            raise AuditError("the record is larger than a line may be")
        if self._torn:
            self._cut()
        mac = self._chain.next(body)
        line = body + b" " + mac.hex().encode() + b"\n"
        try:
            self._append(line)
        except _FullDiskError:
            if not self._more_room():
                raise
            self._append(line)
        self._end += len(line)
        self._chain.take(mac)

    def _append(self, line: bytes) -> None:
        """Write a line whole. Raises AuditError: it was not, and nothing of it is left."""
        try:
            done = self._write(self._fd, line)
        except OSError as error:
            self._cut()
            kind = _FullDiskError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AuditError
            raise kind(f"the record was not written: {error.strerror}") from None
        if done != len(line):
            self._cut()
            raise _FullDiskError("the record was written in part, and taken back: is the disk full?")

    def sync(self) -> None:
        """Put what was written on disk. Raises AuditError."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise AuditError(f"the record is not on disk: {error.strerror}") from None

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self) -> None:
        """Take a torn line back. Until that has worked, nothing more is written."""
        self._torn = True
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            raise AuditError(f"a torn line could not be taken back: {error.strerror}") from None
        self._torn = False


class Reader:
    """Reads a record that somebody else writes, and checks each line against the ones before it."""

    def __init__(self, folder: Folder, seed: bytes) -> None:
        """Open the record at its first line. Raises AuditError: there is none."""
        try:
            self._fd = os.open(AUDIT_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        except OSError as error:
            raise AuditError(f"{folder.path / AUDIT_FILE} can't be opened: {error.strerror}") from None
        self._chain, self._end = _Chain(seed), 0

    @property
    def head(self) -> Head:
        """The end of what was read."""
        return self._chain.head

    def more(self) -> Iterator[Mapping[str, object]]:
        """Yield the whole lines that have come since; one that is being written waits for its end.

        Raises:
            AuditError: a line does not fit, or what was read is not there any more.
        """
        if os.fstat(self._fd).st_size < self._end:
            raise AuditError(f"the record was cut after its line {self._chain.count} had been read")
        for line in _read_all(self._fd, self._end).splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            _step(self._chain, line)
            self._end += len(line)
            yield json.loads(line.rsplit(b" ", 1)[0])

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def verify(data: bytes, seed: bytes, anchor: Head | None = None) -> tuple[Head, tuple[Mapping[str, object], ...]]:
    """Walk a whole record; returns its end and its lines.

    Raises:
        AuditError: names the first line that does not fit, or says that the record is older than ``anchor``.
    """
    chain, lines = _Chain(seed), []
    marks = {0: GENESIS.hex()}
    for line in data.splitlines(keepends=True):
        _step(chain, line)
        marks[chain.count] = chain.mac.hex()
        lines.append(json.loads(line.rsplit(b" ", 1)[0]))
    if anchor is not None and marks.get(anchor.count) != anchor.mac:
        raise AuditError(f"the record has {chain.count} lines and does not hold the anchored line {anchor.count}")
    return chain.head, tuple(lines)


def _walk(chain: _Chain, data: bytes) -> int:
    end = 0
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        _step(chain, line)
        end += len(line)
    return end


def _step(chain: _Chain, line: bytes) -> None:
    body, _, mac = line.rstrip(b"\n").rpartition(b" ")
    want = chain.next(body)
    if len(mac) != _MAC_HEX or not line.endswith(b"\n") or not hmac.compare_digest(want.hex().encode(), mac):
        raise AuditError(f"the record was changed: line {chain.count + 1} does not fit the ones before it")
    chain.take(want)


def _read_all(fd: int, at: int = 0) -> bytes:
    parts = []
    while part := os.pread(fd, 1 << 20, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _drop_torn_tail(fd: int, end: int) -> int:
    """A crash in a write may leave the start of a line, of something that was never released: it goes."""
    if os.fstat(fd).st_size > end:
        os.ftruncate(fd, end)
    return end
