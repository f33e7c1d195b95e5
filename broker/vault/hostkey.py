"""Where the host's age identities come from: a file, a systemd credential, or a command.

Called by the keystore. Must never write an identity anywhere but into the vault's own 0600 file, and never put one into
an error, an environment or a command line.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from pyrage import IdentityError, x25519

from broker.vault.disk import Folder
from broker.vault.errors import HostKeyError

__all__ = ["CommandKey", "CredentialKey", "FileKey", "GivenKey", "KeySource", "outside", "parse", "source_of"]

KEY_FILE: Final = "key"
#: The name of the credential: `LoadCredentialEncrypted=age-key:…`.
CREDENTIAL: Final = "age-key"
COMMAND_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 16 * 1024
_HEAD: Final = "AGE-SECRET-KEY-"


class KeySource(Protocol):
    """A place that identities come from; ``writable`` says whether `rotate` can put a new one there itself."""

    @property
    def writable(self) -> bool:
        """Whether the vault itself may write the key."""
        ...

    def read(self) -> bytes:
        """Return the key's text: one identity a line, the newest first. Raises HostKeyError."""
        ...


@dataclass(frozen=True, slots=True)
class FileKey:
    """The vault's own file ``key``, 0600."""

    folder: Folder
    writable: bool = True

    def read(self) -> bytes:
        """Return the file's text. Raises HostKeyError, UnsafeVaultError."""
        try:
            return self.folder.read(KEY_FILE, _MAX_BYTES)
        except FileNotFoundError:
            raise HostKeyError(
                f"{self.folder.path / KEY_FILE} is missing: restore it, or open the vault with the recovery key "
                "(`ringfence vault restore --recovery FILE`)"
            ) from None


@dataclass(frozen=True, slots=True)
class CredentialKey:
    """What systemd has decrypted for this service (LoadCredentialEncrypted=). Source: systemd.exec(5)."""

    folder: Path
    writable: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> CredentialKey | None:
        """Return the credential of this service, if it was given one."""
        folder = environ.get("CREDENTIALS_DIRECTORY", "")
        return cls(Path(folder)) if folder.startswith("/") and (Path(folder) / CREDENTIAL).exists() else None

    def read(self) -> bytes:
        """Return the credential's text. Raises HostKeyError."""
        try:
            fd = os.open(self.folder / CREDENTIAL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                return file.read(_MAX_BYTES)
        except OSError as error:
            raise HostKeyError(f"the credential {CREDENTIAL} can't be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class CommandKey:
    """A command whose output is the key: a hardware token's or a secret manager's own tool. Run without a shell."""

    argv: Sequence[str]
    writable: bool = False

    def read(self) -> bytes:
        """Run the command. Raises HostKeyError: it failed, printed too much or took too long."""
        try:
            done = subprocess.run(
                list(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostKeyError(f"the key command {self.argv[0]} did not run: {type(error).__name__}") from None
        if done.returncode != 0 or len(done.stdout) > _MAX_BYTES:
            raise HostKeyError(
                f"the key command {self.argv[0]} ended with {done.returncode}; run it by hand to see why"
            )
        return done.stdout


@dataclass(frozen=True, slots=True)
class GivenKey:
    """A key that the caller holds already, such as the recovery key."""

    text: bytes = field(repr=False)
    writable: bool = False

    def read(self) -> bytes:
        """Return it."""
        return self.text


def outside(environ: Mapping[str, str]) -> KeySource | None:
    """Return where this process's key comes from if not from the vault itself: a systemd credential."""
    return CredentialKey.of(environ)


def source_of(folder: Folder, environ: Mapping[str, str]) -> KeySource:
    """Return where the key of an open vault comes from."""
    return outside(environ) or FileKey(folder)


def parse(text: bytes) -> tuple[x25519.Identity, ...]:
    """Return the identities of a key's text, in its order. Lines that start with # are comments.

    Raises:
        HostKeyError: a line is no identity, or there is none.
    """
    found = []
    for number, line in enumerate(text.decode("ascii", "replace").splitlines(), 1):
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        try:
            if not word.startswith(_HEAD):
                raise ValueError  # noqa: TRY301 - one message for both faults, without the line in it
            found.append(x25519.Identity.from_str(word))
        except (ValueError, IdentityError):
            raise HostKeyError(f"line {number} of the host's key is no age identity ({_HEAD}…)") from None
    if not found:
        raise HostKeyError("the host's key holds no age identity")
    return tuple(found)
