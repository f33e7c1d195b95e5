"""The test support does what the other tests rely on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.support import leaks, scratch
from tests.support.valkey import Valkey, running
from tests.support.wait import await_until, wait_until

TAG = "no-such-node"
LONGEST_LOOK_S = 0.008


@contextmanager
def seen(*wanted: str) -> Iterator[None]:
    """The block's traces are noticed: one complaint a word, in this order."""
    before = leaks.snapshot(TAG)
    yield
    found = leaks._grown(before, leaks.snapshot(TAG))
    assert [line.partition(":")[0] for line in found] == list(wanted)


def test_wait_until_gives_the_value() -> None:
    """Waiting ends with the first truthy value."""
    numbers = count()
    assert wait_until(lambda: next(numbers), "a number other than 0") == 1


def test_wait_until_names_what_it_waited_for() -> None:
    """A condition that stays false fails with its name and the last value."""
    with pytest.raises(AssertionError, match=r"the moon.*last seen: 0"):
        wait_until(lambda: 0, "the moon", timeout_s=0.01)


def test_await_until_takes_functions_and_coroutines() -> None:
    """On a loop, both kinds of predicate are waited for, and a late one fails."""

    async def ready() -> str:
        return "ready"

    async def scenario() -> None:
        assert await await_until(ready, "a coroutine") == "ready"
        assert await await_until(lambda: 7, "a function") == 7
        with pytest.raises(AssertionError, match="never"):
            await await_until(lambda: None, "never", timeout_s=0.01)

    asyncio.run(scenario())


def test_a_test_gets_an_empty_store(valkey: Valkey) -> None:
    """The store holds nothing when a test begins."""
    client = valkey.client()
    assert client.dbsize() == 0
    client.set("left", "over", ex=60)
    client.close()


def test_a_second_test_gets_an_empty_store_too(valkey: Valkey) -> None:
    """What one test wrote is gone in the next."""
    client = valkey.client()
    assert client.dbsize() == 0
    client.close()


def test_the_socket_path_is_short(valkey: Valkey, home: Path) -> None:
    """Socket paths stay below the kernel's limit with room for a home's own names."""
    assert len(os.fsencode(valkey.socket)) < 100
    assert len(os.fsencode(home)) <= scratch.LONGEST_ROOT + 20


def test_the_store_dies_with_its_process() -> None:
    """A killed test process takes its server along."""
    code = (
        "from tests.support.valkey import running\n"
        "with running() as server:\n    print(server.pid, flush=True)\n    input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        folder = next(entry for entry in scratch.root().iterdir() if (entry / "s").exists() and _holds(entry, pid))
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _zombie(pid), "the server to die")
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()


def test_a_key_without_ttl_is_seen(valkey_keeper: object, valkey: Valkey) -> None:
    """Unowned keys without a TTL and ended jobs that stay are named; owned ones are not."""
    client = valkey.client()
    client.set("rf:forgotten", 1)
    client.set("rf:seq", 1)
    client.hset("rq:job:ended", "status", "finished")
    client.hset("rq:job:waiting", "status", "queued")
    assert leaks.stale_keys(client) == ["rf:forgotten", "rq:job:ended"]
    client.flushall()
    client.close()


def test_an_open_descriptor_is_seen() -> None:
    """A descriptor left open is a leak."""
    with seen("open descriptor"):
        left = os.open("/dev/null", os.O_RDONLY)
    os.close(left)


def test_a_child_is_seen() -> None:
    """A child process left running is a leak."""
    with seen("child process"):
        child = subprocess.Popen(["sleep", "30"])
    child.kill()
    child.wait()


def test_a_temporary_file_is_seen() -> None:
    """A file left in the folder for temporary files is a leak."""
    path = scratch.root() / "left"
    with seen("temporary file"):
        path.touch()
    path.unlink()


def test_what_goes_away_in_time_is_no_leak() -> None:
    """A child that is just ending is waited for, not blamed."""
    before = leaks.snapshot(TAG)
    child = subprocess.Popen(["true"])

    def look() -> leaks.Snapshot:
        child.poll()
        return leaks.snapshot(TAG)

    assert leaks.complaints(before, look) == []


@pytest.mark.alone
def test_looking_is_cheap() -> None:
    """The checks, one look before and one after, cost a test less than 8 ms."""
    spent_s = []
    for _ in range(5):
        begin = time.perf_counter()
        leaks.snapshot(TAG)
        spent_s.append(time.perf_counter() - begin)
    assert min(spent_s) < LONGEST_LOOK_S / 2


def test_a_store_takes_more_options() -> None:
    """A test may start a server of its own with options that differ."""
    with running(["--maxmemory", "5mb"]) as server:
        client = server.client()
        assert client.config_get("maxmemory") == {"maxmemory": "5242880"}
        client.close()


def _holds(folder: Path, pid: int) -> bool:
    return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
