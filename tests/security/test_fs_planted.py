"""Code that a job plants below a write grant for the operator's own tools to run later (attack 8).

Two walls: what exists is read-only in the job's view, and what was added, changed or moved is told by an event.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from node_agent.containment import opener, plants
from node_agent.containment.errors import GrantRefused, SetupError
from node_agent.containment.idmap import Idmaps
from node_agent.containment.paths import Protected, open_grant
from node_agent.containment.uids import JobUids
from node_agent.stage import Stage, Staged, StageError, _below_writable
from runner.grants import Grants as Asked
from runner.wire.event import EventType
from runner.wire.grants import Grants, PathGrant
from runner.wire.states import RefuseReason
from tests.agent.build import job
from tests.containment.rig import LEVEL, Outcome, Rig, in_rig
from tests.support.rig import rigged
from tests.support.wait import wait_until

OWNER = 65_533


@pytest.fixture
def repo(home: Path) -> Path:
    """A work tree with a repository, one in a folder of it, and editor settings; all of them an ordinary user's."""
    top = home / "work"
    for folder in (top, top / "deep" / "inner"):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (top / ".envrc").write_text("export A=1\n")
    (top / ".vscode").mkdir()
    (top / ".vscode" / "tasks.json").write_text("{}\n")
    if LEVEL == "A":
        for path in (top, *top.rglob("*")):
            os.lchown(path, OWNER, OWNER)
    return top


class Node:
    """Jobs with grants, staged as the agent stages them."""

    def __init__(self, rig: Rig, stage: Stage) -> None:
        self.rig = rig
        self.stage = stage

    async def staged(self, *grants: PathGrant) -> Staged:
        """Open the grants of one job."""
        return await self.stage.open(job(grants=Grants(paths=grants)))

    async def run(self, staged: Staged, script: str) -> Outcome:
        """Run a shell script as a job with what was staged, in the folder of its first grant."""
        seen = await self.rig.run(
            ["sh", "-c", script],
            mounts=list(zip(staged.mounts, staged.fds, strict=True)),
            uid=staged.uid,
            gid=staged.gid,
            cwd=staged.mounts[0].path,
            allow_unix=False,
        )
        staged.sent()
        return seen

    async def changes(self, script: str, *grants: PathGrant) -> tuple[list[str], str]:
        """Run a job from stage to end; return what is told of it, below its first grant, and its last error lines."""
        staged = await self.staged(*grants)
        try:
            seen = await self.run(staged, script)
            found = await self.stage.planted(staged)
        finally:
            staged.close()
        top = f"{grants[0].path}/"
        return [path.removeprefix(top) for path in found], seen.err.decode()


@asynccontextmanager
async def node_of(rig: Rig, *, landlocked: bool | None = None) -> AsyncIterator[Node]:
    """A stage as a session makes it."""
    uids, idmaps = None, None
    if LEVEL == "A":
        uids, idmaps = JobUids(), Idmaps(lambda ids: rig.zygote.userns(*ids))
    stage = Stage(Protected.collect(), uids, idmaps, landlocked=landlocked)
    try:
        yield Node(rig, stage)
    finally:
        await stage.close()
        for part in (idmaps, uids):
            if part is not None:
                part.close()


def on_node(name: str, scenario: Callable[[Node], Awaitable[None]]) -> None:
    """Run a scenario with a node of its own."""

    async def with_node(rig: Rig) -> None:
        async with node_of(rig) as node:
            await scenario(node)

    in_rig(name, with_node)


def write(path: Path, *, everything: bool = False) -> PathGrant:
    """A write grant."""
    return PathGrant(str(path), "write", all=everything)


#: Each tries to have the operator's git, shell or editor run something.
TRIES = (
    "git config core.fsmonitor 'touch /pwned'",
    "echo '[core] fsmonitor = evil' >>.git/config",
    "echo evil >.git/hooks/pre-commit",
    "cp /bin/true .git/hooks/post-checkout",
    "rm .git/config",
    "mv .git/config .git/moved",
    "rm -r .git/hooks",
    "mv .git/hooks .git/moved",
    "ln -sf /tmp/evil .git/config",
    "echo evil >>.envrc",
    "rm .envrc",
    "echo evil >.vscode/tasks.json",
    "touch .vscode/settings.json",
    "cd deep/inner && git config core.fsmonitor evil",
    "echo evil >deep/inner/.git/hooks/pre-commit",
    "cp --reflink=never .envrc .git/config",
    "chmod 777 .git/config",
    "git config --worktree core.hooksPath evil",
)


def test_attack_08_what_exists_stays_as_it_is(node_name: str, repo: Path) -> None:
    """Configurations, hooks, .envrc and editor settings, nested ones too, refuse every change; git still works."""

    async def scenario(node: Node) -> None:
        script = "; ".join(f"({each}) 2>/dev/null && echo 'DONE: {each.replace(chr(39), '')}'" for each in TRIES)
        staged = await node.staged(write(repo))
        try:
            seen = await node.run(staged, script)
            assert seen.out == b"", "read-only mounts below the grant"
            assert await node.stage.planted(staged) == []
        finally:
            staged.close()
        usual = "set -e; echo 1 >a; git add a; git -c user.name=n -c user.email=e commit -qm m; git checkout -qb b"
        assert await node.changes(f"{usual}; git status -s; tar cf /tmp/x.tar .", write(repo)) == ([], "")

    on_node(node_name, scenario)
    # Without the wall each of them works: the grant says `:all`.
    copy = repo.parent / "copy"
    shutil.copytree(repo, copy, symlinks=True)
    done = subprocess.run(["sh", "-c", TRIES[0]], cwd=copy, capture_output=True, check=False)
    assert done.returncode == 0, done


MOVES = {
    "new repository": ("git init -q new", "new/.git/config"),
    "new repository two levels down": ("mkdir -p a/b && git init -q a/b", "a/b/.git/config"),
    "bare repository": ("git init -q --bare b", "b/hooks"),
    "renamed ancestor": (
        "mv .git old && mkdir -p .git/hooks && cp old/config .git/config && echo '[core]' >>.git/config",
        ".git/config",
    ),
    "link in the middle": ("mv .git old && ln -s old .git", ".git"),
    "a file as .git": ("mv .git old && echo 'gitdir: old' >.git", ".git"),
    "new hook folder": ("mv .git old && mkdir .git", ".git/config"),
    "new settings": ("mkdir -p .idea && echo evil >.idea/workspace.xml", ".idea"),
    "new .envrc in a folder": ("echo evil >deep/.envrc", "deep/.envrc"),
    "submodule": ("mkdir -p .git/modules/m && echo '[core]' >.git/modules/m/config", ".git/modules/m/config"),
    "hooks kept in the project": ("mkdir .husky && echo evil >.husky/pre-commit", ".husky"),
    "worktree settings": ("echo '[core]' >.git/config.worktree", ".git/config.worktree"),
}


def test_attack_08_what_is_added_or_moved_is_told(node_name: str, repo: Path) -> None:
    """Each way to have other code where the operator's tools look is named by its path; with `:all` none is."""
    keep = repo.parent / "keep"
    shutil.copytree(repo, keep, symlinks=True)

    async def scenario(node: Node) -> None:
        for name, (script, path) in MOVES.items():
            shutil.rmtree(repo)
            shutil.copytree(keep, repo, symlinks=True)
            if LEVEL == "A":
                for each in (repo, *repo.rglob("*")):
                    os.lchown(each, OWNER, OWNER)
            found, error = await node.changes(script, write(repo))
            assert error == "", name
            assert path in found, f"{name}: {found}"
        assert await node.changes("echo x >>.git/config", write(repo, everything=True)) == ([], "")

    on_node(node_name, scenario)


def test_attack_08_two_jobs_can_not_hide_a_change_from_each_other(node_name: str, repo: Path) -> None:
    """One moves the repository away before the other starts, which changes it; whoever is last has it told."""

    async def scenario(node: Node) -> None:
        # Deeper than is looked at.
        away = repo / "a" / "b" / "c" / "away"
        away.parent.mkdir(parents=True)
        first = await node.staged(write(repo))
        os.rename(repo / ".git", away)
        shutil.copytree(away, repo / ".git")
        second = await node.staged(write(repo))
        (away / "config").write_text("[core]\n fsmonitor = evil\n")
        assert await node.stage.planted(first) == []
        third = await node.staged(write(repo / "deep"))
        first.close()
        shutil.rmtree(repo / ".git")
        os.rename(away, repo / ".git")
        (repo / "deep" / ".envrc").write_text("evil")
        fourth = await node.staged(write(repo))
        assert await node.stage.planted(second) == [f"{repo}/.git/config", f"{repo}/deep/.envrc"]
        second.close()
        assert await node.stage.planted(third) == [f"{repo}/deep/.envrc"]
        third.close()
        # It started with the changed file in place, while one that knew the old one was alive.
        assert await node.stage.planted(fourth) == [f"{repo}/.git/config", f"{repo}/deep/.envrc"]
        fourth.close()

    on_node(node_name, scenario)


@pytest.mark.parametrize("how", ["gone", "replaced", "link"])
def test_attack_08_a_name_moved_while_the_view_is_built_fails_the_attempt(node_name: str, repo: Path, how: str) -> None:
    """Between the node's look and the mount another job moves .git away, or another one there: the attempt ends."""

    async def scenario(node: Node) -> None:
        staged = await node.staged(write(repo))
        assert ".git/config" in staged.mounts[0].protected
        os.rename(repo / ".git", repo / "away")
        if how == "replaced":
            shutil.copytree(repo / "away", repo / ".git")
        elif how == "link":
            (repo / ".git").symlink_to("away")
        try:
            with pytest.raises(SetupError) as caught:
                await node.run(staged, "true")
            assert caught.value.step == "grant"
        finally:
            staged.close()
        # The counter-check: without the identities the same moves go unnoticed, but for the link.
        staged = await node.staged(write(repo))
        blind = tuple(replace(each, protected=(".git/config",), identities=()) for each in staged.mounts)
        staged.mounts = blind
        try:
            if how != "link":
                assert (await node.run(staged, "true")).verdict.code == 0
        finally:
            staged.close()

    on_node(node_name, scenario)


def test_the_fifo_of_a_read_grant_costs_the_grant_where_nothing_stops_a_write(node_name: str, home: Path) -> None:
    """Below the job's own places, in write grants and without Landlock a read grant with a FIFO in it is refused."""
    for name in ("plain", "piped/a/b", "around"):
        (home / name).mkdir(parents=True)
    os.mkfifo(home / "piped" / "a" / "b" / "fifo")

    async def scenario(rig: Rig) -> None:
        read = [PathGrant(str(home / name), "read") for name in ("plain", "piped")]
        # A home of a test lies below /tmp, where a job may write.
        assert str(home).startswith("/tmp/")
        for landlocked in (True, False):
            async with node_of(rig, landlocked=landlocked) as node:
                (await node.staged(read[0])).close()
                with pytest.raises(StageError, match="FIFO") as caught:
                    await node.staged(read[1])
                assert caught.value.reason is RefuseReason.UNENFORCEABLE

    in_rig(node_name, scenario)


def test_a_read_grant_is_looked_through_within_bounds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries than the bound refuse the grant; a link to a FIFO, a socket and a closed folder do not."""
    (home / "tree" / "closed").mkdir(parents=True)
    (home / "tree" / "closed").chmod(0)
    os.mkfifo(home / "fifo")
    (home / "tree" / "link").symlink_to(home / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "tree" / "socket"))
    opened = open_grant(str(home / "tree"), "read", protected=Protected.collect())
    try:
        opener._refuse_pipes(opened)
        monkeypatch.setattr(opener, "MOST_ENTRIES", 2)
        with pytest.raises(GrantRefused, match="grant a smaller folder") as caught:
            opener._refuse_pipes(opened)
        assert caught.value.reason == "unenforceable"
    finally:
        opened.close()
        (home / "tree" / "closed").chmod(0o700)


def test_the_fifo_rule_asks_where_the_grant_lies() -> None:
    """With Landlock only grants below a place that the job may write are looked through; without it all are."""
    read, inside = PathGrant("/srv/data", "read"), PathGrant("/srv/work/data", "read")
    grants = (read, inside, write(Path("/srv/work")))
    assert not _below_writable(read, grants)
    assert _below_writable(inside, grants)
    assert not _below_writable(inside, (read, inside))
    assert all(_below_writable(PathGrant(path, "read"), ()) for path in ("/tmp/x", "/work", "/dev/shm/x"))
    assert not _below_writable(PathGrant("/tmpfs", "read"), ())


def test_plants_are_looked_for_within_bounds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links in circles, crowds, FIFOs and great folders end the search; none of them blocks, or leads out."""
    (home / ".vscode").mkdir()
    (home / ".vscode" / "loop").symlink_to(".")
    (home / ".idea").symlink_to("/etc")
    os.mkfifo(home / ".envrc")
    (home / ".git").symlink_to(".git")
    for number in range(40):
        (home / f"d{number}" / "e" / "f").mkdir(parents=True)
        (home / f"d{number}" / "e" / "f" / ".envrc").touch()
        for place in (home / f"d{number}", home / f"d{number}" / "e"):
            (place / ".envrc").touch()
    fd = os.open(home, os.O_RDONLY)
    try:
        found = plants.find(fd)
        assert len(found.kept) == 64
        assert set(found.marks) >= {".vscode", ".idea"} | {f"d{number}/e/.envrc" for number in range(40)}
        assert "d0/e/f/.envrc" not in found.marks
        assert "nowhere" in found.marks[".idea"]
        assert not found.cut
        assert plants.changed(fd, found.marks) == []
        for number in range(20):
            (home / ".vscode" / f"{number}").write_bytes(bytes(1000))
        small = plants._Budget(hashed=5000, files=10)
        monkeypatch.setattr(plants, "_Budget", lambda: replace(small))
        found = plants.find(fd)
        assert found.marks[".vscode"].startswith("folder cut")
        assert plants.changed(fd, found.marks) == []
    finally:
        os.close(fd)


def test_attack_08_a_crowd_of_folders_hides_no_change(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a job makes more folders than are looked at, what was known is compared all the same, and the cut is told."""
    monkeypatch.setattr(plants, "_MOST_FOLDERS", 5)
    (home / "z" / ".git").mkdir(parents=True)
    (home / "z" / ".git" / "config").write_text("[core]")
    fd = os.open(home, os.O_RDONLY)
    try:
        before = plants.find(fd)
        assert set(before.kept) == {"z/.git/config"}
        for number in range(10):
            (home / f"a{number}").mkdir()
        (home / "z" / ".git" / "config").write_text("[core] fsmonitor = evil")
        assert plants.changed(fd, before.marks) == ["z/.git/config", plants.CUT]
    finally:
        os.close(fd)


def test_attack_08_the_event_names_the_file() -> None:
    """An agent tells what a job planted, once, before the job's end; the text is one line."""
    with rigged(slots=1) as rig:
        rig.start("one")
        if LEVEL == "A":
            os.chown(rig.work, OWNER, OWNER)
        script = f"cd {rig.work}; git init -q .; git config core.fsmonitor evil; printf 'x' >'.idea\n'; mkdir .idea"
        granted = Asked(write=(str(rig.work),))
        done = rig.app.command(["sh", "-c", script], grants=granted)
        rig.wait_state(done, "finished")
        other = rig.app.command(["sh", "-c", f"cd {rig.work}; echo 1 >a"], grants=granted)
        rig.wait_state(other, "finished")

        def told() -> list[tuple[str, dict[str, object]]]:
            events = list(rig.app.events())
            ended = {event.job for event in events if event.type == EventType.JOB_ENDED}
            if {done.id, other.id} - ended:
                return []
            return [(event.job, dict(event.detail)) for event in events if event.type == EventType.GRANT_CODE_CHANGED]

        found = wait_until(told, "the event")
        assert [name for name, _ in found] == [done.id]
        paths = str(found[0][1]["paths"]).split(", ")
        assert f"{rig.work}/.git/config" in paths
        assert f"{rig.work}/.idea" in paths
        assert found[0][1]["count"] == len(paths)
