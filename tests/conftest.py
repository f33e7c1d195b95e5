"""Fixtures that every test shares. Each test must leave the machine and its store as it found them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
from hypothesis.configuration import set_hypothesis_home_dir

from tests.support import agents, leaks, scratch, shell
from tests.support.valkey import Valkey, running

CACHE = Path(__file__).parents[1] / ".cache"

# The bytecode of tests and tools is kept where nothing else looks for it, for this process alone: what it starts gets
# neither setting. Compiling some 300 files with their assertions anew would cost each test process seconds; so would
# what hypothesis keeps of these files and of Unicode.
sys.pycache_prefix = str(CACHE / "bytecode")
sys.dont_write_bytecode = False
set_hypothesis_home_dir(CACHE / "hypothesis")

hypothesis.settings.register_profile("ringfence", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("ringfence")

scratch_key = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Give this test process a folder of its own for temporary files, so that what is left in it can be seen.

    A shell that starts tests in the background has them ignore Ctrl-C, and so would every program that they start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = Path(tempfile.mkdtemp(prefix="rf-", dir=scratch.root()))
    path.chmod(0o711)  # daemons and jobs under other users must reach what they are granted below it
    config.stash[scratch_key] = path
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the whole test process shared, and remove the folder for temporary files."""
    agents.close()
    shell.close()
    if (path := config.stash.get(scratch_key, None)) is not None:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def node_tag(worker_id: str) -> str:
    """A word that every node name of this test process holds; leftovers are told apart by it."""
    return f"t{worker_id}{secrets.token_hex(3)}"


@pytest.fixture
def node_name(node_tag: str) -> str:
    """A node name that no other test and no other test process uses."""
    return f"{node_tag}-{secrets.token_hex(3)}"


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    """The store of this test process; take `valkey`, unless a fixture of wider scope needs it."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_keeper(valkey_server: Valkey) -> Iterator[redis.Redis]:
    """The connection that empties and inspects the store; tests open clients of their own."""
    client = valkey_server.client()
    client.ping()
    yield client
    client.close()


@pytest.fixture
def valkey(valkey_server: Valkey, valkey_keeper: redis.Redis) -> Iterator[Valkey]:
    """An empty store for one test; afterwards, no key in it may live for ever without an owner."""
    valkey_keeper.flushall()
    yield valkey_server
    stale = leaks.stale_keys(valkey_keeper)
    if stale:
        pytest.fail(f"keys without a TTL and without an owner: {', '.join(stale)}", pytrace=False)


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty folder with a path short enough for the sockets of a home below it."""
    with scratch.folder(mode=0o711) as path:
        yield path


@pytest.fixture(autouse=True)
def nothing_left(node_tag: str) -> Iterator[None]:
    """Fail a test that leaves descriptors, children, mounts, control groups or temporary files behind."""
    before = leaks.snapshot(node_tag)
    yield
    found = leaks.complaints(before, lambda: leaks.snapshot(node_tag))
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)
