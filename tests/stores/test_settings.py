"""What is wrong with a store's settings is found by INFO alone and said with the next step (A-L05)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from node_agent.storecheck import faults, told
from runner import App, keyring
from runner.errors import StoreError
from runner.home import Home
from tests.support import valkey

GOOD: dict[str, object] = {
    "maxmemory_policy": "noeviction",
    "maxmemory": 0,
    "used_memory": 10**9,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "role": "master",
    "redis_version": "7.2.4",
}


def test_a_good_store_is_not_spoken_of() -> None:
    """No limit, no eviction, an append-only file, the primary, a version that is supported."""
    assert told(GOOD) == ()
    assert told(GOOD | {"maxmemory": 2 * 10**9}) == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"maxmemory_policy": "volatile-ttl"}, "`maxmemory-policy noeviction`"),
        ({"maxmemory": 10**9 + 1}, "`maxmemory`"),
        ({"aof_enabled": 0}, "`appendonly yes`"),
        ({"aof_last_write_status": "err"}, "its log"),
        ({"role": "slave"}, "name the primary"),
        ({"redis_version": "6.0.16"}, "6.2 or later"),
        ({"redis_version": "odd"}, "6.2 or later"),
    ],
)
def test_each_fault_is_named_with_its_step(change: dict[str, object], word: str) -> None:
    """One fault, one sentence."""
    (found,) = told(GOOD | change)
    assert word in found


def test_a_l05_a_full_store_refuses_an_enqueue_with_the_reason(tmp_path: Path) -> None:
    """Nothing of the job is written; with room again the same call goes through."""
    home = tmp_path / "h"
    with valkey.running(("--maxmemory-policy", "noeviction")) as server, server.client() as admin:
        keyring.init(Home(home), redis_url=server.url)
        with App(home=home) as app:
            app.command(["true"])
            before = admin.dbsize()
            admin.config_set("maxmemory", "1mb")
            with pytest.raises(StoreError, match="full and takes no writes"):
                app.command(["true"])
            assert admin.dbsize() == before
            admin.config_set("maxmemory", "0")
            assert app.command(["true"]).status().state == "queued"


def test_a_real_server_answers_so() -> None:
    """The names are those of a real INFO reply; a store that is away is not called bad."""

    async def look(url: str) -> tuple[str, ...]:
        async with Redis.from_url(url) as client:
            return await faults(client)

    options = ("--appendonly", "yes", "--maxmemory", "1100000", "--maxmemory-policy", "noeviction")
    with valkey.running(options) as server:
        (found,) = asyncio.run(look(server.url))
        assert "nine tenths" in found
    with valkey.running(("--maxmemory-policy", "allkeys-lru")) as server:
        assert len(asyncio.run(look(server.url))) == 2
    assert asyncio.run(look(server.url)) == ()
