"""The replay ledger: which signed attempts this node has run, on its own disk (attack 24).

Called by the supervisor before a job is released and after its end is acknowledged. Must never forget an attempt before
the job's ``not_after``: a store writer can then run a signed job at most once per node and allowed attempt.

File: one line ``S|E nonce attempt not_after_ms`` per step, append only, rewritten without expired lines at start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

__all__ = ["Ledger"]

_FIELDS: Final = 4


class Ledger:
    """Newest attempt per nonce. Exact for this node; other nodes keep their own."""

    def __init__(self, path: Path, now_ms: int) -> None:
        self._path = path
        self._last: dict[str, tuple[int, str, int]] = {}
        self._fd = -1
        self._load(now_ms)

    def look(self, nonce: str, attempt: int) -> Literal["new", "started", "ended"]:
        """Return what this node knows of the attempt.

        ``started``: released here by an agent that died before the store heard of the end; it must count as lost.
        ``ended``: it, or a later one of the same signed job, ended here; running it again would be a replay.
        """
        last = self._last.get(nonce)
        if last is None or attempt > last[0]:
            return "new"
        return "started" if attempt == last[0] and last[1] == "S" else "ended"

    def started(self, nonce: str, attempt: int, not_after_ms: int) -> None:
        """Note that the attempt is about to be released. Raises OSError: then it must not run."""
        self._append("S", nonce, attempt, not_after_ms)

    def ended(self, nonce: str, attempt: int, not_after_ms: int) -> None:
        """Note that the store acknowledged the attempt's end."""
        self._append("E", nonce, attempt, not_after_ms)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, kind: str, nonce: str, attempt: int, not_after_ms: int) -> None:
        os.write(self._fd, f"{kind} {nonce} {attempt} {not_after_ms}\n".encode("ascii"))
        self._note(kind, nonce, attempt, not_after_ms)

    def _note(self, kind: str, nonce: str, attempt: int, not_after_ms: int) -> None:
        last = self._last.get(nonce)
        if last is None or (attempt, kind == "E") > (last[0], last[1] == "E"):
            self._last[nonce] = (attempt, kind, not_after_ms)

    def _load(self, now_ms: int) -> None:
        text = self._path.read_text("ascii", errors="replace") if self._path.exists() else ""
        for line in text.splitlines():
            parts = line.split(" ")
            if len(parts) != _FIELDS or parts[0] not in {"S", "E"} or not (parts[2] + parts[3]).isdigit():
                continue
            if int(parts[3]) > now_ms:
                self._note(parts[0], parts[1], int(parts[2]), int(parts[3]))
        fresh = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(fresh, flags, 0o600)
        kept = dict(self._last)
        for nonce, (attempt, kind, not_after_ms) in kept.items():
            self._append(kind, nonce, attempt, not_after_ms)
        fresh.replace(self._path)
