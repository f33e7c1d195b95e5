"""`ringfence egress`: the process that jobs with net grants reach the network through, in the foreground.

Port: broker.egress, node_agent.egress. Called by commands.py (the command) and up.py (its own one). Must never leave
two of them serving one home, and never start one with this process's environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from node_agent.egress import SOCKET_NAME
from runner.cli import launch
from runner.cli import store as stores
from runner.cli.children import Program
from runner.cli.options import HomeOption, RedisOption
from runner.cli.site import site_of
from runner.errors import ConfigError, UsageError
from runner.home import Home, check_safe
from runner.wire import codec
from runner.wire.errors import GrammarError, WireError
from runner.wire.grants import parse_bytes

__all__ = ["EGRESS_UID", "describe", "egress", "listening", "program"]

#: One of the uids that are reserved for Ringfence's own daemons.
EGRESS_UID: Final = stores.STORE_UID + 2
_BACKLOG: Final = 64
_STOP_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 2.0
_LOCK_WAIT_S: Final = 3.0
_POLL_S: Final = 0.05
_LAUNCHER: Final = launch.__file__

NameserverOption = Annotated[
    list[str] | None,
    typer.Option("--nameserver", metavar="ADDRESS:PORT", help="Ask this one instead of resolv.conf's."),
]

CaOption = Annotated[
    list[Path] | None,
    typer.Option("--ca", metavar="FILE", help="Trust these authorities, too, for the hosts of proxied secrets."),
]


RequestsOption = Annotated[
    int | None,
    typer.Option("--max-requests", min=1, metavar="N", help="Most requests of one job under way at once (48)."),
]

BodyOption = Annotated[
    str | None, typer.Option("--max-body", metavar="SIZE", help="Most that one request of a job may send (256M).")
]


def egress(
    context: typer.Context,
    nameserver: NameserverOption = None,
    ca: CaOption = None,
    max_requests: RequestsOption = None,
    max_body: BodyOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Run the egress process in the foreground: what `--net HOST:PORT` jobs reach the network through."""
    place = site_of(context, home, redis).home
    check_safe(place)
    with listening(place) as descriptors:
        ready = program(descriptors, tuple(nameserver or ()), bundles(ca), _caps(max_requests, max_body))
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        words = [str(os.getppid()), str(int(ready.death)), launch.NO_UID, *ready.words]
        os.execve(sys.executable, [sys.executable, "-I", "-S", _LAUNCHER, *words], {})  # noqa: S606 - no shell


@contextlib.contextmanager
def listening(home: Home) -> Iterator[tuple[int, int]]:
    """Hold the home's egress socket and its lock, both to be inherited by the process.

    Raises:
        ConfigError: another egress process serves this home, or the path is too long for a socket.
    """
    home.sockets.mkdir(mode=0o700, exist_ok=True)
    path = stores.check_socket_path(home.sockets / SOCKET_NAME)
    lock = os.open(home.path / "egress.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _lock(lock, home)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            yield listener.fileno(), lock
    finally:
        os.close(lock)


def _lock(lock: int, home: Home) -> None:
    """Take the lock; the process of an `up` that was killed a moment ago may hold it for a little longer."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"another egress process serves {home.path}: end it, or choose another --home")
        time.sleep(_POLL_S)


def _caps(requests: int | None, body: str | None) -> tuple[str, ...]:
    words = () if requests is None else ("--requests", str(requests))
    if body is None:
        return words
    try:
        return (*words, "--body-bytes", str(parse_bytes(body)))
    except GrammarError as error:
        raise UsageError(f"--max-body: {error}") from None


def program(
    descriptors: tuple[int, int],
    nameservers: tuple[str, ...] = (),
    authorities: tuple[Path, ...] = (),
    caps: tuple[str, ...] = (),
) -> Program:
    """Return how the process is run: nothing of ours but the socket and the lock, and as root under its own user.

    It takes that user itself, once its code is loaded: the code may lie where only root can enter.
    """
    words = [sys.executable, "-I", "-B", "-m", "broker.egress", str(descriptors[0])]
    uid = stores.daemon_uid(EGRESS_UID)
    if uid is not None:
        words += ["--uid", str(uid)]
    for name in nameservers:
        words += ["--nameserver", name]
    for path in authorities:
        words += ["--ca", str(path)]
    words += caps
    return Program("egress", tuple(words), signal.SIGTERM, _STOP_S, stage=0, inherit=descriptors, bare=True)


def bundles(named: list[Path] | None) -> tuple[Path, ...]:
    """Return the files of --ca. Raises UsageError: one holds no certificates."""
    for path in named or ():
        try:
            ssl.create_default_context(cafile=str(path))
        except OSError as error:
            raise UsageError(f"--ca {path}: no bundle of certificates in PEM: {error.strerror or error}") from None
    return tuple(path.resolve() for path in named or ())


def describe(home: Home) -> str:
    """Return what the home's egress process says of itself. Raises ConfigError for none, or one that is weak."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(_ANSWER_TIMEOUT_S)
        try:
            end.connect(str(home.sockets / SOCKET_NAME))
            server = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            end.send(codec.dump({"op": "hello"}))
            state = codec.load(end.recv(1 << 16))
        except (OSError, WireError):
            server, state = 0, None
    if not isinstance(state, dict) or server not in (0, os.geteuid()):
        raise ConfigError("none answers, so jobs can't be granted HOST:PORT; start it: `ringfence egress`")
    facts = f"user {state.get('uid')}, Landlock {state.get('landlock')}, seccomp"
    if state.get("weak"):
        raise ConfigError(
            f"weak: {state.get('weak')} ({facts}); a node that runs as root, on a kernel with Landlock, has a full wall"
        )
    return facts
