"""Rings are what the kernel enforces: what a process of each one can do, tried on a running fleet (row K1).

The table is docs/rings.md: 0 node agent, 1 broker and egress (and the broker's scrubber), 2 service jobs, 3 jobs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from tests.support.fleet import Fleet, running

DOCS = Path(__file__).parents[2] / "docs" / "rings.md"
ROOT = os.geteuid() == 0
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
RING_1 = ("broker.egress", "broker.vault", "broker.scrub")

#: A job that looks at itself, and tries each thing on every process and file of the rings below it.
PROBE = r"""
import ctypes, json, os, socket, sys
lower, files, sockets = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def tried(action):
    try:
        return f"DONE {action()!r}"
    except OSError as error:
        return os.strerror(error.errno)

def ptrace(pid):
    ctypes.set_errno(0)
    if libc.ptrace(16, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as way:
        way.connect(path)

seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
others = [pid for pid in {*lower, *seen, 1} if pid not in (os.getpid(), os.getppid())]
found = {"status": open("/proc/self/status").read(), "tries": {}}
for pid in others:
    found["tries"][f"signal {pid}"] = tried(lambda: os.kill(pid, 0))
    found["tries"][f"memory {pid}"] = tried(lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    found["tries"][f"environment {pid}"] = tried(lambda: open(f"/proc/{pid}/environ", "rb").read(1))
    found["tries"][f"trace {pid}"] = tried(lambda: ptrace(pid))
    found["tries"][f"descriptors {pid}"] = tried(lambda: os.listdir(f"/proc/{pid}/fd"))
for path in files:
    found["tries"][f"file {path}"] = tried(lambda: open(path, "rb").read(1))
for path in sockets:
    found["tries"][f"socket {path}"] = tried(lambda: connect(path))
found["tries"]["mount"] = tried(lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) and os.open("/nowhere", 0))
found["tries"]["become root"] = tried(lambda: os.setuid(0))
found["uid_0"] = os.getuid() == 0
print(json.dumps(found))
"""


def status_of(text: str) -> dict[str, str]:
    """Return the fields of a /proc/PID/status."""
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A fleet of one node with everything that `up` starts."""
    with running("--slots", "2") as found:
        yield found


@pytest.fixture(scope="module")
def rings(fleet: Fleet) -> dict[str, int]:
    """The pid of one process of each kind."""
    found = {}
    for process in psutil.Process(fleet.process.pid).children(recursive=True):
        words = process.cmdline()
        for name in ("node_agent", "node_agent.containment.zygote", *RING_1):
            if name in words:
                found[name] = process.pid
    assert set(found) == {"node_agent", "node_agent.containment.zygote", *RING_1}
    return found


def probe(fleet: Fleet, rings: dict[str, int], *options: str) -> dict[str, object]:
    """Run the probe as a job with these options; return what it found."""
    home = fleet.home
    files = [home / "client.json", home / "trust.toml", home / "up-policy.toml", home / "keys" / "fleet.key"]
    files += [home / "nodes" / "node-1" / "flight" / "00000001.rec", *(home / "vault").glob("*")]
    sockets = [path for folder in ("s", "store") for path in (home / folder).glob("*") if path.is_socket()]
    assert len(sockets) >= 2
    asked = json.dumps([list(rings.values()), list(map(str, files)), list(map(str, sockets))])
    done = fleet.run("run", *options, "--", sys.executable, "-I", "-c", PROBE, asked)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def jobs(fleet: Fleet, rings: dict[str, int]) -> dict[int, dict[str, object]]:
    """What a service job (2) and a job (3) are and can do."""
    return {2: probe(fleet, rings, "--watch", "tag:team=acme"), 3: probe(fleet, rings)}


@pytest.mark.parametrize("ring", [2, 3])
def test_k1_a_job_reaches_no_ring_below_it(ring: int, jobs: dict[int, dict[str, object]]) -> None:
    """No signal, no look into memory, environment or descriptors, no trace, no file, no socket: each attempt fails."""
    tries = cast("dict[str, str]", jobs[ring]["tries"])
    assert len(tries) > 30
    assert {what: how for what, how in tries.items() if how.startswith("DONE")} == {}
    assert not jobs[ring]["uid_0"]


@pytest.mark.parametrize("ring", [2, 3])
def test_k1_a_job_holds_nothing_of_the_kernel_s_power(ring: int, jobs: dict[int, dict[str, object]]) -> None:
    """No capability, none to be had, no new privileges, a filter on its calls, no groups of the host."""
    status = status_of(str(jobs[ring]["status"]))
    assert [int(status[name], 16) for name in SETS] == [0] * 5
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    if ROOT:
        assert len({*status["Uid"].split()}) == 1
        assert 1_900_000_000 <= int(status["Uid"].split()[0]) < 1_900_001_000
        assert status["Groups"].strip() == ""


def test_k1_a_service_job_is_no_more_than_a_job_to_the_kernel(jobs: dict[int, dict[str, object]]) -> None:
    """What ring 2 has over ring 3 is a grant that its node looks up, nothing that its process could use by itself."""
    first, second = (status_of(str(jobs[ring]["status"])) for ring in (2, 3))
    for name in (*SETS, "NoNewPrivs", "Seccomp", "Seccomp_filters"):
        assert first[name] == second[name]


@pytest.mark.parametrize("name", RING_1)
def test_k1_ring_1_is_confined(name: str, rings: dict[str, int]) -> None:
    """Broker, egress and scrubber hear hostile bytes: a filter, no new privileges, and no power over the host."""
    status = status_of(Path(f"/proc/{rings[name]}/status").read_text())
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    if ROOT:
        agent = status_of(Path(f"/proc/{rings['node_agent']}/status").read_text())
        assert status["Uid"] != agent["Uid"]
        users = [status_of(Path(f"/proc/{rings[one]}/status").read_text())["Uid"] for one in RING_1]
        assert len(set(users)) == len(RING_1), "each under a user of its own"


@pytest.mark.skipif(not ROOT, reason="without root the agent and ring 1 share a user; their filter is all there is")
@pytest.mark.parametrize("name", RING_1)
def test_k1_ring_1_s_user_has_no_power_over_ring_0(name: str, fleet: Fleet, rings: dict[str, int]) -> None:
    """Whoever runs as ring 1's user can't signal the agent, look into it, or read its keys."""
    uid = int(status_of(Path(f"/proc/{rings[name]}/status").read_text())["Uid"].split()[0])
    agent = rings["node_agent"]
    code = f"""
import os
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
for action in (
    lambda: os.kill({agent}, 0),
    lambda: open("/proc/{agent}/mem", "rb"),
    lambda: open("/proc/{agent}/environ", "rb").read(),
    lambda: open({str(fleet.home / "keys" / "node-node-1.key")!r}),
    lambda: open({str(fleet.home / "nodes" / "node-1" / "flight" / "00000001.rec")!r}),
):
    try:
        action()
    except PermissionError:
        continue
    os._exit(1)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_k1_the_table_names_every_ring() -> None:
    """docs/rings.md has one row a ring, in order."""
    rows = re.findall(r"^\| (\d) \|", DOCS.read_text(), re.MULTILINE)
    assert rows == ["0", "1", "2", "3"]
