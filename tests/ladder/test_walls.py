"""What a job meets at every level: its environment, descriptors, rights, files, network and limits."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.containment import landlock
from node_agent.containment.errors import GroupError
from node_agent.containment.plan import Level, Mount
from node_agent.containment.promises import Facts, Promise, promises
from tests.containment.rig import Outcome, Rig, granted, marked, python
from tests.ladder.rig import LOW, OWN_UID, Ladder, at_levels, climb, opened
from tests.support.wait import await_until

LOOK = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
fds = []
for name in os.listdir("/proc/self/fd"):
    try: os.fstat(int(name)); fds.append(int(name))
    except OSError: pass
print(json.dumps({
    "environ": dict(os.environ), "cwd": os.getcwd(), "fds": sorted(fds), "uid": os.getresuid(), "gid": os.getresgid(),
    "groups": os.getgroups(), "sid": os.getsid(0) == os.getpid(), "nice": os.nice(0), "stdin": os.read(0, 10).decode(),
    **{name: status[name].strip() for name in ("NoNewPrivs", "Seccomp", "CapPrm", "CapEff", "CapInh", "CapAmb")},
}))
"""
FILES = """
import os, sys
def tried(what, *args):
    try: what(*args); return "done"
    except OSError as error: return type(error).__name__
print(tried(open, sys.argv[1]), tried(os.listdir, os.path.dirname(sys.argv[1])), tried(open, "/tmp/s3-left", "w"))
open("own", "w").write("x")
print(open(os.environ["TMPDIR"] + "/t", "w").write("x"), oct(os.stat(os.getcwd()).st_mode & 0o777))
"""
SOCKETS = """
import ctypes, socket, sys
def tried(family, kind=socket.SOCK_STREAM, protocol=0):
    try: return socket.socket(family, kind, protocol) and "made"
    except OSError as error: return type(error).__name__
def reached(port):
    try: return socket.create_connection(("127.0.0.1", port), 2) and "reached"
    except OSError as error: return type(error).__name__
print(reached(int(sys.argv[1])), tried(socket.AF_INET), tried(socket.AF_INET, socket.SOCK_DGRAM), tried(socket.AF_UNIX),
      tried(40), tried(socket.AF_INET, socket.SOCK_STREAM, 262), ctypes.CDLL(None).shmget(0, 4096, 0o1600))
left, right = socket.socketpair()
left.send(b"pair"); print(right.recv(9).decode())
"""
REACH = """
import os, signal, sys
def tried(what, *args):
    try: what(*args); return "done"
    except OSError as error: return type(error).__name__
pid = int(sys.argv[1])
print(tried(os.kill, pid, 0), tried(open, f"/proc/{pid}/environ", "rb"), tried(os.kill, os.getppid(), signal.SIGSTOP))
"""
SET_ID = """
import os, sys
folder = sys.argv[1]
open(folder + "/made", "w").write("by the job")
def tried(what, *args):
    try: what(*args); return 0
    except OSError: return 1
print(sum((tried(os.chmod, folder + "/made", 0o4755), tried(os.open, folder + "/new", os.O_CREAT | os.O_WRONLY, 0o4755),
     tried(os.mkdir, folder + "/dir", 0o2755), tried(os.mknod, folder + "/node", 0o106755))))
print(open(folder + "/made").read())
"""


def look(seen: Outcome) -> dict[str, object]:
    """What the LOOK job printed."""
    assert seen.verdict.code == 0, seen
    return dict(json.loads(seen.out))


@at_levels()
def test_a_job_finds_nothing_of_the_node(node_name: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, descriptors, session and rights are the same bare ones at every level."""
    monkeypatch.setenv("NODE_SECRET", "canary")

    async def scenario(rig: Rig) -> None:
        plan = rig.plan()
        found = look(await rig.run(python(LOOK), env={"ASKED": "yes", "RINGFENCE_JOB": "forged"}, nice=3))
        environ = dict(found["environ"])  # type: ignore[call-overload]  # a JSON object
        assert "canary" not in str(environ)
        assert (environ["ASKED"], environ["USER"], environ["RINGFENCE_JOB"]) == ("yes", "job", "main-job")
        assert environ["HOME"] == found["cwd"]
        assert environ["TMPDIR"] in ("/tmp", f"{found['cwd']}/tmp")
        assert found["fds"] == [0, 1, 2, 100]
        assert (found["sid"], found["nice"], found["stdin"]) == (True, 3, "")
        assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
        assert {int(str(found[name]), 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
        expected = [plan.uid] * 3 if not OWN_UID else found["uid"]
        assert found["uid"] == expected
        assert 0 not in found["uid"]  # type: ignore[operator]  # a list
        assert found["uid"] == found["gid"]
        assert OWN_UID is False or found["groups"] == []

    climb(level, node_name, scenario)


@at_levels()
def test_a_job_writes_its_workspace_alone(node_name: str, level: Level, tmp_path: Path) -> None:
    """Foreign files are closed, also those of its own uid; its workspace is private, and gone afterwards."""
    secret = tmp_path / "secret"
    secret.write_text("canary")

    async def scenario(rig: Rig) -> None:
        if level in LOW and not landlock.abi():
            pytest.skip("this kernel has no Landlock: levels C to F rest on the permissions of files alone")
        seen = await rig.run([*python(FILES), str(secret)])
        words = seen.out.decode().split()
        assert seen.verdict.code == 0, seen
        assert set(words[:2]) <= {"PermissionError", "FileNotFoundError"}, seen
        assert words[2] == ("PermissionError" if level in LOW else "done")
        assert words[3:] == ["1", "0o700"]
        if isinstance(rig, Ladder):
            places = rig.places
            await await_until(lambda: list(places.iterdir()) == [], "the workspace to be removed")

    climb(level, node_name, scenario)
    assert not Path("/tmp/s3-left").exists()


@at_levels()
def test_net_none_is_kept(node_name: str, level: Level) -> None:
    """A service on the host's loopback is never reached; without a net namespace no socket can be made at all."""

    async def scenario(rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            seen = await rig.run([*python(SOCKETS), str(server.getsockname()[1])])
        words = seen.out.decode().split()
        assert words[-1] == "pair", seen
        assert not {"reached", *(["made"] if level in LOW else [])} & set(words), seen
        if level in LOW:
            assert (words[0], words[6]) == ("PermissionError", "-1")

    climb(level, node_name, scenario)


@at_levels("A", "B", "C", "D", "E")
def test_agent_and_mould_are_out_of_reach(node_name: str, level: Level) -> None:
    """A job can neither signal nor look into a process of the agent's user, nor stop its own mould."""

    async def scenario(rig: Rig) -> None:
        with subprocess.Popen(["sleep", "60"], env={"NODE": "canary"}) as neighbour:
            try:
                seen = await rig.run([*python(REACH), str(neighbour.pid)])
            finally:
                neighbour.kill()
        first, second, third = seen.out.decode().split()
        assert first in ("PermissionError", "ProcessLookupError"), seen
        assert second in ("PermissionError", "FileNotFoundError")
        # Inside a pid namespace the mould is process 1, which takes no signal from below.
        assert third == "PermissionError" if level in LOW else third in ("done", "PermissionError")

    climb(level, node_name, scenario)


@at_levels("A", "B", "C", "D")
def test_the_pids_limit_stands(node_name: str, level: Level) -> None:
    """Where the total of processes is a promise, a job has at most so many."""

    async def scenario(rig: Rig) -> None:
        code = "import os, time\nmade = 0\ntry:\n"
        code += "    for n in range(60):\n        if os.fork() == 0: time.sleep(20); os._exit(0)\n        made += 1\n"
        seen = await rig.run(python(code + "except OSError: pass\nprint(made)"), pids=20)
        assert int(seen.out) == 19, seen

    climb(level, node_name, scenario)


@pytest.mark.parametrize("level", [level for level in LOW if level > "C"])
def test_a_total_without_a_group_never_starts(node_name: str, level: Level) -> None:
    """Should admission ever let a memory or cpu total through where there is no cgroup, the slot refuses it."""

    async def scenario(rig: Rig) -> None:
        for changes in ({"memory_bytes": 1 << 30}, {"cpus": 1.0}):
            with pytest.raises(GroupError):
                await rig.run(["true"], **changes)

    climb(level, node_name, scenario)


@at_levels()
def test_files_and_data_are_bounded(node_name: str, level: Level) -> None:
    """Open files stop at the plan's number, and no core is dumped."""

    async def scenario(rig: Rig) -> None:
        code = "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE), "
        code += "resource.getrlimit(resource.RLIMIT_CORE))\n"
        code += "try:\n    while True: os.dup(1)\nexcept OSError as error: print(error.errno)"
        seen = await rig.run(python(code), files=64)
        assert seen.out.decode().split("\n")[:2] == ["(64, 64) (1, 1)", "24"]

    climb(level, node_name, scenario)


@at_levels()
def test_a_task_returns_its_value(node_name: str, level: Level) -> None:
    """Python tasks work at every level: arguments in, value out by the sealed descriptor."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task="sample_tasks:add", args=[2, 3])
        assert seen.verdict.code == 0, seen
        assert seen.result == {"ok": 5}, seen

    climb(level, node_name, scenario)


@pytest.mark.skipif(OWN_UID, reason="as root jobs have uids of their own, and path grants are refused below B")
@at_levels("B", "E")
@pytest.mark.parametrize("mode", ["read", "write"])
def test_attack_09_write_grants_set_no_user_id(node_name: str, level: Level, mode: str, tmp_path: Path) -> None:
    """Through a grant without a view the same rules hold: a read grant writes nothing, no set-user-ID bit is made."""
    (tmp_path / "made").write_text("before")
    (tmp_path.parent / "beside").write_text("canary")

    async def scenario(rig: Rig) -> None:
        mount = Mount(str(tmp_path), "write" if mode == "write" else "read", "dir")
        with granted(tmp_path, mount.mode) if level == "B" else opened(tmp_path) as fd:
            seen = await rig.run([*python(SET_ID), str(tmp_path)], mounts=[(mount, fd)])
            beside = await rig.run(["cat", str(tmp_path.parent / "beside")], mounts=[(mount, fd)])
        assert beside.out == b""
        if mode == "read":
            assert seen.verdict.code != 0
            assert (tmp_path / "made").read_text() == "before"
            return
        assert seen.out.decode().split("\n")[:2] == ["4", "by the job"], seen
        found = [path for path in tmp_path.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o6000]
        assert found == []

    climb(level, node_name, scenario)


@pytest.mark.skipif(OWN_UID, reason="level B is an ordinary user's: this runs again as one")
def test_attack_39_a_job_can_not_use_up_the_developers_quotas(node_name: str) -> None:
    """inotify instances end at 32 and namespaces at none, while the developer's own still can be made."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = 0
while libc.inotify_init() >= 0: made += 1
kinds = ("user", "pid", "net", "mnt", "ipc")
names = ("inotify_instances", "inotify_watches", *(f"{kind}_namespaces" for kind in kinds))
print(made, *(open(f"/proc/sys/user/max_{name}").read().strip() for name in names))
try: open("/proc/sys/user/max_inotify_instances", "w").write("1000")
except OSError as error: print(type(error).__name__)
"""

    async def scenario(rig: Rig) -> None:
        script = [*python(code.replace("print(made", "print('up', made"))]
        attempt, mark = await rig.running(["sh", "-c", '"$@"; sleep 30', "sh", *script])
        assert marked(mark)
        own = os.inotify_init() if hasattr(os, "inotify_init") else _inotify()
        os.close(own)
        attempt.kill()
        await rig.finish(attempt)
        seen = await rig.run(python(code))
        words = seen.out.decode().split()
        assert words == ["32", "32", "8192", "0", "0", "0", "64", "64", words[-1]], seen
        assert words[-1] in ("OSError", "PermissionError")

    climb("B", node_name, scenario)


def test_the_table_of_the_hosts_page_is_what_the_code_says() -> None:
    """docs/hosts.md shows, for a usual host of each level, exactly the promises that the code derives."""
    page = (Path(__file__).parents[2] / "docs/hosts.md").read_text()
    assert table() in page, f"put this into docs/hosts.md:\n{table()}"


def table() -> str:
    """The promises of usual hosts, as the page shows them."""
    totals = frozenset({"pids", "memory", "cpu"})
    usual = {
        "A": Facts("A", True, totals, True, 7),
        "B": Facts("B", landlock_abi=7),
        "C": Facts("C", True, totals, True, 7),
        "D": Facts("D", True, landlock_abi=7),
        "E": Facts("E", landlock_abi=7),
        "F": Facts("F"),
    }
    found: dict[str, list[Promise]] = {}
    for facts in usual.values():
        for each in promises(facts):
            found.setdefault(each.name, []).append(each)
    head = f"| promise | {' | '.join(usual)} |\n|---|{'---|' * len(usual)}\n"
    return head + "".join(
        f"| {name} | {' | '.join('yes' if each.kept else 'no' for each in row)} |\n" for name, row in found.items()
    )


def _inotify() -> int:
    import ctypes

    fd = ctypes.CDLL(None).inotify_init()
    assert fd >= 0
    return int(fd)


if __name__ == "__main__":
    sys.stdout.write(table())
