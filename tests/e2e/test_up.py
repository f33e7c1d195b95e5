"""`up`: starts, refuses what it must, ends without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support import fleet as fleets
from tests.support import valkey as stores
from tests.support.fleet import CLI, Fleet, processes_with
from tests.support.wait import wait_until

STRANGER = 30_000
ATTACK = "import pathlib; pathlib.Path({path!r}).write_text('ran')"


@pytest.fixture(scope="module")
def small() -> Iterator[Fleet]:
    """A fleet of one node with one slot; each test leaves it whole."""
    with fleets.running("--slots", "1") as found:
        yield found


def pids_of(home: Path) -> list[int]:
    """Return the processes that name this home in their arguments: `up`, its agents and its store."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(home) in words:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(home: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end store, agents and jobs, and the exit code is 0."""
    (home / "work").mkdir()
    with fleets.up(home / "h", home / "work", ["--slots", "1"]) as fleet:
        mark = f"mark-{os.getpid()}-{number}"
        fleet.detach("--", "python3", "-c", "import time; time.sleep(60)", mark)
        wait_until(lambda: processes_with(mark), "the job to run")
        fleet.process.send_signal(number)
        assert fleet.process.wait(30) == 0
    assert processes_with(mark) == []
    assert pids_of(home) == []


def test_a_killed_up_takes_everything_along(home: Path) -> None:
    """SIGKILL to `up` ends its daemons and their jobs too; the next `up` on this home starts."""
    (home / "work").mkdir()
    mark = f"mark-{os.getpid()}-kill"
    with fleets.up(home / "h", home / "work", ["--slots", "1"]) as fleet:
        fleet.detach("--", "python3", "-c", "import time; time.sleep(60)", mark)
        wait_until(lambda: processes_with(mark), "the job to run")
        fleet.process.kill()
        fleet.process.wait()
        wait_until(lambda: not pids_of(home) and not processes_with(mark), "all to be gone")
    with fleets.up(home / "h", home / "work", ["--slots", "1"]) as again:
        assert again.run("run", "--", "true").returncode == 0


def test_a_second_up_on_the_same_home_is_refused(small: Fleet) -> None:
    """The message says what runs there; the first one is not disturbed."""
    second = small.run("up")
    assert second.returncode == 78
    assert "another `ringfence up`" in second.stderr
    assert small.run("run", "--", "true").returncode == 0


def test_a_dead_agent_and_a_dead_store_come_back(small: Fleet) -> None:
    """SIGKILL to each daemon: `up` starts it again, and jobs run."""
    agent = int(str(small.json("nodes")[0]["pid"]))
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: small.json("nodes")[0]["pid"] != agent, "a new agent", 30)
    store = next(pid for pid in pids_of(small.home) if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(store, signal.SIGKILL)
    wait_until(lambda: small.run("run", "--", "true").returncode == 0, "a job to run again", 40)


def test_the_store_of_up_is_set_as_docs_say(small: Fleet) -> None:
    """docs/stores.md, "Settings": what `up` starts keeps its data, removes nothing and takes no value of any size."""
    url = json.loads((small.home / "client.json").read_text())["redis_url"]
    with redis.Redis.from_url(url) as store:
        found = store.config_get("appendonly", "appendfsync", "maxmemory-policy", "proto-max-bulk-len")
        assert found == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "proto-max-bulk-len": str(64 << 20),
        }
        with pytest.raises(redis.RedisError):
            store.set("rf:large", bytes((64 << 20) + 1))


def test_a_job_that_no_node_can_take_says_why_it_waits(small: Fleet) -> None:
    """`run` does not hang in silence; the second Ctrl-C stops waiting for a receipt, and the kill stays in force."""
    command = small.start("run", "--node", "no-such-node", "--", "true")
    assert command.stderr is not None
    named, waits = (command.stderr.readline() for _ in range(2))
    assert "waits" in waits
    command.send_signal(signal.SIGINT)
    assert "killing" in command.stderr.readline()
    command.send_signal(signal.SIGINT)
    _, told = command.communicate(timeout=30)
    assert (command.returncode, "stays in force" in told) == (130, True), told
    job = named.split()[-1]
    assert small.state(job) in {"killed", "killing"}


def test_the_node_kills_while_the_store_is_away(small: Fleet) -> None:
    """`agent kill` needs no store; when the store is back, the job's end is there."""
    mark = f"mark-{os.getpid()}-away"
    job = small.detach("--", "python3", "-c", "import time; time.sleep(60)", mark)
    wait_until(lambda: processes_with(mark), "the job to run")
    store = next(pid for pid in pids_of(small.home) if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(store, signal.SIGSTOP)
    try:
        done = small.run("agent", "kill", job, timeout_s=20)
    finally:
        os.kill(store, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    assert "0 survivors" in done.stdout
    assert processes_with(mark) == []
    small.wait_state(job, "killed")


def test_an_outside_store_is_used(home: Path) -> None:
    """With --redis no store is started, and the URL stays out of the agents' arguments."""
    (home / "work").mkdir()
    with stores.running() as store:
        url = store.url
        words = ["--slots", "1", "--redis", url]
        with fleets.up(home / "h", home / "work", words) as fleet:
            assert fleet.run("run", "--", "true").returncode == 0
            assert not (fleet.home / "store").exists()
            agent = int(str(fleet.json("nodes")[0]["pid"]))
            assert url.encode() not in Path(f"/proc/{agent}/cmdline").read_bytes()


def test_a_home_too_deep_for_sockets_is_refused(home: Path) -> None:
    """Exit code 78 and the way out, before anything starts."""
    done = subprocess.run(
        [*CLI, "up", "--home", str(home / ("x" * 90))], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 78
    assert "shorter home" in done.stderr


def test_attack_18_nothing_of_the_environment_or_folder_is_run(home: Path) -> None:
    """PYTHONPATH, user site, and packages of our names in the current folder: `up` and its agents load none."""
    evil = home / "evil"
    for name in ("runner", "node_agent", "broker", "sitecustomize", "usercustomize", "dotenv"):
        (evil / name).mkdir(parents=True)
        (evil / name / "__init__.py").write_text(ATTACK.format(path=str(evil / f"{name}.ran")))
    (evil / ".env").write_text("RINGFENCE_REDIS=redis://evil\nRINGFENCE_HOME=/evil\n")
    (evil / "client.json").write_text("{}")
    (evil / "h").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(evil), "PYTHONUSERBASE": str(evil)}
    words = [sys.executable, "-I", "-m", "runner.cli", "--home", str(home / "h"), "up", "--slots", "1"]
    with subprocess.Popen(
        words, cwd=evil, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        done = subprocess.run(
            [*CLI, "--home", str(home / "h"), "run", "--", "true"],
            cwd=evil,
            env=environment,
            capture_output=True,
            check=False,
            timeout=30,
        )
        process.terminate()
        process.communicate(timeout=40)
    assert done.returncode == 0
    assert list(evil.glob("*.ran")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_attack_18_root_starts_itself_again_in_isolation() -> None:
    """The console script as root runs the command in an interpreter that ignores the environment."""
    script = Path(sys.executable).with_name("ringfence")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "typer.py").write_text("raise SystemExit(99)")
        done = subprocess.run(
            [script, "--version"],
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_attack_55_another_user_reaches_nothing_of_a_root_fleet(small: Fleet) -> None:
    """Another uid can't connect to any socket, list or read anything below the home."""
    found = wait_until(lambda: sorted(small.home.glob("s/*")), "the agent's socket")
    sockets = [*found, small.home / "store" / "valkey.sock"]
    below = [path for path in small.home.rglob("*") if not path.is_socket()]
    assert len(below) >= 12
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        os._exit(sum(_reaches(path) for path in (*sockets, *below, small.home)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _reaches(path: Path) -> bool:
    try:
        if path.is_dir():
            return bool(list(path.iterdir()))
        if not path.is_socket():
            return bool(path.open("rb"))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
    except OSError:
        return False
    return True
