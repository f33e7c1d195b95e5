"""A job's figures as people read them. Called by `run`, `call` and `show`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["size", "usage"]

_STEP: Final = 1024


def size(count: float) -> str:
    """Return a number of bytes with its unit: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < _STEP or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return ""


def usage(figures: Mapping[str, float]) -> str:
    """Return what a job used: wall and CPU time, peak memory, processes, output; empty where nothing ran."""
    if not figures.get("wall_s"):
        return ""
    parts = [f"{figures['wall_s']:.2f} s", f"CPU {figures.get('cpu_s', 0):.2f} s"]
    if peak := figures.get("max_rss_bytes"):
        parts.append(f"peak memory {size(peak)}")
    if count := figures.get("processes"):
        parts.append(f"{count:.0f} process{'es' if count > 1 else ''}")
    if output := figures.get("output_bytes"):
        parts.append(f"output {size(output)}")
    return ", ".join(parts)
