"""The embedded store: private socket, private password, an uid of its own."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from runner.cli import store
from runner.errors import ConfigError
from tests.support.wait import wait_until


@pytest.fixture
def running(home: Path) -> object:
    """A prepared store in its own process."""
    prepared = store.prepare(home)
    words = [str(prepared.program), str(prepared.config)]
    with subprocess.Popen(words, user=prepared.uid, group=prepared.uid, extra_groups=[] if prepared.uid else None) as p:
        try:
            wait_until(prepared.answers, "the store to answer")
            yield prepared
        finally:
            p.terminate()


def test_only_the_socket_listens_and_the_password_is_hidden(running: store.Store) -> None:
    """No TCP port, no password on a command line or in a file that others can read."""
    server = Path(f"/proc/{_pid(running)}")
    assert running.password.encode() not in (server / "cmdline").read_bytes()
    assert stat.S_IMODE(running.config.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.socket.stat().st_mode) == 0o700
    inodes = {link for fd in (server / "fd").iterdir() if "socket:" in (link := _link(fd))}
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    listening = {
        f"socket:[{line.split()[9]}]"
        for table in tables
        for line in table.read_text().splitlines()[1:]
        if " 0A " in line
    }
    assert not inodes & listening


@pytest.mark.skipif(os.geteuid() != 0, reason="an uid of its own takes root")
def test_root_gives_the_store_a_uid_of_its_own(running: store.Store) -> None:
    """The store of a root `up` does not run as root."""
    status = Path(f"/proc/{_pid(running)}/status").read_text()
    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {str(running.uid)}
    assert running.uid != 0


def test_a_wrong_password_is_no_answer(running: store.Store) -> None:
    """Another store's password does not count as ready."""
    other = store.Store(running.program, running.config, running.socket, "0" * 64, None)
    assert not other.answers()


def test_the_password_outlives_a_restart(home: Path) -> None:
    """Clients of an earlier `up` on this home stay valid."""
    assert store.prepare(home).password == store.prepare(home).password


def test_long_socket_paths_are_refused_with_the_way_out(home: Path) -> None:
    """A home that no socket fits into is refused before anything starts."""
    with pytest.raises(ConfigError, match="shorter home"):
        store.prepare(home / ("x" * 100))


def _pid(prepared: store.Store) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(prepared.socket))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return ""  # closed since it was listed
