"""What a killed agent left is found, ended and removed, whatever a hostile job did to it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node_agent.containment.sweep import Journal, remove_tree, sweep_folders
from tests.host.support import STRANGER, apart, needs_root, sleeper

REMOVE = """
import os
from node_agent.containment.sweep import remove_tree
remove_tree("tree", dir_fd=os.open(sys.argv[1], 0))
"""


def remove(parent: Path, name: str = "tree") -> None:
    """Remove one entry of a folder."""
    fd = os.open(parent, os.O_RDONLY)
    try:
        remove_tree(name, dir_fd=fd)
    finally:
        os.close(fd)


def test_recorded_mould_is_killed_and_struck(tmp_path: Path) -> None:
    """A mould in the journal that still lives is killed, waited for, and no longer in it."""
    with sleeper() as process:
        Journal(tmp_path / "moulds").add(process.pid)
        again = Journal(tmp_path / "moulds")
        assert again.wait_gone() == [f"mould {process.pid}: killed"]
        assert process.wait() == -9
        assert again.wait_gone() == []


def test_reused_pid_is_never_touched(tmp_path: Path) -> None:
    """A process that has the pid of a dead mould, but another start time or boot, lives on."""
    journal = Journal(tmp_path / "moulds")
    with sleeper() as process:
        journal.add(process.pid)
        (entry,) = (tmp_path / "moulds").iterdir()
        boot, pid, started = entry.name.split(".")
        for name in (f"{boot}.{pid}.{int(started) - 1}", f"000000000000.{pid}.{started}", f"{boot}.x.{started}", "odd"):
            entry = entry.rename(entry.with_name(name))
            assert journal.wait_gone() == []
            assert process.poll() is None
            entry.touch()


def test_removed_moulds_are_forgotten(tmp_path: Path) -> None:
    """A mould that was struck is not killed by a later sweep; a gone one is never recorded."""
    journal = Journal(tmp_path / "moulds")
    with sleeper() as process:
        journal.add(process.pid)
        journal.remove(process.pid)
        journal.remove(process.pid)
        assert journal.wait_gone() == []
        assert process.poll() is None
    journal.add(process.pid)
    assert list((tmp_path / "moulds").iterdir()) == []


def test_links_are_removed_not_followed(tmp_path: Path) -> None:
    """A link in a tree, or in its place, is removed; what it points at stays."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "folder").symlink_to(kept)
    (tree / "file").symlink_to(kept / "file")
    remove(tmp_path)
    assert not tree.exists()
    tree.symlink_to(kept)
    remove(tmp_path)
    remove(tmp_path)
    assert (kept / "file").exists()
    assert not tree.is_symlink()


@needs_root
def test_closed_folders_are_removed_by_their_owner(home: Path) -> None:
    """Folders of mode 000 are no obstacle for an ordinary user."""
    mine = home / "mine"
    deepest = mine / "tree" / "a" / "b"
    deepest.mkdir(parents=True)
    (deepest / "file").touch()
    subprocess.run(["chown", "-R", f"{STRANGER}:{STRANGER}", mine], check=True)
    for path in (deepest, *deepest.parents[:2]):
        path.chmod(0)
    apart(REMOVE, str(mine), user=STRANGER)
    assert os.listdir(mine) == []


def test_depth_beyond_any_path_is_removed(tmp_path: Path) -> None:
    """A nest far deeper than a path may be long costs neither descriptors nor stack."""
    (tmp_path / "tree").mkdir()
    fd = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    remove(tmp_path)
    assert not (tmp_path / "tree").exists()


names = st.text(alphabet="ab.\n é-", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
trees = st.recursive(
    st.sampled_from(["file", "link", "fifo"]), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@given(tree=trees)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_is_removed(tmp_path: Path, tree: object) -> None:
    """Whatever a job builds of folders, files, links and FIFOs under any name is gone afterwards."""
    build(tmp_path / "tree", tree)
    remove(tmp_path)
    assert os.listdir(tmp_path) == []


def build(path: Path, what: object) -> None:
    """Make a tree: a dictionary is a folder, a word another kind of entry."""
    if isinstance(what, dict):
        path.mkdir()
        for name, inner in what.items():
            build(path / name, inner)
    elif what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.touch(mode=0o000)


def test_folders_of_attempts_are_swept(tmp_path: Path) -> None:
    """What attempts left below the node's home is removed and told; everything else of the home stays."""
    (tmp_path / "work" / "main-1.1" / "deep").mkdir(parents=True)
    (tmp_path / "keys").mkdir()
    assert sweep_folders(tmp_path) == ["folder work/main-1.1"]
    assert sweep_folders(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["keys", "work"]


MOUNTED = """
import os
from pathlib import Path
from node_agent.containment import linux
from node_agent.containment.sweep import remove_tree, sweep_folders
home = Path(sys.argv[1])
linux.unshare(linux.NEWNS)
linux.mount(None, "/", None, 0x4000 | 0x40000)
inner = home / "work" / "main-1.1" / "mnt"
inner.mkdir(parents=True)
for _ in range(2):
    linux.mount("tmpfs", str(inner), "tmpfs", 0)
(inner / "deeper").mkdir()
linux.mount("tmpfs", str(inner / "deeper"), "tmpfs", 0)
try:
    remove_tree("main-1.1", dir_fd=os.open(home / "work", os.O_RDONLY))
except OSError as error:
    print(error.errno)
print(len(sweep_folders(home)), os.listdir(home / "work"))
"""


@needs_root
def test_mounts_are_detached_not_emptied(tmp_path: Path) -> None:
    """A mount in a tree stops its removal; the sweep detaches it first, the innermost first."""
    assert apart(MOUNTED, str(tmp_path.resolve())).splitlines() == ["18", "4 []"]


@pytest.mark.parametrize("name", ["work", "moulds"])
def test_sweep_of_nothing_is_quiet(tmp_path: Path, name: str) -> None:
    """An agent's first start finds nothing to do."""
    assert sweep_folders(tmp_path / name) == []
    assert Journal(tmp_path / name).wait_gone() == []
