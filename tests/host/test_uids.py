"""Job uids: free ones only, one holder at a time on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.containment import uids
from node_agent.containment.errors import UidsUnavailable
from node_agent.containment.uids import JobUids
from tests.host.support import ROOT, needs_root

START = 1_900_000_100
HOLDER = """
from pathlib import Path
from node_agent.containment.uids import JobUids
lease = JobUids(int(sys.argv[2]), 3, folder=Path(sys.argv[1]), accounts=list).acquire()
print(lease.uid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the locks of this test are."""
    tmp_path.chmod(0o755)
    return tmp_path / "locks"


def job_uids(folder: Path, count: int = 3) -> Iterator[JobUids]:
    """A range without accounts."""
    found = JobUids(START, count, folder=folder, accounts=list)
    yield found
    found.close()


@pytest.fixture
def free(folder: Path) -> Iterator[JobUids]:
    """A range of three uids."""
    yield from job_uids(folder)


def test_each_uid_has_one_holder(free: JobUids) -> None:
    """Every lease has another uid, until none is left; a released one comes again."""
    leases = [free.acquire() for _ in range(3)]
    assert [lease.uid for lease in leases] == [START, START + 1, START + 2]
    with pytest.raises(UidsUnavailable, match="all 3 job uids"):
        free.acquire()
    leases[1].release()
    leases[1].release()
    again = free.acquire()
    assert again.uid == START + 1
    for lease in (leases[0], leases[2], again):
        lease.release()


def test_two_processes_never_share(free: JobUids, folder: Path) -> None:
    """What another process holds is not given here, and is free after its release or its end."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{HOLDER}"
    words = [sys.executable, "-I", "-c", code, str(folder), str(START)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == START
        lease = free.acquire()
        assert lease.uid == START + 1
        other.kill()
    freed = free.acquire()
    assert freed.uid == START
    for each in (lease, freed):
        each.release()


@needs_root
def test_uid_of_a_dead_holder_waits_for_its_processes(free: JobUids, folder: Path) -> None:
    """The lock of a killed agent is free at once; its uid is not, while a process still runs under it."""
    folder.joinpath(str(START)).write_text("held\n")
    with subprocess.Popen(["sleep", "60"], user=START, group=START, extra_groups=[]) as left:
        lease = free.acquire()
        assert lease.uid == START + 1
        left.kill()
    freed = free.acquire()
    assert freed.uid == START
    for each in (lease, freed):
        each.release()


def test_a_uid_given_back_stays_with_its_process(free: JobUids, folder: Path) -> None:
    """Its lock is kept, so that the next attempt costs no call, until the whole range is given up."""
    free.acquire().release()
    other = next(job_uids(folder))
    taken = other.acquire()
    assert taken.uid == START + 1
    again = free.acquire()
    assert again.uid == START
    again.release()
    free.close()
    freed = other.acquire()
    assert freed.uid == START
    for each in (taken, freed):
        each.release()
    other.close()


def test_range_with_an_account_is_refused(folder: Path) -> None:
    """A range in which a user, group or subordinate range exists is an error that names the id."""
    with pytest.raises(UidsUnavailable, match=str(START + 2)):
        JobUids(START, 5, folder=folder, accounts=lambda: [(START + 2, 1)])
    with pytest.raises(UidsUnavailable, match=str(START)):
        JobUids(START, 5, folder=folder, accounts=lambda: [(START - 10, 100)])


@pytest.mark.parametrize("start", [0, -5])
def test_root_is_never_in_the_range(folder: Path, start: int) -> None:
    """A range that starts at 0 or below is refused."""
    with pytest.raises(UidsUnavailable):
        JobUids(start, 10, folder=folder, accounts=list)


def test_small_user_namespace_gives_its_top(folder: Path, tmp_path: Path) -> None:
    """Where the default range is not mapped, the highest free mapped ids are used, never the reserved ones."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    for name in ("uid_map", "gid_map"):
        (proc / "self" / name).write_text("         0     100000      65536\n")
    found = JobUids(folder=folder, proc=proc, accounts=lambda: [(65_000, 1)])
    assert (found.start, found.count) == (64_000, 1000)
    found.close()
    (proc / "self" / "gid_map").write_text("0 100000 1\n")
    with pytest.raises(UidsUnavailable, match="level B"):
        JobUids(folder=folder, proc=proc, accounts=list)


def test_lock_folder_must_be_ours_alone(folder: Path, tmp_path: Path) -> None:
    """A folder that others can enter, or a link in its place, is refused."""
    folder.mkdir(mode=0o755)
    with pytest.raises(UidsUnavailable, match="0700"):
        JobUids(START, 3, folder=folder, accounts=list)
    folder.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(UidsUnavailable, match="no plain folder"):
        JobUids(START, 3, folder=folder, accounts=list)
    folder.unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(UidsUnavailable, match="belong to root"):
        JobUids(START, 3, folder=folder, accounts=list)


def test_unusable_place_for_locks_is_named(tmp_path: Path) -> None:
    """Where the lock folder can't be made, the error says which folder it is."""
    (tmp_path / "file").touch()
    with pytest.raises(UidsUnavailable, match="locks"):
        JobUids(START, 3, folder=tmp_path / "file" / "locks", accounts=list)


def test_accounts_of_this_host_are_seen() -> None:
    """Root and this process's own user are among the taken ids where they have accounts."""
    assert (0, 1) in uids._accounts()
    assert uids._has_account(0)
    assert not uids._has_account(START)


Spans = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 300)), max_size=8)


@given(mapped=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 4000)), min_size=1, max_size=3), taken=Spans)
def test_chosen_range_is_mapped_and_free(mapped: list[tuple[int, int]], taken: list[tuple[int, int]]) -> None:
    """Whatever is mapped and taken, a chosen range lies in one mapped span and holds no taken id and no root."""
    try:
        start, count = uids._choose(START, 50, mapped, taken)
    except UidsUnavailable:
        return
    assert start > 0
    assert any(first <= start and start + count <= first + length for first, length in mapped)
    assert uids._clash(start, count, taken) is None


def test_default_range_is_free_here(folder: Path) -> None:
    """On this host the documented default range (or the top of the map) can be used."""
    try:
        found = JobUids(folder=folder)
    except UidsUnavailable as error:
        if os.geteuid() == 0:
            raise
        pytest.skip(f"no range for an ordinary user: {error}")
    found.close()
