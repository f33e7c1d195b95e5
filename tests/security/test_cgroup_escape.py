"""Leaving, freezing or killing control groups, from a job (attack 49). v1 and v2, as this host has them.

Stopped by a view without cgroupfs, by a cgroup namespace, by read-only mounts and by Landlock.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from node_agent.containment import linux
from node_agent.containment.errors import GrantRefused
from node_agent.containment.mounts import table
from node_agent.containment.paths import Protected, open_grant
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig
from tests.security.fs_tries import Wall, answers, broken, outside, tried

V2 = next((Path(entry.point) for entry in table().values() if entry.kind == "cgroup2"), None)
V1 = next((Path(entry.point) for entry in table().values() if entry.kind == "cgroup"), None)
MODES: tuple[Literal["read", "write"], ...] = ("read", "write")

LOOK = r"""
for path in sys.argv[1:]:
    attempt("see:" + path, lambda: os.listdir(path))
own = open("/proc/self/cgroup").read().split()
print("own", "+".join(sorted({line.partition(":")[2].partition(":")[2] for line in own})))
mounts = open("/proc/self/mountinfo").read()
print("mounted", mounts.count(" - cgroup"))
print("namespace", os.stat("/proc/self/ns/cgroup").st_ino)
os.mkdir("/tmp/c")
for kind in (b"cgroup2", b"cgroup"):
    attempt("mount:" + kind.decode(), lambda: raw(165, 40, b"c", b"/tmp/c", kind, 0, b"pids"))
attempt("enter:pid1", lambda: raw(308, 268, os.open("/proc/1/ns/cgroup", os.O_RDONLY), 0x2000000))
attempt("unshare", lambda: raw(272, 97, 0x2000000))
attempt("into", lambda: raw(435, 435, struct.pack("Q" * 11, 0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))
attempt("proc:other", lambda: open("/proc/1/cgroup").read())
"""
PLACES = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys", "/cgroup", "/dev/cgroup")
LOOKED = {f"see:{path}": Wall.of("view", "ENOENT ENOTDIR") for path in PLACES} | {
    **dict.fromkeys(("mount:cgroup2", "mount:cgroup", "unshare", "into"), Wall.of("seccomp", "EPERM ENOSYS")),
    "enter:pid1": Wall.of("seccomp, non-dumpable mould", "EPERM EACCES ENOENT"),
    "proc:other": Wall.of("hidden pid 1", "EACCES EPERM ENOENT"),
}


def test_a_job_sees_no_control_group(node_name: str) -> None:
    """No cgroupfs is in the view or can be mounted; the job's own group looks like the root of all groups."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, LOOK, *PLACES)
        assert found.pop("own") == "/", "cgroup namespace"
        assert found.pop("mounted") == "0"
        assert int(found.pop("namespace")) != os.stat("/proc/self/ns/cgroup").st_ino
        assert broken(found, LOOKED) == []

    in_rig(node_name, scenario)


@pytest.mark.parametrize("mode", MODES)
def test_no_control_group_can_be_granted(mode: Literal["read", "write"]) -> None:
    """A path grant of a control group is refused, and a write grant of every folder above, whatever the policy says."""
    points = [Path(entry.point) for entry in table().values() if entry.kind in ("cgroup", "cgroup2")]
    assert points
    above = [*points[0].parents] if mode == "write" else [Path("/sys")]
    for path in (*points, *above):
        with pytest.raises(GrantRefused) as caught:
            open_grant(str(path), mode, protected=Protected.collect())
        assert caught.value.reason == "policy", path


ESCAPE = r"""
top = sys.argv[1]
def write(path, text): fd = os.open(path, os.O_WRONLY); os.write(fd, text); os.close(fd)
attempt("see", lambda: os.listdir(top))
attempt("leave", lambda: write(top + "/cgroup.procs", b"0"))
attempt("leave:append", lambda: os.open(top + "/cgroup.procs", os.O_RDWR | os.O_APPEND))
attempt("leave:threads", lambda: write(top + "/sibling/cgroup.threads", b"0"))
attempt("new", lambda: os.mkdir(top + "/new"))
attempt("freeze", lambda: write(top + "/sibling/cgroup.freeze", b"1"))
attempt("limit", lambda: write(top + "/sibling/cgroup.max.descendants", b"0"))
attempt("chmod", lambda: os.chmod(top + "/cgroup.procs", 0o666))
attempt("remove", lambda: os.rmdir(top + "/empty"))
attempt("kill", lambda: write(top + "/sibling/cgroup.kill", b"1"))
"""
ESCAPED = dict.fromkeys(
    ("leave", "leave:append", "leave:threads", "new", "freeze", "limit", "chmod", "remove", "kill"),
    Wall.of("read-only mount, Landlock", "EROFS EACCES"),
)


@contextmanager
def delegated(uid: int, root: Path | None = V2) -> Iterator[tuple[Path, Path]]:
    """A subtree that belongs to ``uid``, and a folder of the host where it is bind-mounted."""
    assert root is not None
    top = root / f"rf-delegated-{secrets.token_hex(4)}"
    point = Path(f"/var/tmp/rf-delegated-{secrets.token_hex(4)}")
    for folder in (top, top / "sibling", top / "empty"):
        folder.mkdir()
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, uid)
    point.mkdir()
    linux.mount(str(top), str(point), None, 0x1000)
    try:
        yield top, point
    finally:
        linux.umount(str(point), linux.DETACH)
        point.rmdir()
        for folder in (top / "new", top / "sibling", top / "empty", top):
            if folder.exists():
                if (folder / "cgroup.kill").exists():
                    (folder / "cgroup.kill").write_text("1")
                folder.rmdir()


USER = ["setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups", "--"]
TREE = Path(__file__).parents[2]


@pytest.mark.skipif(LEVEL == "B" or V2 is None, reason="needs root and cgroup v2 to delegate a subtree")
def test_attack_49_a_delegated_subtree_that_a_job_finds_can_not_be_written(node_name: str) -> None:
    """Though the subtree belongs to the job's uid and lies in a folder that it may read, the job stays where it is.

    The counter-check is the same grant with write access, made by hand past the node's own refusal: there the job moves
    itself, and freezes and kills a sibling.
    """

    async def scenario(rig: Rig) -> None:
        plan = rig.plan()
        with delegated(plan.uid) as (top, point):
            for mode in MODES:
                with ExitStack() as stack:
                    fd = stack.enter_context(granted(point, mode))
                    path = str(point)
                    mounts = [(Mount(path, mode, "dir"), fd)]
                    found = await tried(rig, ESCAPE, path, uid=plan.uid, gid=plan.gid, mounts=mounts)
                    assert found.pop("see") == "DONE"
                    if mode == "read":
                        assert broken(found, ESCAPED) == []
                        assert not (top / "new").exists()
                    else:
                        worked = {name for name, answer in found.items() if answer == "DONE"}
                        assert worked >= {"new", "freeze", "limit", "chmod", "remove", "kill"}, found

    in_rig(node_name, scenario)


@pytest.mark.skipif(LEVEL == "B" or V2 is None, reason="needs root and cgroup v2 to delegate a subtree")
def test_attack_49_without_a_view_a_delegated_subtree_is_open() -> None:
    """Counter-check: an ordinary user to whom the subtree belongs moves, freezes and kills in it."""
    with delegated(65_533) as (top, _):
        found = outside(ESCAPE, str(top), before=USER)
    assert {name for name in ("new", "freeze", "limit", "remove", "kill") if found[name] != "DONE"} == set()


@pytest.mark.skipif(LEVEL == "B" or V2 is None, reason="needs root and cgroup v2 to delegate a subtree")
def test_attack_49_at_level_b_a_delegated_subtree_can_not_be_written(node_name: str) -> None:
    """The same for an agent that is the ordinary user to whom the subtree belongs, and whose uid its jobs have."""
    if subprocess.run([*USER, sys.executable, "-c", "import pytest"], check=False, cwd=TREE).returncode:
        pytest.skip("an ordinary user can't run this checkout's environment")
    with delegated(65_533) as (top, point):
        for mode in MODES:
            words = [*USER, sys.executable, "-m", "tests.security.cgroup_at_b", node_name, str(point), mode]
            environment = {"PATH": os.defpath, "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(words, capture_output=True, check=False, timeout=50, cwd=TREE, env=environment)
            assert done.returncode == 0, done
            found = answers(done.stdout)
            assert found.pop("see") == "DONE"
            if mode == "read":
                assert broken(found, ESCAPED) == []
                assert not (top / "new").exists()
            else:
                assert {name for name in ("new", "freeze", "limit", "kill") if found[name] != "DONE"} == set()


ESCAPE_V1 = r"""
top = sys.argv[1]
def write(name, text): fd = os.open(top + "/" + name, os.O_WRONLY); os.write(fd, text); os.close(fd)
for name, text in (("tasks", b"0"), ("cgroup.procs", b"0"), ("notify_on_release", b"1"), ("sibling/tasks", b"0"),
                   ("sibling/cgroup.procs", b"0"), ("cgroup.clone_children", b"1")):
    attempt(name, lambda: write(name, text))
attempt("release_agent", lambda: os.open(top + "/release_agent", os.O_WRONLY))
attempt("new", lambda: os.mkdir(top + "/new"))
attempt("chmod", lambda: os.chmod(top + "/tasks", 0o666))
"""
WRITTEN_V1 = ("tasks", "cgroup.procs", "notify_on_release", "sibling/tasks", "sibling/cgroup.procs", "new", "chmod")


@pytest.mark.skipif(LEVEL == "B" or V1 is None, reason="needs root and a cgroup v1 hierarchy")
def test_attack_49_a_v1_group_that_a_job_finds_can_not_be_written(node_name: str) -> None:
    """Tasks, release notices and new groups of a v1 hierarchy are out of reach, though all of it is the job's uid's."""
    refused = dict.fromkeys(
        (*WRITTEN_V1, "cgroup.clone_children"), Wall.of("read-only mount, Landlock", "EROFS EACCES")
    )
    refused["release_agent"] = Wall.of("not in this group, read-only mount", "EROFS EACCES ENOENT")

    async def scenario(rig: Rig) -> None:
        assert V1 is not None
        plan = rig.plan()
        with delegated(plan.uid, V1) as (top, point):
            for mode in MODES:
                with ExitStack() as stack:
                    mounts = [(Mount(str(point), mode, "dir"), stack.enter_context(granted(point, mode)))]
                    found = await tried(rig, ESCAPE_V1, str(point), uid=plan.uid, gid=plan.gid, mounts=mounts)
                if mode == "read":
                    assert broken(found, refused) == []
                    assert not (top / "new").exists()
                else:
                    assert {name for name in ("notify_on_release", "new", "chmod") if found[name] != "DONE"} == set()
            (top / "notify_on_release").write_text("0")

    in_rig(node_name, scenario)
