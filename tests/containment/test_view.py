"""What a job sees of the host and where it may write: the view and its grants."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from node_agent.containment.errors import SetupError
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig, python


@pytest.fixture
def project(home: Path) -> Path:
    """A small tree on the host that the job's user may write to."""
    top = home / "project"
    (top / ".git").mkdir(parents=True)
    (top / ".git" / "config").write_text("[core]\n")
    (top / "src").mkdir()
    (top / "src" / "a.py").write_text("a = 1\n")
    for path in (home, top, top / ".git", top / ".git/config", top / "src", top / "src/a.py"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return top


def mount(path: Path, mode: Literal["read", "write"], *protected: str) -> Mount:
    """The plan's line for a grant of ``path``."""
    return Mount(str(path), mode, "dir" if path.is_dir() else "file", protected)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test opened."""
    with ExitStack() as opened:
        yield opened


def test_the_view_holds_what_the_design_lists(node_name: str) -> None:
    """The root and /etc hold the listed names and nothing else; the folders of others are not there."""

    async def scenario(rig: Rig) -> None:
        code = "import os, json; print(json.dumps([os.listdir('/'), os.listdir('/etc'), os.listdir('/dev')]))"
        root, etc, dev = json.loads((await rig.run(["python3", "-c", code])).out)
        links = {"bin", "sbin", "lib", "lib32", "lib64", "libx32"}
        assert set(root) - links == {"usr", "etc", "dev", "proc", "run", "work", "tmp"} | (
            {Path(path).parts[1] for path in rig.plan().python_paths} - {"usr"}
        )
        listed = {"ssl", "ca-certificates", "ca-certificates.conf", "alternatives", "localtime", "mime.types"}
        made = {"passwd", "group", "hosts", "nsswitch.conf", "resolv.conf", "hostname"}
        assert made <= set(etc)
        assert [name for name in etc if name not in listed | made and not name.startswith("ld.so.")] == []
        assert set(dev) == {"null", "zero", "full", "random", "urandom", "shm", "fd", "stdin", "stdout", "stderr"}

    in_rig(node_name, scenario)


def test_the_job_is_called_job_everywhere(node_name: str) -> None:
    """User, group and host have neutral names."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "id -un; id -gn; hostname; getent hosts localhost | wc -l"])
        assert seen.out == b"job\njob\njob\n1\n"

    in_rig(node_name, scenario)


def test_only_the_own_places_are_writable(node_name: str) -> None:
    """/work, /tmp and /dev/shm take files; every other place refuses."""

    async def scenario(rig: Rig) -> None:
        code = """
import os
for folder in ("/work", "/tmp", "/dev/shm", "/", "/usr", "/etc", "/dev", "/run", "/proc", "/etc/ssl", "/usr/lib"):
    try: open(folder + "/new", "w"); print(folder)
    except OSError: pass
"""
        assert (await rig.run(python(code))).out.split() == [b"/work", b"/tmp", b"/dev/shm"]

    in_rig(node_name, scenario)


def test_the_workspace_is_new_each_time_and_bounded(node_name: str) -> None:
    """Files, System V memory and /dev/shm of one attempt are gone in the next; size and number of files have limits."""

    async def scenario(rig: Rig) -> None:
        made = await rig.run(["sh", "-c", "touch /work/a /tmp/a /dev/shm/a && ipcmk -M 4096 >/dev/null"])
        assert made.verdict.code == 0
        seen = await rig.run(["sh", "-c", "ls -d /work/a /tmp/a /dev/shm/a; ipcs -m | grep -c 0x"])
        assert seen.out == b"0\n"
        code = """
made = 0
try:
    while True: open(f"/work/{made}", "w").close(); made += 1
except OSError as error: print(error.errno, made < 200)
try: open("/tmp/big", "wb").write(bytes(3 << 20))
except OSError as error: print(error.errno)
"""
        seen = await rig.run(python(code), inodes=200, tmp_bytes=1 << 20)
        assert seen.out == b"28 True\n28\n"

    in_rig(node_name, scenario)


def test_a_read_grant_can_be_read_only(node_name: str, project: Path, stack: ExitStack) -> None:
    """The granted tree stands at its own path and takes no write; its neighbours are not there."""
    (project.parent / "secret").write_text("no")

    async def scenario(rig: Rig) -> None:
        fd = stack.enter_context(granted(project, "read"))
        script = f"cat {project}/src/a.py; touch {project}/x; rm {project}/src/a.py; cat {project.parent}/secret"
        seen = await rig.run(["sh", "-c", script], mounts=[(mount(project, "read"), fd)], allow_unix=False)
        assert seen.out == b"a = 1\n"
        assert seen.err.count(b"Read-only file system") == 2
        assert seen.err.count(b"No such file") == 1

    in_rig(node_name, scenario)
    assert not (project / "x").exists()


def test_a_write_grant_reaches_the_host(node_name: str, project: Path, stack: ExitStack) -> None:
    """Files that the job makes in a write grant are on the host; protected names are not its to change."""

    async def scenario(rig: Rig) -> None:
        fd = stack.enter_context(granted(project, "write"))
        tries = ["echo 1 >made", "echo '[alias]' >>.git/config", "mv .git/config .git/c", "mkdir .git/hooks"]
        script = f"cd {project}; {'; '.join(tries)}"
        grant = mount(project, "write", ".git/config", ".envrc")
        seen = await rig.run(["sh", "-c", script], mounts=[(grant, fd)], cwd=str(project), allow_unix=False)
        assert seen.err.count(b"Read-only file system") == 1, seen
        assert seen.err.count(b"busy") == 1, seen

    in_rig(node_name, scenario)
    assert (project / "made").read_text() == "1\n"
    assert (project / ".git/config").read_text() == "[core]\n"
    assert (project / ".git/hooks").is_dir()


def test_grants_may_lie_in_each_other(node_name: str, project: Path, stack: ExitStack) -> None:
    """A read grant of a tree and a write grant of a folder in it both hold, in whatever order they are named."""

    async def scenario(rig: Rig) -> None:
        inner = stack.enter_context(granted(project / "src", "write"))
        outer = stack.enter_context(granted(project, "read"))
        single = stack.enter_context(granted(project / ".git/config", "write"))
        mounts = [
            (mount(project / "src", "write"), inner),
            (mount(project, "read"), outer),
            (mount(project / ".git/config", "write"), single),
        ]
        script = f"cd {project}; echo 1 >src/made; echo x >.git/config; echo 1 >made"
        seen = await rig.run(["sh", "-c", script], mounts=mounts, allow_unix=False)
        assert seen.err.count(b"Read-only file system") == 1, seen

    in_rig(node_name, scenario)
    assert (project / "src/made").exists()
    assert (project / ".git/config").read_text() == "x\n"
    assert not (project / "made").exists()


@pytest.mark.parametrize("path", ["/", "/proc/self", "/dev", "/run/x", "/work/../etc"])
def test_reserved_places_take_no_grant(node_name: str, home: Path, stack: ExitStack, path: str) -> None:
    """A plan that attaches something over the view's own parts fails in the grant step."""

    async def scenario(rig: Rig) -> None:
        fd = stack.enter_context(granted(home, "read"))
        with pytest.raises(SetupError) as caught:
            await rig.run(["true"], mounts=[(Mount(path, "read", "dir"), fd)])
        assert caught.value.step == "grant"

    in_rig(node_name, scenario)


def test_a_link_inside_a_granted_tree_leads_nowhere(node_name: str, project: Path, stack: ExitStack) -> None:
    """If a job put a link where an inner grant or a protected name must stand, the attempt is refused, not misled."""
    outside = project.parent / "outside"
    outside.mkdir(mode=0o777)
    (project / "inner").symlink_to(outside)
    (project / ".envrc").symlink_to(outside)

    async def scenario(rig: Rig) -> None:
        outer = stack.enter_context(granted(project, "write"))
        inner = stack.enter_context(granted(outside, "read"))
        for mounts in (
            [(mount(project, "write"), outer), (Mount(f"{project}/inner", "read", "dir"), inner)],
            [(mount(project, "write", ".envrc"), outer)],
        ):
            with pytest.raises(SetupError) as caught:
                await rig.run(["true"], mounts=mounts)
            assert caught.value.step == "grant"
            # A detached mount is used up by the first attempt that got it.
            outer = stack.enter_context(granted(project, "write"))

    in_rig(node_name, scenario)
    assert list(outside.iterdir()) == []


@pytest.mark.skipif(LEVEL == "A", reason="level A hands over the mount itself, there is nothing to open again")
def test_a_path_swapped_after_the_check_is_refused(node_name: str, project: Path, stack: ExitStack) -> None:
    """Level B opens the granted path again: if it is another folder by then, the attempt is refused."""

    async def scenario(rig: Rig) -> None:
        fd = stack.enter_context(granted(project, "read"))
        os.rename(project, project.parent / "old")
        project.mkdir()
        with pytest.raises(SetupError, match="replaced"):
            await rig.run(["true"], mounts=[(mount(project, "read"), fd)])
        project.rmdir()
        project.symlink_to(project.parent / "old")
        with pytest.raises(SetupError):
            await rig.run(["true"], mounts=[(Mount(str(project), "read", "dir"), fd)])

    in_rig(node_name, scenario)
