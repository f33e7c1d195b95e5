"""Where the files lie, and that nobody else can change them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import home as homes
from runner import keyring
from runner.client import connect, shown_url
from runner.errors import ConfigError, StoreError, UnsafeFileError
from runner.home import Home
from runner.place import Place
from tests.client.paper import Fleet
from tests.support import scratch

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users' folders can only be made by root")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short empty folder."""
    with scratch.folder() as found:
        yield found


def test_the_order_of_choices(folder: Path) -> None:
    """--home beats RINGFENCE_HOME beats the account's own; relative variables are refused."""
    environ = {"RINGFENCE_HOME": "/x/env", "XDG_STATE_HOME": "/x/state"}
    assert homes.locate(folder, environ).path == folder
    assert homes.locate(None, environ).path == Path("/x/env")
    own = Path("/var/lib/ringfence") if os.geteuid() == 0 else Path("/x/state/ringfence")
    assert homes.locate(None, {"XDG_STATE_HOME": "/x/state"}).path == own
    with pytest.raises(ConfigError, match="absolute"):
        homes.locate(None, {"RINGFENCE_HOME": "here"})


def test_attack_55_nothing_is_read_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client.json, a .env and keys in the folder where a program runs change nothing."""
    trap = Home(folder / "trap")
    keyring.init(trap, "unix:///trap")
    (trap.path / ".env").write_text("RINGFENCE_HOME=/x\nRINGFENCE_REDIS=unix:///trap\n")
    monkeypatch.chdir(trap.path)
    monkeypatch.setenv("RINGFENCE_HOME", str(folder / "none"))
    with pytest.raises(ConfigError, match=r"none/client\.json"):
        connect(Place())


@AS_ROOT
def test_attack_18_root_refuses_a_home_below_another_user_s_folder(folder: Path) -> None:
    """A home that another user could change, or replace by renaming a folder above it, is refused."""
    folder.chmod(0o755)
    home = Home(folder / "home")
    keyring.init(home)
    homes.check_safe(home)
    os.chown(folder, 12345, 12345)
    with pytest.raises(UnsafeFileError, match="12345"):
        homes.check_safe(home)
    with pytest.raises(UnsafeFileError):
        connect(Place(home=str(home.path)))
    os.chown(folder, 0, 0)
    folder.chmod(0o777)
    with pytest.raises(UnsafeFileError, match="written by other users"):
        homes.check_safe(home)
    folder.chmod(0o1777)
    homes.check_safe(home)
    os.chown(home.path, 12345, 12345)
    with pytest.raises(UnsafeFileError):
        homes.check_safe(home)


@AS_ROOT
def test_attack_18_root_follows_no_foreign_link(folder: Path) -> None:
    """A link above the home that another user can point elsewhere is refused."""
    folder.chmod(0o1777)
    keyring.init(Home(folder / "real"))
    link = folder / "link"
    link.symlink_to(folder / "real")
    homes.check_safe(Home(link))
    os.lchown(link, 12345, 12345)
    with pytest.raises(UnsafeFileError, match="is a link"):
        homes.check_safe(Home(link))


def test_a_home_that_others_write_is_refused(folder: Path) -> None:
    """Also without root, the home itself is its owner's alone."""
    home = Home(folder / "home")
    keyring.init(home)
    home.path.chmod(0o777)
    with pytest.raises(UnsafeFileError):
        homes.check_safe(home)


@AS_ROOT
def test_attack_55_a_socket_served_by_another_user_is_not_trusted(fleet: Fleet, folder: Path) -> None:
    """A server of another user at the store's path gets neither a job nor a password."""
    folder.chmod(0o1777)
    path = folder / "forged"
    server = (
        "import os, socket, sys\n"
        "os.setgid(12345); os.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print('ready', flush=True)\n"
        "s.settimeout(20)\n"
        "try:\n    while True:\n        c, _ = s.accept(); c.settimeout(2); sys.stdout.write(repr(c.recv(100)))\n"
        "except OSError: pass\n"
    )
    command = [sys.executable, "-I", "-S", "-c", server, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/") as forged:
        assert forged.stdout is not None
        assert forged.stdout.readline() == b"ready\n"
        client = connect(Place(home=str(fleet.home.path), redis_url=f"unix://{path}"))
        with pytest.raises(StoreError, match="not trusted"):
            client.now_ms()
        client.close()
        forged.terminate()
        assert forged.stdout.read() in {b"", b"b''"}


def test_urls_are_shown_without_secrets() -> None:
    """No message holds the store's user or password."""
    assert shown_url("redis://user:pw@host:1/0") == "redis://host:1/0"
    assert shown_url("unix:///a/b?password=pw&db=1") == "unix:///a/b?db=1"
    assert shown_url("unix://u:p@/a/b") == "unix:///a/b"
    assert shown_url("unix:///a?db=0&username=u&password=p") == "unix:///a?db=0"


def test_a_store_that_is_away_is_an_error_with_its_name(fleet: Fleet) -> None:
    """The message says which store, without its password."""
    client = connect(Place(home=str(fleet.home.path), redis_url="unix:///nowhere/s?password=hunter2"))
    with pytest.raises(StoreError, match="/nowhere/s failed") as caught:
        client.now_ms()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="no store URL"):
        connect(Place(home=str(fleet.home.path), redis_url="http://x"))
