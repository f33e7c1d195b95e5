"""Reading and writing small files that matter: bounded, by descriptor, atomic.

Called by keys, trust and client set-up. Must never follow a link at the last step, check a path and then open it again,
or leave a half-written file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from runner.errors import ConfigError
from runner.home import check_private_file

__all__ = ["create_file", "locked", "read_file", "replace_file"]


def read_file(path: Path, limit_bytes: int, *, secret: bool) -> bytes:
    """Return the file's bytes, after checking owner and mode on the opened file.

    Raises:
        ConfigError: missing, unreadable or larger than ``limit_bytes``. UnsafeFileError: others could change it, or
            (``secret``) read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: `ringfence keys init` makes it, or name another --home") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        check_private_file(path, os.fstat(descriptor), secret=secret)
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ConfigError(f"{path} is larger than {limit_bytes} bytes")
    return data


def create_file(path: Path, data: bytes, mode: int) -> None:
    """Make a new file with all its bytes or none. Raises FileExistsError: an existing one is never replaced."""
    fresh = _write(path, data, mode)
    try:
        os.link(fresh, path)
    finally:
        fresh.unlink()
    _sync(path.parent)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file anew; readers see the old bytes or the new ones, never a part."""
    fresh = _write(path, data, mode)
    try:
        fresh.replace(path)
    except OSError:
        fresh.unlink()
        raise
    _sync(path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two read-change-write rounds don't overlap."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes, mode: int) -> Path:
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        fresh.unlink()
        raise
    return fresh


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
