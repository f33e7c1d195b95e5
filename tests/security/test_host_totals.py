"""What one job can use up: space, inodes, processes, descriptors, watches (attacks 33, 34, 39). All within hard caps.

Stopped by sizes on every tmpfs, limits of the attempt, and counts that are the job's own. The agent and the next job
go on meanwhile and afterwards.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
from pathlib import Path

import pytest

from node_agent.containment.slots import Slot
from tests.containment.rig import LEVEL, Rig, in_rig, python
from tests.security.fs_tries import PRELUDE

BOUNDS = r"""
bad, found = [], []
for line in open("/proc/self/mountinfo"):
    left, _, right = line.partition(" - ")
    words, kind = left.split(), right.split()[0]
    if "ro" in words[5].split(",") or kind in ("proc", "devtmpfs"): continue
    place = words[4]
    info = os.statvfs(place)
    size, files = info.f_blocks * info.f_frsize, info.f_files
    found.append(place)
    if not 0 < size <= 2 << 30 or not 0 < files <= 1 << 20: bad.append((place, kind, size, files))
print(sorted(found), bad)
"""


def test_attack_33_every_writable_place_has_a_size_and_a_count_of_files(node_name: str) -> None:
    """Whatever is mounted writable in a job's view is a tmpfs with both bounds; there is no other writable mount."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(PRELUDE + BOUNDS))
        assert seen.out == b"['/dev/shm', '/tmp', '/work'] []\n", seen

    in_rig(node_name, scenario)


FILL = r"""
def fill(folder, cap):
    made = 0
    try:
        with open(folder + "/big", "wb", 0) as file:
            while made < cap: made += file.write(bytes(1 << 20))
    except OSError as error: return errno.errorcode[error.errno], made >> 20
    return "CAP", made >> 20
def crowd(folder, cap):
    for number in range(cap):
        try: os.mkdir(f"{folder}/d{number}")
        except OSError as error: return errno.errorcode[error.errno], number
    return "CAP", cap
for folder in ("/work", "/tmp", "/dev/shm"):
    print(folder, *fill(folder, 100 << 20), *crowd(folder, 3000))
# Names without files, files without names, and holes take no more than the rest.
held = []
try:
    while len(held) < 3000: held.append(os.open("/tmp", os.O_TMPFILE | os.O_RDWR))
except OSError as error: print("unnamed", errno.errorcode[error.errno])
"""


def test_attack_33_space_and_inodes_end_at_their_bounds(node_name: str) -> None:
    """Bytes and folders run out at the attempt's sizes with ENOSPC; the next attempt has all of it again."""

    async def scenario(rig: Rig) -> None:
        sizes = {"disk_bytes": 32 << 20, "tmp_bytes": 16 << 20, "shm_bytes": 8 << 20, "inodes": 1000}
        for _ in range(2):
            seen = await rig.run(python(PRELUDE + FILL), **sizes)
            lines = [line.split() for line in seen.out.decode().splitlines()]
            told = {words[0]: words[1:] for words in lines}
            assert told.pop("unnamed") in (["ENOSPC"], ["EMFILE"]), seen
            for folder, limit in (("/work", 32), ("/tmp", 16), ("/dev/shm", 8)):
                error, filled, crowded, number = told[folder]
                assert (error, crowded) == ("ENOSPC", "ENOSPC"), told
                assert int(filled) <= limit
                assert int(number) < 1000

    in_rig(node_name, scenario)


FORKS = r"""
children = 0
try:
    while children < 400:
        if os.fork() == 0: signal.alarm(20); signal.pause()
        children += 1
except OSError as error: print("stopped", errno.errorcode[error.errno], children, flush=True)
else: print("never", flush=True)
"""


def test_processes_end_at_their_bound_and_count_for_this_job_alone(node_name: str) -> None:
    """A job forks up to its limit; at the same time this user, and another slot, fork as they like."""

    async def scenario(rig: Rig) -> None:
        other = Slot(1, rig.zygote, None)
        plan = rig.plan()
        attempt = await rig.start(python(PRELUDE + FORKS + "time.sleep(10)"), pids=30, uid=plan.uid, gid=plan.gid)
        try:
            said = await _line(attempt.stdout)
            word, error, number = said.split()
            assert (word, error) == ("stopped", "EAGAIN"), said
            assert 20 <= int(number) <= 30
            pids = [os.posix_spawn("/bin/true", ["true"], {}) for _ in range(40)]
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 40
            neighbour = Rig(rig.zygote, other, None)
            script = "for each in $(seq 40); do sleep 0 & done; wait; echo fine"
            assert (await neighbour.run(["sh", "-c", script])).out == b"fine\n"
        finally:
            attempt.kill()
            await attempt.proved
            await rig.finish(attempt)
            await other.close()
        assert (await rig.run(["echo", "next"])).out == b"next\n"

    in_rig(node_name, scenario)


FLIGHT = r"""
import array, resource
sent, pairs = 0, []
own = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200).tobytes()
try:
    while sent < 40_000:
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs.append((one, two)); one.setblocking(False)
        try:
            while sent < 40_000:
                one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, own)]); sent += 200
        except BlockingIOError: pass
except OSError as error: print("stopped", errno.errorcode[error.errno], sent, flush=True)
else: print("stopped", "CAP", sent, flush=True)
time.sleep(10)
"""


def test_attack_34_descriptors_in_flight_do_not_stop_the_agent(node_name: str) -> None:
    """While a job leaves as many descriptors in flight as it may, the agent passes descriptors: other jobs start."""

    async def scenario(rig: Rig) -> None:
        other = Slot(1, rig.zygote, None)
        attempt = await rig.start(python(PRELUDE + FLIGHT))
        try:
            said = await _line(attempt.stdout)
            assert said.split()[1] in ("ETOOMANYREFS", "EMFILE"), said
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if LEVEL == "B":
                # The kernel counts per user, and lets each process send until the user's count is over its own limit.
                assert int(said.split()[2]) <= hard // 2
            neighbour = Rig(rig.zygote, other, None)
            assert (await neighbour.run(["echo", "fine"])).out == b"fine\n"
        finally:
            attempt.kill()
            await attempt.proved
            await rig.finish(attempt)
            await other.close()

    in_rig(node_name, scenario)


WATCHES = r"""
libc.inotify_init.restype = ctypes.c_int
held = 0
while held < 1000 and libc.inotify_init() >= 0: held += 1
print("watches", held, flush=True)
time.sleep(10)
"""


def test_attack_39_a_jobs_watches_are_its_own(node_name: str) -> None:
    """A job that takes every inotify instance it can get leaves this user, the agent's at level B, its own."""
    libc = ctypes.CDLL(None, use_errno=True)

    async def scenario(rig: Rig) -> None:
        attempt = await rig.start(python(PRELUDE + WATCHES))
        try:
            held = int((await _line(attempt.stdout)).split()[1])
            assert 0 < held <= (32 if LEVEL == "B" else 1000)
            fds = [libc.inotify_init() for _ in range(10)]
            try:
                assert min(fds) >= 0, "the cap of the job's user namespace, or another uid"
            finally:
                for fd in fds:
                    if fd >= 0:
                        os.close(fd)
        finally:
            attempt.kill()
            await attempt.proved
            await rig.finish(attempt)

    limit = int(Path("/proc/sys/user/max_inotify_instances").read_text())
    if LEVEL == "B" and limit > 2000:
        pytest.skip(f"this user may have {limit} inotify instances: no job reaches that within its descriptors")
    in_rig(node_name, scenario)


MEMORY = r"""
keep = []
while len(keep) < 400: keep.append(bytearray(os.urandom(4096)) * 256)
print("kept")
"""


def test_attack_33_memory_ends_at_its_bound_and_the_agent_lives(node_name: str) -> None:
    """A job that eats memory is ended at its total where there is a controller, and at its own space elsewhere."""

    async def scenario(rig: Rig) -> None:
        limited = rig.group is not None and "memory" in rig.group.enforces
        limit = {"memory_bytes": 96 << 20} if limited else {"data_bytes": 256 << 20}
        seen = await rig.run(python(PRELUDE + MEMORY), **limit)
        assert b"kept" not in seen.out
        if limited:
            assert (seen.verdict.signal, seen.verdict.limit) == (9, "memory"), seen
        else:
            assert b"MemoryError" in seen.err, seen
        assert (await rig.run(["echo", "next"])).out == b"next\n"

    in_rig(node_name, scenario)


async def _line(fd: int) -> str:
    """Read one line of a running job."""
    seen = b""

    def look() -> None:
        nonlocal seen
        seen += os.read(fd, 4096)
        if b"\n" in seen and not done.done():
            done.set_result(None)

    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, look)
    try:
        await asyncio.wait_for(done, 25)
    finally:
        loop.remove_reader(fd)
    return seen.decode().splitlines()[0]
