"""Path grants: what is opened, what is refused, and what a protected path keeps away."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from node_agent.containment import paths, plants
from node_agent.containment.errors import GrantRefused
from node_agent.containment.paths import Protected, open_grant
from tests.host.support import ROOT, STRANGER, apart, needs_root

NOTHING = Protected.collect()


def refused(path: Path | str, mode: paths.Mode, protected: Protected = NOTHING) -> GrantRefused:
    """Open a grant that must be refused, and return why."""
    with pytest.raises(GrantRefused) as found:
        open_grant(str(path), mode, protected=protected).close()
    return found.value


def granted(path: Path, mode: paths.Mode, protected: Protected = NOTHING) -> bool:
    """Whether the grant is opened."""
    opened = open_grant(str(path), mode, protected=protected)
    opened.close()
    opened.close()
    return True


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder whose own path has no link in it."""
    return tmp_path.resolve()


@pytest.fixture
def home(real: Path) -> Path:
    """A home below a project that a job might be granted."""
    path = real / "project" / ".state" / "ringfence"
    (path / "keys").mkdir(parents=True)
    (path / "trust.toml").write_text("")
    return path


def test_opened_grant_tells_what_it_is(real: Path) -> None:
    """A folder and a regular file are opened, with their owner and kind."""
    (real / "data").mkdir()
    (real / "data" / "file").touch()
    for path, kind in ((real / "data", "dir"), (real / "data" / "file", "file")):
        opened = open_grant(str(path), "read", protected=NOTHING)
        try:
            info = path.stat()
            assert (opened.kind, opened.real_path) == (kind, str(path))
            assert (opened.owner_uid, opened.device, opened.inode) == (info.st_uid, info.st_dev, info.st_ino)
        finally:
            opened.close()


@pytest.mark.parametrize("path", ["data", "/data/../etc", "/data/", "//data", "/./data", "/a\0b", ""])
def test_odd_spellings_are_refused(path: str) -> None:
    """A grant's path is absolute and normal; the message says what was meant."""
    assert refused(path, "read").reason == "policy"


def test_attack_48_symlink_is_refused_with_its_target(real: Path) -> None:
    """A link anywhere in the path is refused and the message names the real path, which is granted."""
    (real / "data" / "deep").mkdir(parents=True)
    (real / "link").symlink_to("data")
    error = refused(real / "link" / "deep", "write")
    assert error.reason == "policy"
    assert str(real / "data" / "deep") in str(error)
    (real / "end").symlink_to(real / "data")
    assert str(real / "data") in str(refused(real / "end", "read"))
    assert granted(real / "data" / "deep", "write")


def test_magic_links_are_refused(real: Path) -> None:
    """A path through a process's own links is refused."""
    fd = os.open(real, os.O_RDONLY)
    try:
        assert refused(f"/proc/self/fd/{fd}", "read").reason == "policy"
        assert refused(f"/proc/{os.getpid()}/root/usr", "read").reason == "policy"
    finally:
        os.close(fd)


def test_only_folders_and_regular_files(real: Path) -> None:
    """A FIFO, a socket and a device are refused, and opening them waits for nobody."""
    os.mkfifo(real / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(real, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
    for path in (real / "fifo", real / "socket", Path("/dev/null")):
        assert refused(path, "read").reason == "policy"


@pytest.mark.parametrize("path", ["/proc", "/proc/sys", "/sys"])
def test_windows_into_the_kernel_are_refused(path: str) -> None:
    """Kernel file systems are never granted, not even for reading."""
    assert refused(path, "read").reason == "policy"


def test_missing_path_is_unenforceable(real: Path) -> None:
    """What does not exist on this node can't be granted."""
    error = refused(real / "missing", "read")
    assert error.reason == "unenforceable"
    assert "No such file" in str(error)


def test_attack_01_ancestors_of_a_home_are_refused(home: Path) -> None:
    """A grant that equals, contains or lies in a home is refused for both modes; its neighbour is granted."""
    protected = Protected.collect(private=[home])
    project = home.parents[1]
    (project / "src").mkdir()
    for path in (home, home.parent, project, project.parent, home / "keys", home / "trust.toml", Path("/")):
        for mode in ("read", "write"):
            error = refused(path, mode, protected)
            assert error.reason == "policy"
    assert granted(project / "src", "write", protected)


def test_attack_01_paths_not_made_yet_guard_their_folder(real: Path) -> None:
    """A policy file that does not exist yet keeps jobs from the folder in which it would be looked for."""
    (real / "etc" / "other").mkdir(parents=True)
    protected = Protected.collect(extra=[real / "etc" / "policy.toml"])
    assert refused(real / "etc", "write", protected).reason == "policy"
    assert granted(real / "etc" / "other", "write", protected)


def test_attack_01_links_to_a_home_guard_both_ends(real: Path) -> None:
    """Where the home's path goes through a link, neither the link's folder nor the target's can be written."""
    (real / "disk" / "rf").mkdir(parents=True)
    (real / "user").mkdir()
    (real / "user" / "state").symlink_to(real / "disk")
    protected = Protected.collect(private=[real / "user" / "state" / "rf"])
    for path in (real / "user", real / "disk", real / "disk" / "rf"):
        assert refused(path, "write", protected).reason == "policy"


def test_attack_01_renamed_home_is_still_known(home: Path) -> None:
    """A home that was moved after the agent's start is refused under its new name."""
    protected = Protected.collect(private=[home])
    moved = home.parents[2] / "moved"
    home.parent.rename(moved)
    for path in (moved / "ringfence", moved / "ringfence" / "keys", moved):
        assert refused(path, "write", protected).reason == "policy"


def test_attack_01_own_python_and_code_are_kept() -> None:
    """This agent's environment, interpreter and package can't be granted for writing; reading them is fine."""
    for path in (sys.prefix, sys.base_prefix, str(ROOT / "node_agent"), str(ROOT), "/"):
        assert refused(os.path.realpath(path), "write").reason == "policy"
    assert granted(Path(os.path.realpath(sys.prefix)), "read")


def test_kept_paths_may_be_read(real: Path) -> None:
    """A task path is closed for writing alone."""
    (real / "tasks" / "sub").mkdir(parents=True)
    protected = Protected.collect(extra=[real / "tasks"])
    assert granted(real / "tasks" / "sub", "read", protected)
    assert refused(real / "tasks" / "sub", "write", protected).reason == "policy"


def test_protected_names_are_found_without_following(real: Path) -> None:
    """Of the names that the operator's tools run, those that exist are told; a link is never one of them."""
    repo = real / "repo"
    (repo / ".git" / "hooks").mkdir(parents=True)
    (repo / ".git" / "config").touch()
    (repo / ".idea").symlink_to("/etc")
    (repo / ".vscode").symlink_to(".git/hooks")
    (repo / ".envrc").touch()
    (real / "tree").mkdir()
    (real / "tree" / ".git").write_text("gitdir: /elsewhere\n")
    for folder, expected in ((repo, {".git/config", ".git/hooks", ".envrc"}), (real / "tree", {".git"})):
        opened = open_grant(str(folder), "write", protected=NOTHING)
        try:
            assert set(plants.find(opened.fd).kept) == expected
        finally:
            opened.close()


# In a mount namespace of its own: binds a home, and a folder in it, elsewhere, and asks for them there.
BINDS = """
import os
from pathlib import Path
from types import SimpleNamespace
from node_agent.containment import linux
from node_agent.containment.errors import GrantRefused
from node_agent.containment.paths import Protected, open_grant
top = Path(sys.argv[1])
linux.unshare(linux.NEWNS)
linux.mount(None, "/", None, 0x4000 | 0x40000)
home = top / "srv" / "home"
(home / "keys").mkdir(parents=True)
(home / "keys" / "node.key").touch()
for name in ("all", "keys", "clear"):
    (top / name).mkdir()
(top / "key").touch()
key = home / "keys" / "node.key"
for source, target in ((top / "srv", "all"), (home / "keys", "keys"), (key, "key")):
    linux.mount(str(source), str(top / target), None, 0x1000)
protected = Protected.collect(private=[home])
for path in ("all", "all/home", "all/home/keys", "keys", "key", "clear"):
    try:
        open_grant(str(top / path), "write", protected=protected).close()
        print(path, "granted")
    except GrantRefused as error:
        print(path, error.reason)
"""


@needs_root
def test_attack_01_bind_mounts_do_not_help(real: Path) -> None:
    """A bind mount of a home's parent, of a folder in it or of a key is refused like the place it shows."""
    lines = dict(line.split() for line in apart(BINDS, str(real)).splitlines())
    assert lines.pop("clear") == "granted"
    assert set(lines.values()) == {"policy"}
    assert len(lines) == 5


@needs_root
def test_ordinary_user_opens_what_they_may(real: Path) -> None:
    """At level B the agent's own rights decide: what it can't reach is unenforceable."""
    code = (
        "from node_agent.containment.errors import GrantRefused\n"
        "from node_agent.containment.paths import Protected, open_grant\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        open_grant(path, 'read', protected=Protected.collect()).close(); print('granted')\n"
        "    except GrantRefused as error:\n"
        "        print(error.reason)\n"
    )
    (real / "closed" / "inner").mkdir(parents=True)
    (real / "closed").chmod(0o700)
    assert apart(code, "/usr/bin", str(real / "closed" / "inner"), user=STRANGER).split() == [
        "granted",
        "unenforceable",
    ]


def test_attack_01_unit_files_of_the_agents_user_are_kept(monkeypatch: pytest.MonkeyPatch, real: Path) -> None:
    """A job can write no unit that systemd would start as the agent's user, nor a folder around it."""
    account = SimpleNamespace(pw_dir=str(real))
    monkeypatch.setattr("pwd.getpwuid", lambda uid: account)
    units = real / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    protected = Protected.collect()
    for path in (units, units.parent, real / ".config", real):
        with pytest.raises(GrantRefused, match="no job may write"):
            open_grant(str(path), "write", protected=protected)
    open_grant(str(units), "read", protected=protected).close()
