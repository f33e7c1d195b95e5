"""The keystore: one age file per version of a secret, its name and version bound inside.

Called by the broker and by `ringfence vault`, one at a time (a lock says who). Must never write a value in the clear,
hold one longer than a call, return one whose file was renamed, replaced or cut, or leave a half-written file in the
place of a good one.

    VAULT/                 0700   key           the host's identities, newest first (unless they come from elsewhere)
                                  recipients    the public halves: the host's first, then the offline recovery keys
                                  audit.seed, sealing.age   the chain's first key, and sealed arguments' keys
                                  lock          whoever holds it writes
    VAULT/secrets/         0700   NAME@000003.age
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyrage import x25519

from broker.vault import hostkey, sealing, sealkeys, seeds
from broker.vault.disk import FOLDER_MODE, TEMPORARY, Folder, Write
from broker.vault.errors import (
    CorruptError,
    HostKeyError,
    UnknownSecretError,
    UnsafeVaultError,
    VaultBusyError,
    VaultError,
    VaultUsageError,
)
from broker.vault.hostkey import FileKey, KeySource
from broker.vault.sealkeys import SealKeys

__all__ = ["MAX_VALUE_BYTES", "Entry", "Keystore", "Value", "check_name", "create"]

#: More would hold up everybody else: decryption keeps the interpreter to itself.
MAX_VALUE_BYTES: Final = 32 * 1024
#: Versions that are kept of each secret; older ones go when a new one is put.
KEPT_VERSIONS: Final = 10
_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_FILE: Final = re.compile(r"([a-zA-Z0-9][a-zA-Z0-9_.-]{0,63})@([0-9]{6,12})\.age")
_MAX_FILE_BYTES: Final = MAX_VALUE_BYTES + 16 * 1024
_MAX_NOTE: Final = 256
_MAX_RECIPIENTS_BYTES: Final = 16 * 1024
_RECIPIENTS: Final = "recipients"
_SECRETS: Final = "secrets"
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class Value:
    """One opened version. The value is not shown by repr."""

    name: str
    version: int
    at_s: int
    kind: str
    note: str
    value: bytes

    def __repr__(self) -> str:
        return f"Value({self.name!r}, version={self.version})"


@dataclass(frozen=True, slots=True)
class Entry:
    """One secret in a list: its name and the versions that are kept, oldest first."""

    name: str
    versions: tuple[int, ...]


def check_name(name: str) -> str:
    """Return ``name`` if a secret may be called so. Raises VaultUsageError."""
    if not _NAME.fullmatch(name):
        raise VaultUsageError(
            "a secret's name starts with a letter or digit and holds at most 64 letters, digits, _ . and -"
        )
    return name


def create(path: Path, recovery: Sequence[str] = (), *, write: Write = os.write) -> str | None:
    """Make a vault in a folder that does not exist yet.

    ``recovery``: public age recipients (``age1…``) whose private halves are kept off this host. Without any, one is
    made and its private half returned: show it once, it is stored nowhere. An interrupted call leaves no vault.

    Raises:
        VaultUsageError: there is a vault already, or a recipient is none.
    """
    if path.exists() or path.is_symlink():
        raise VaultUsageError(f"{path} exists already: `ringfence vault list` shows what is in it")
    shown = None
    if not recovery:
        offline = x25519.Identity.generate()
        shown, recovery = str(offline), (str(offline.to_public()),)
    for text in recovery:
        sealing.recipient(text)
    host = x25519.Identity.generate()
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    building = path.with_name(f"{TEMPORARY}{path.name}-{os.urandom(6).hex()}")
    building.mkdir(mode=FOLDER_MODE)
    (building / _SECRETS).mkdir(mode=FOLDER_MODE)
    folder = Folder(building, write=write)
    try:
        folder.create(_LOCK, b"")
        folder.create(hostkey.KEY_FILE, f"{host}\n".encode())
        recipients = (str(host.to_public()), *recovery)
        folder.create(_RECIPIENTS, "".join(f"{text}\n" for text in recipients).encode())
        folder.create(seeds.FILE, seeds.seal(os.urandom(seeds.SEED_BYTES), recipients))
        building.rename(path)
    except BaseException:
        for name in folder.names():
            with suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
        (building / _SECRETS).rmdir()
        building.rmdir()
        raise
    finally:
        folder.close()
    return shown


class Keystore:
    """An open vault. Only one process has it open; ``close`` lets the next one in."""

    def __init__(
        self,
        path: Path,
        source: KeySource | None = None,
        *,
        clock: Callable[[], float] = time.time,
        write: Write = os.write,
    ) -> None:
        """Open a vault; ``source`` is where the host's key comes from, by default the vault's own file.

        Raises:
            UnsafeVaultError: owner, mode or kind of anything in it has drifted. VaultBusyError. HostKeyError.
            VaultError: there is none.
        """
        self._clock, self._lock = clock, -1
        self._folder = Folder(path, write=write)
        try:
            self._lock = _lock(self._folder)
            self._secrets = Folder(path / _SECRETS, write=write)
            self._source = source or FileKey(self._folder)
            self._identities = hostkey.parse(self._source.read())
            self._recipients = self._read_recipients()
            self._secrets.sweep()
            self._folder.sweep()
            self._index = self._read_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the vault. Idempotent."""
        for folder in (getattr(self, "_secrets", None), self._folder):
            if folder is not None:
                folder.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Keystore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recipients(self) -> tuple[str, ...]:
        """The public keys that every file is encrypted to: the host's first, then the recovery keys."""
        return self._recipients

    @property
    def names(self) -> Collection[str]:
        """The secrets there are, in no order."""
        return self._index.keys()

    def entries(self) -> tuple[Entry, ...]:
        """Return every secret by name."""
        return tuple(Entry(name, tuple(versions)) for name, versions in sorted(self._index.items()))

    def put(self, name: str, value: bytes, *, kind: str = "text", note: str = "") -> int:
        """Store a new version and return its number; it is on disk when this returns, or nothing has changed.

        Raises:
            VaultUsageError: a bad name, an empty value, one over MAX_VALUE_BYTES. VaultError: the disk.
        """
        check_name(name)
        if not value:
            raise VaultUsageError("the value is empty: `ringfence vault rm` takes a secret away")
        if len(value) > MAX_VALUE_BYTES:
            raise VaultUsageError(f"the value has {len(value)} bytes, the limit is {MAX_VALUE_BYTES}")
        versions = self._index.get(name, [])
        version = versions[-1] + 1 if versions else 1
        head = {"name": name, "v": version, "at": int(self._clock()), "kind": kind[:32], "note": note[:_MAX_NOTE]}
        sealed = sealing.seal(head, value, self._recipients)
        try:
            self._secrets.create(_file_of(name, version), sealed)
        except OSError as error:
            raise VaultError(f"{name} was not stored: {error.strerror}") from None
        self._index[name] = [*versions, version]
        self._forget_old(name)
        return version

    def get(self, name: str, version: int | None = None) -> Value:
        """Return one version of a secret, by default the newest.

        Raises:
            UnknownSecretError. CorruptError: the file is cut, changed, or another one's. UnsafeVaultError.
        """
        versions = self._index.get(name)
        if not versions or (version is not None and version not in versions):
            raise UnknownSecretError(f"no secret {name}" + (f" version {version}" if version is not None else ""))
        return self._open(name, version or versions[-1])

    def remove(self, name: str) -> None:
        """Take a secret away with all its versions, newest last, so that a crash never brings an old one back.

        Raises:
            UnknownSecretError.
        """
        versions = self._index.get(name)
        if not versions:
            raise UnknownSecretError(f"no secret {name}")
        for version in list(versions):
            with suppress(FileNotFoundError):
                self._secrets.remove(_file_of(name, version))
            versions.remove(version)
        del self._index[name]

    def rollback(self, name: str, version: int) -> int:
        """Make an older value the newest again, as a version of its own. Raises UnknownSecretError, CorruptError."""
        old = self.get(name, version)
        return self.put(name, old.value, kind=old.kind, note=f"rolled back to version {version}")

    def rotate_host_key(self) -> str:
        """Encrypt everything to a new host key, then forget the old one; returns the new public key.

        A crash at any point leaves a vault that opens; the next call goes through with it.

        Raises:
            VaultUsageError: the key comes from outside of the vault. CorruptError: nothing is forgotten then.
        """
        if not self._source.writable:
            raise VaultUsageError(
                "the host's key comes from outside of the vault: put the new identity before the old one there, "
                "restart the broker, and run `ringfence vault rotate --again`"
            )
        new = x25519.Identity.generate()
        self._save_identities((new, *self._identities))
        self._save_recipients((str(new.to_public()), *self._recipients[1:]))
        self.reencrypt()
        self._save_identities((new,))
        return self._recipients[0]

    def rehost(self) -> str:
        """Give a vault that was opened with the recovery key a new host key; returns its public half.

        The recovery key is not written anywhere. After a crash the recovery key still opens everything.

        Raises:
            CorruptError.
        """
        new = x25519.Identity.generate()
        self._folder.replace(hostkey.KEY_FILE, f"{new}\n".encode())
        self._identities = (new, *self._identities)
        self._save_recipients((str(new.to_public()), *self._recipients[1:]))
        self.reencrypt()
        return self._recipients[0]

    def reencrypt(self) -> int:
        """Write every file anew for today's recipients; returns how many. Raises CorruptError."""
        count = 0
        for name, versions in self._index.items():
            for version in versions:
                held = self._open(name, version)
                head = {"name": name, "v": version, "at": held.at_s, "kind": held.kind, "note": held.note}
                self._secrets.replace(_file_of(name, version), sealing.seal(head, held.value, self._recipients))
                count += 1
        self._folder.replace(seeds.FILE, seeds.seal(self.audit_seed(), self._recipients))
        sealkeys.rewrite(self._folder, self._identities, self._recipients)
        return count

    def adopt_host_key(self) -> int:
        """Write every file anew for the newest identity of a key that comes from elsewhere; returns how many.

        Raises:
            CorruptError.
        """
        self._save_recipients((str(self._identities[0].to_public()), *self._recipients[1:]))
        return self.reencrypt()

    def set_recovery(self, recipients: Sequence[str]) -> int:
        """Replace the recovery keys and write every file anew; returns how many. Raises VaultUsageError."""
        if not recipients:
            raise VaultUsageError(
                "a vault keeps at least one recovery key: without it a lost host key loses everything"
            )
        for text in recipients:
            sealing.recipient(text)
        self._save_recipients((self._recipients[0], *recipients))
        return self.reencrypt()

    def audit_seed(self) -> bytes:
        """Return the first key of this vault's audit chain. Raises CorruptError."""
        return seeds.read(self._folder, self._identities)

    def seal_keys(self) -> SealKeys:
        """Return the keys that open what clients seal for this node."""
        return SealKeys(self._folder, self._identities, self._recipients, self._clock)

    def verify(self) -> tuple[int, tuple[str, ...]]:
        """Open every file; returns how many are sound and the names of those that are not."""
        good, bad = 0, []
        for name, versions in sorted(self._index.items()):
            for version in versions:
                try:
                    self._open(name, version)
                    good += 1
                except VaultError:
                    bad.append(f"{name}@{version}")
        return good, tuple(bad)

    def _open(self, name: str, version: int) -> Value:
        where = f"{name}@{version}"
        try:
            sealed = self._secrets.read(_file_of(name, version), _MAX_FILE_BYTES)
        except FileNotFoundError:
            raise CorruptError(f"{where}: its file is gone; restore it from your backup") from None
        head, value = sealing.unseal(sealed, self._identities, where)
        if (head["name"], head["v"]) != (name, version):
            raise CorruptError(f"{where} holds another secret or version: somebody renamed files; restore the vault")
        return Value(name, version, int(str(head["at"])), str(head["kind"]), str(head["note"]), value)

    def _forget_old(self, name: str) -> None:
        versions = self._index[name]
        for version in versions[:-KEPT_VERSIONS]:
            with suppress(OSError):
                self._secrets.remove(_file_of(name, version))
                versions.remove(version)

    def _read_index(self) -> dict[str, list[int]]:
        index: dict[str, list[int]] = {}
        for file in self._secrets.names():
            match = _FILE.fullmatch(file)
            if match is None:
                raise UnsafeVaultError(f"{self._secrets.path / file} does not belong into a vault: move it away")
            index.setdefault(match[1], []).append(int(match[2]))
        for versions in index.values():
            versions.sort()
        return index

    def _read_recipients(self) -> tuple[str, ...]:
        try:
            text = self._folder.read(_RECIPIENTS, _MAX_RECIPIENTS_BYTES).decode("ascii", "replace")
        except FileNotFoundError:
            raise VaultError(f"{self._folder.path / _RECIPIENTS} is missing: restore it from your backup") from None
        found = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
        for line in found:
            sealing.recipient(line)
        # Whoever could write this file would read every secret that is put from now on.
        if not {str(identity.to_public()) for identity in self._identities}.intersection(found):
            raise HostKeyError(
                f"{self._folder.path / _RECIPIENTS} does not name the public half of this key: restore the pair"
            )
        return found

    def _save_identities(self, identities: tuple[x25519.Identity, ...]) -> None:
        self._folder.replace(hostkey.KEY_FILE, "".join(f"{identity}\n" for identity in identities).encode())
        self._identities = identities

    def _save_recipients(self, recipients: tuple[str, ...]) -> None:
        self._folder.replace(_RECIPIENTS, "".join(f"{text}\n" for text in recipients).encode())
        self._recipients = recipients


def _file_of(name: str, version: int) -> str:
    return f"{name}@{version:06}.age"


def _lock(folder: Folder) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_LOCK, flags, 0o600, dir_fd=folder.fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise VaultBusyError(f"{folder.path} is open in another process: the broker, or another command") from None
    return fd
