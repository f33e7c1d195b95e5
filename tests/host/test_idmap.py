"""Cloned mounts of grants: the owner's rights for the job, the owner's uid on the host, and nobody else's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from node_agent.containment.idmap import Idmaps, Ids, make_userns
from tests.host.support import apart, needs_root

OWNER = 41_001
OTHER = 41_002
JOB = 1_900_000_007

# In a mount namespace of its own: clones a grant and uses it as the job's uid.
# Arguments: the grant, the job's uid, the mode, "mapped" or not.
JOB_SIDE = """
import os, stat
from node_agent.containment import linux
from node_agent.containment.idmap import make_userns
from node_agent.containment.paths import Protected, clone_mount, open_grant
path, job, mode, mapped = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "mapped"
linux.unshare(linux.NEWNS)
linux.mount(None, "/", None, 0x4000 | 0x40000)
opened = open_grant(path, mode, protected=Protected.collect())
userns = make_userns(os.fork, (opened.owner_uid, opened.owner_gid, job, job)) if mapped else None
fd = clone_mount(opened, mode, userns, job_uid=job)
linux.move_mount(fd, "/mnt")
os.setgroups([]); os.setresgid(job, job, job); os.setresuid(job, job, job)
def tried(what, call):
    try:
        call()
        print(what, "worked")
    except OSError as error:
        print(what, error.strerror.replace(" ", "_"))
print("owner", os.stat("/mnt/theirs").st_uid == job, os.stat("/mnt/other").st_uid == job)
tried("read", lambda: open("/mnt/theirs").read())
tried("read-other", lambda: open("/mnt/other").read())
tried("write", lambda: open("/mnt/made", "w").close())
tried("unlink", lambda: os.unlink("/mnt/made"))
tried("make", lambda: open("/mnt/made", "w").close())
tried("chown", lambda: os.chown("/mnt/made", 0, 0))
print("submount", sorted(os.listdir("/mnt/sub")))
print("flags", *[line.split()[5] for line in open("/proc/self/mountinfo") if line.split()[4] == "/mnt"])
"""


@pytest.fixture
def grant(tmp_path: Path) -> Path:
    """A folder of OWNER with a private file of theirs and one of another user."""
    path = tmp_path.resolve() / "grant"
    (path / "sub").mkdir(parents=True)
    for name, uid in (("theirs", OWNER), ("other", OTHER)):
        (path / name).touch(mode=0o600)
        os.chown(path / name, uid, uid)
    os.chown(path, OWNER, OWNER)
    return path


def job_side(path: Path, mode: str, kind: str = "mapped") -> dict[str, str]:
    """What the job saw and could do."""
    lines = apart(JOB_SIDE, str(path), str(JOB), mode, kind).splitlines()
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}


@needs_root
def test_write_grant_acts_as_the_owner(grant: Path) -> None:
    """The job reads and writes as the owner of the path, whose uid its files get on the host."""
    seen = job_side(grant, "write")
    assert seen["owner"] == "True False"
    assert (seen["read"], seen["write"], seen["make"]) == ("worked", "worked", "worked")
    assert seen["read-other"] == "Permission_denied"
    assert seen["chown"] in ("Operation_not_permitted", "Invalid_argument", "Value_too_large_for_defined_data_type")
    assert (grant / "made").stat().st_uid == OWNER
    assert {"nosuid", "nodev"} <= set(seen["flags"].split(","))


@needs_root
def test_read_grant_is_read_only(grant: Path) -> None:
    """The job reads what the owner may read and writes nothing."""
    seen = job_side(grant, "read")
    assert seen["read"] == "worked"
    assert seen["write"] == seen["make"] == "Read-only_file_system"
    assert {"ro", "nosuid", "nodev"} <= set(seen["flags"].split(","))


@needs_root
def test_write_without_id_map_is_refused(grant: Path) -> None:
    """Where no id map is possible, a write grant of a path that is not the job uid's is unenforceable."""
    with pytest.raises(AssertionError, match="takes no id map"):
        job_side(grant, "write", "plain")
    for path in (grant, grant / "theirs"):
        os.chown(path, JOB, JOB)
    assert job_side(grant, "write", "plain")["write"] == "worked"


@needs_root
def test_submounts_do_not_come_along(grant: Path) -> None:
    """What is mounted below a granted folder stays out of the job's view."""
    code = (
        "from node_agent.containment import linux\n"
        "linux.unshare(linux.NEWNS)\n"
        "linux.mount(None, '/', None, 0x4000 | 0x40000)\n"
        "linux.mount('tmpfs', sys.argv[1] + '/sub', 'tmpfs', 0)\n"
        "open(sys.argv[1] + '/sub/secret', 'w').close()\n"
    )
    seen = apart(code + JOB_SIDE, str(grant), str(JOB), "write", "mapped").splitlines()
    assert "submount []" in seen


def _children() -> str:
    """This process's children, zombies included; the store of other tests may be one."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@needs_root
def test_userns_leaves_no_child() -> None:
    """Making a map reaps its carrier, and the descriptor alone keeps the map."""
    before = _children()
    fd = make_userns(os.fork, (OWNER, OWNER, JOB, JOB))
    os.close(fd)
    assert _children() == before


def test_cache_asks_once_and_forgets_the_oldest() -> None:
    """A map is made once for its ids; the least recently used descriptor is closed first, all at the end."""
    asked: list[Ids] = []

    async def make(ids: Ids) -> int:
        asked.append(ids)
        return os.open("/", os.O_PATH)

    async def use() -> None:
        maps = Idmaps(make, cached=2)
        first, second, third = ((uid, uid, JOB, JOB) for uid in (1, 2, 3))
        kept = await maps.get(first)
        await maps.get(second)
        assert await maps.get(first) == kept
        await maps.get(third)
        assert asked == [first, second, third]
        assert await maps.get(first) == kept
        await maps.get(second)
        assert asked == [first, second, third, second]
        maps.close()
        maps.close()

    asyncio.run(use())
