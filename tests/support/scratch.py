"""Short-lived folders with short paths. Called by the fixtures; must never hand out a path a socket cannot bear."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LONGEST_ROOT", "folder", "root"]

# A Unix socket path holds 107 bytes; a home adds its own folders and names below ours.
LONGEST_ROOT = 60


def root() -> Path:
    """Return the folder for temporary files, or /tmp where that one's path is too long for sockets below it."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= LONGEST_ROOT else "/tmp")


@contextmanager
def folder(mode: int = 0o700) -> Iterator[Path]:
    """Yield a new empty folder with a short path; it is gone afterwards, with all that it holds."""
    path = Path(tempfile.mkdtemp(prefix="rf-", dir=root()))
    path.chmod(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path)
