"""What this process signed lately: the hash of each job's envelope, for the jobs that wait for it
and for its own end.

Called by the client right before it signs, and by results. Must never take a hash from the store: an id says nothing of
what lies under it, since clients choose ids, and whoever writes the store could put another envelope there (attack 4).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from typing import Final

from runner.wire.spec import JobSpec

__all__ = ["MAX_KNOWN", "Digests"]

#: Jobs that one client remembers; the oldest are forgotten first.
MAX_KNOWN: Final = 32_768
#: Small envelopes are kept as they are until somebody asks, or so many are there: hashes one after the other cost a
#: fraction of what one costs between two enqueues.
MOST_FRESH: Final = 64
SMALL_BYTES: Final = 4096


class Digests:
    """The SHA-256 of envelopes by job id; safe to use from several threads."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._known: dict[str, bytes] = {}
        self._fresh: list[tuple[str, bytes]] = []
        self._lock = threading.Lock()

    def note(self, job_id: str, envelope: bytes) -> None:
        """Remember what is signed for a job; if that was done before with other bytes, neither counts as known.

        A batch that is sent again after a lost answer has sealed values anew, and the store may hold the first.
        """
        with self._lock:
            self._fresh.append((job_id, envelope))
            if len(self._fresh) >= MOST_FRESH or len(envelope) > SMALL_BYTES:
                self._settle()

    def of(self, job_id: str) -> str | None:
        """Return the hash of a job's envelope in hex, None if it is not remembered."""
        with self._lock:
            self._settle()
            return self._known.get(job_id, b"").hex() or None

    def tied(self, job: JobSpec) -> JobSpec:
        """Return the job with the hashes of those that it waits for, as far as they are known."""
        after = job.after
        if after is None:
            return job
        with self._lock:
            self._settle()
            known = [self._known.get(other, b"").hex() for other in after.jobs]
        given = after.envelopes or ("",) * len(known)
        # What was signed once stays: a repeated job waits for the very jobs that it waited for before.
        found = tuple(old or new for old, new in zip(given, known, strict=True))
        return replace(job, after=replace(after, envelopes=found)) if any(found) else job

    def _settle(self) -> None:
        """Hash what was noted since the last time, in its order; the caller holds the lock."""
        for job_id, envelope in self._fresh:
            digest = hashlib.sha256(envelope).digest()
            self._known[job_id] = digest if self._known.get(job_id, digest) == digest else b""
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        self._fresh.clear()
