"""Times as they are written for people and scripts: ISO 8601 UTC with milliseconds.

Called by everyone who shows a time. Must never be used for a duration or a deadline: those are monotonic.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["iso", "parse_ms"]


def iso(stamp_ms: int) -> str:
    """Return Unix milliseconds as ISO 8601 UTC, such as ``2030-01-02T03:04:05.678Z``; out of range becomes ""."""
    try:
        return datetime.fromtimestamp(stamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return ""


def parse_ms(text: str) -> int | None:
    """Return the Unix milliseconds of an ISO 8601 time with zone, else None."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int(found.timestamp() * 1000) if found.tzinfo is not None else None
