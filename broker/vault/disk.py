"""Files of the vault: checked by descriptor, written whole or not at all.

Called by the keystore and the audit. Must never follow a link, publish a part of a file, or open one whose owner or
mode has drifted: every name is opened below a folder's descriptor, and what was opened is what is checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker.vault.errors import UnsafeVaultError, VaultError

__all__ = ["FILE_MODE", "FOLDER_MODE", "TEMPORARY", "Folder", "Write"]

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
#: What a file is called until it is whole; what a crash leaves under such a name is thrown away at the next start.
TEMPORARY: Final = ".new-"
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

#: Writes at most all of the bytes and says how many: os.write, or a failing one in a test.
Write = Callable[[int, bytes | memoryview], int]


class Folder:
    """One folder that only its owner can enter, held open."""

    def __init__(self, path: Path, *, write: Write = os.write) -> None:
        """Open an existing folder. Raises UnsafeVaultError, VaultError (missing)."""
        #: For messages: what is opened is the path as given, which may be below a folder that we only stand in.
        self.path = Path(os.path.abspath(path))
        self._write = write
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise VaultError(f"{path} is missing: make a vault with `ringfence vault init`") from None
        except OSError as error:
            raise UnsafeVaultError(f"{path} is no folder of ours: {error.strerror}") from None
        try:
            _check(path, os.fstat(self.fd), stat.S_ISDIR, f"chmod 700 {path}")
        except UnsafeVaultError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self.fd))

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return a file's bytes.

        Raises:
            FileNotFoundError. UnsafeVaultError: somebody else could have read or changed it. VaultError: too large.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnsafeVaultError(f"{self.path / name} is not a file of ours: {error.strerror}") from None
        with os.fdopen(fd, "rb") as file:
            _check(self.path / name, os.fstat(fd), stat.S_ISREG, f"chmod 600 {self.path / name}")
            data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise VaultError(f"{self.path / name} is larger than {limit_bytes} bytes")
        return data

    def create(self, name: str, data: bytes) -> None:
        """Make a new file with all its bytes, on disk. Raises FileExistsError, OSError; then nothing has changed."""
        fresh = self._fresh(name, data)
        try:
            os.link(fresh, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        finally:
            os.unlink(fresh, dir_fd=self.fd)
        os.fsync(self.fd)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file anew; a crash leaves the old bytes or the new ones. Raises OSError; then the old ones stand."""
        fresh = self._fresh(name, data)
        try:
            os.rename(fresh, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            os.unlink(fresh, dir_fd=self.fd)
            raise
        os.fsync(self.fd)

    def remove(self, name: str) -> None:
        """Take a name away. Raises FileNotFoundError."""
        os.unlink(name, dir_fd=self.fd)
        os.fsync(self.fd)

    def sweep(self) -> None:
        """Throw away what an interrupted write has left."""
        for name in self.names():
            if name.startswith(TEMPORARY):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.fd)

    def _fresh(self, name: str, data: bytes) -> str:
        fresh = f"{TEMPORARY}{name}-{os.urandom(6).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, FILE_MODE, dir_fd=self.fd)
        try:
            os.fchmod(fd, FILE_MODE)
            rest = memoryview(data)
            while rest:
                # One write may be short: what is published below is never a part.
                rest = rest[self._write(fd, rest) :]
            os.fsync(fd)
        except BaseException:
            os.unlink(fresh, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)
        return fresh


def _check(path: Path, info: os.stat_result, kind: Callable[[int], bool], fix: str) -> None:
    if not kind(info.st_mode):
        raise UnsafeVaultError(f"{path} is of the wrong kind: move it away and restore it from your backup")
    if info.st_uid != os.geteuid():
        raise UnsafeVaultError(
            f"{path} belongs to user {info.st_uid}, the vault to {os.geteuid()}: find out who changed it, then chown it"
        )
    if info.st_mode & _OTHERS:
        raise UnsafeVaultError(f"{path} is open to other users (mode {info.st_mode & 0o7777:04o}): run `{fix}`")
