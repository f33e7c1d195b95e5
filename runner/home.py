"""Where Ringfence keeps its files, and whether that place is safe.

Called by keys, client, command line and daemons. Must never take anything from the current folder, and as root never
use a home that another user could change (attacks 18, 55).

    HOME/keys/{fleet,client,node-NAME}.key   private keys, 0600      HOME/trust.toml    whose jobs and commands count
    HOME/keys/fleet.pub, node-NAME.card      public                  HOME/client.json   store, key and fleet of a client
    HOME/s/                                  sockets, 0700           HOME/nodes/NAME/   what one agent owns
    HOME/vault/                              secrets, 0700
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.errors import ConfigError, UnsafeFileError

__all__ = ["MAX_SOCKET_PATH_BYTES", "Home", "check_private_file", "check_root_only", "check_safe", "locate"]

#: A Unix socket's path holds 107 bytes; the rest is for names below the home.
MAX_SOCKET_PATH_BYTES: Final = 100
_ROOT_HOME: Final = "/var/lib/ringfence"
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ANY: Final = stat.S_IRWXG | stat.S_IRWXO
_FIX: Final = "use a place that only you can write (for the home: --home or RINGFENCE_HOME)"


@dataclass(frozen=True, slots=True)
class Home:
    """The files below one home."""

    path: Path

    @property
    def keys(self) -> Path:
        """The folder of private keys and cards."""
        return self.path / "keys"

    @property
    def fleet_pub(self) -> Path:
        """The fleet's public key."""
        return self.keys / "fleet.pub"

    @property
    def trust(self) -> Path:
        """Whose signatures this node takes."""
        return self.path / "trust.toml"

    @property
    def client(self) -> Path:
        """How a client reaches the fleet."""
        return self.path / "client.json"

    @property
    def vault(self) -> Path:
        """The secrets that are kept on this host."""
        return self.path / "vault"

    @property
    def sockets(self) -> Path:
        """Control sockets."""
        return self.path / "s"

    def key(self, name: str) -> Path:
        """The private key ``fleet``, ``client`` or ``node-NAME``."""
        return self.keys / f"{name}.key"

    def card(self, node: str) -> Path:
        """The signed card of a node."""
        return self.keys / f"node-{node}.card"

    def node(self, node: str) -> Path:
        """What one agent owns."""
        return self.path / "nodes" / node


def locate(chosen: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Home:
    """Return ``chosen`` (--home), else $RINGFENCE_HOME, else /var/lib/ringfence (root) or the XDG state folder.

    Nothing is created and nothing is read. Raises ConfigError where there is no home to be had.
    """
    env = os.environ if environ is None else environ
    if chosen is not None:
        return Home(Path(os.path.abspath(chosen)))
    named = env.get("RINGFENCE_HOME", "")
    if named:
        return Home(_absolute(named, "RINGFENCE_HOME"))
    if os.geteuid() == 0:
        return Home(Path(_ROOT_HOME))
    state = env.get("XDG_STATE_HOME", "")
    if state:
        return Home(_absolute(state, "XDG_STATE_HOME") / "ringfence")
    try:
        return Home(Path.home() / ".local" / "state" / "ringfence")
    except RuntimeError:
        raise ConfigError("this account has no home folder: name one with --home DIR or RINGFENCE_HOME") from None


def check_safe(home: Home, euid: int | None = None) -> None:
    """Make sure that nobody else can change what lies in an existing home.

    The folder itself must belong to this user (as root: to root) and not be writable by group or others; as root the
    same holds for each folder above it, where the sticky bit is enough.

    Raises:
        UnsafeFileError: names the folder and its fault.
    """
    uid = os.geteuid() if euid is None else euid
    real = Path(os.path.realpath(home.path))
    if not real.is_dir():
        raise ConfigError(f"{home.path} is no folder: run `ringfence keys init --home {home.path}`")
    _check_folder(real, uid, sticky_is_enough=False)
    if uid == 0:
        check_root_only(home.path)


def check_root_only(path: Path) -> None:
    """Make sure that only root can change an existing path or put another one in its place (attack 18).

    Above it the sticky bit is enough, because it keeps a folder of root in its place.

    Raises:
        UnsafeFileError: names the first folder or link with a fault.
    """
    real = Path(os.path.realpath(path))
    _check_folder(real, 0, sticky_is_enough=False)
    for folder in real.parents:
        _check_folder(folder, 0, sticky_is_enough=True)
    for link in (path, *path.parents):
        if link.is_symlink() and link.lstat().st_uid != 0:
            raise UnsafeFileError(f"{link} is a link that user {link.lstat().st_uid} can change: {_FIX}")


def check_private_file(path: Path, info: os.stat_result, *, secret: bool) -> None:
    """Make sure that an opened file is a plain file of ours (or root's) that others can't write; ``secret``: nor read.

    Raises:
        UnsafeFileError: names the file and the command that repairs it.
    """
    if not stat.S_ISREG(info.st_mode):
        raise UnsafeFileError(f"{path} is no plain file")
    owners = {os.geteuid()} if secret else {os.geteuid(), 0}
    if info.st_uid not in owners:
        raise UnsafeFileError(
            f"{path} belongs to user {info.st_uid}, not to you: make your own with `ringfence keys init`"
        )
    if info.st_mode & (_OTHERS_ANY if secret else _OTHERS_WRITE):
        fix = "chmod 600" if secret else "chmod go-w"
        raise UnsafeFileError(f"{path} is open to other users: run `{fix} {path}`")


def _check_folder(folder: Path, uid: int, *, sticky_is_enough: bool) -> None:
    info = folder.stat()
    if info.st_uid not in {uid, 0}:
        raise UnsafeFileError(f"{folder} belongs to user {info.st_uid}, who can change all below it: {_FIX}")
    if info.st_mode & _OTHERS_WRITE and not (sticky_is_enough and info.st_mode & stat.S_ISVTX):
        raise UnsafeFileError(f"{folder} can be written by other users: {_FIX}")


def _absolute(text: str, what: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ConfigError(f"{what} must be an absolute path, so that it does not depend on the current folder")
    return path
