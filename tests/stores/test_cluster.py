"""A fleet whose store is one slot of a cluster: everything in one place, which may move."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from node_agent.storecheck import store_places
from node_agent.storelink import connect, disconnect
from runner import App, storelink
from runner.errors import ConfigError
from runner.wire.cluster import cluster_of, keys_of, owner_in, places_in, slot_of
from runner.wire.keys import Keys
from tests.scale.fleet import TASK, running
from tests.stores.servers import TAG, clustered
from tests.support.wait import wait_until

SLOTS = [
    [0, 5460, [b"10.0.0.1", 7001, b"id1", []], [b"10.0.0.4", 7004, b"id4", []]],
    [5461, 16383, [b"", 7002, b"id2", []]],
]


def test_a_fleet_works_in_one_slot_of_a_cluster_and_moves_with_it(tmp_path: Path) -> None:
    """Jobs run, also after a failover and after the slot has moved; no key lies elsewhere; no job may reach a node."""
    with (
        clustered(tmp_path) as store,
        running(journal=False) as fleet,
        App(home=fleet.home, redis_url=store.url) as app,
    ):
        agent = fleet.start("a", slots=2, wait=False, RINGFENCE_REDIS=store.url)
        assert app.call(TASK).result(timeout=20.0) == 1
        assert app.call(TASK, kwargs={"hold_ms": 0}, countdown=0.2).result(timeout=20.0) == 1
        long = app.call(TASK, kwargs={"hold_ms": 60_000})
        wait_until(lambda: long.status().state == "running", "the job to run")
        source = store.owner()
        store.fail_over()
        assert app.call(TASK).result(timeout=20.0) == 1
        store.move(next(port for port in store.ports if port != source))
        assert app.call(TASK).result(timeout=20.0) == 1
        assert long.kill(wait=10.0).outcome == "killed"
        with store.node(store.owner()) as owner:
            keys = list(owner.scan_iter(count=1000))
            assert keys
            assert all(key.startswith(b"{" + TAG.encode() + b"}") for key in keys)
        for port in set(store.everywhere) - {store.owner()}:
            with store.node(port) as node:
                wait_until(lambda node=node: node.dbsize() == 0, "no key elsewhere")  # type: ignore[misc]  # late binding

        async def places() -> list[tuple[str, int]]:
            client = connect(store.url)
            try:
                return await store_places(client)
            finally:
                await disconnect(client)

        assert {port for _, port in asyncio.run(places())} == set(store.everywhere)
        assert not agent.dead(), fleet.words_of(agent)


def test_rqs_own_classes_find_the_jobs_below_their_prefix() -> None:
    """With RQ_KEY_PREFIX set to the tag's, RQ calls hashes, lanes and channels what the fleet calls them."""
    code = (
        "from rq import Queue; from rq.job import Job; from rq.command import PUBSUB_CHANNEL_TEMPLATE as channel;"
        "print(Queue.redis_queue_namespace_prefix, Job.redis_job_namespace_prefix, channel)"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(
        words, env={**os.environ, "RQ_KEY_PREFIX": f"{{{TAG}}}rq"}, capture_output=True, text=True, check=True
    )
    keys = keys_of(f"redis+cluster://a/{TAG}")
    assert said.stdout.split() == [keys.queue(""), keys.job(""), f"{keys.rq}pubsub:%s"]
    assert keys_of("redis://a") == Keys()


@pytest.mark.parametrize("reply", [None, [], [[0, 1]], [[0, 16383]], [["a", 2, []]], [[0, 16383, [b"a"]]], {"x": 1}])
def test_an_odd_answer_names_no_owner(reply: object) -> None:
    """Whatever a node answers, no address is guessed."""
    assert owner_in(reply, 5, "h") is None
    assert places_in(reply, "h") == ()


def test_the_owner_is_the_first_node_of_the_slot_s_range() -> None:
    """A node without a name is meant by the address that was asked; replicas are places, never owners."""
    assert owner_in(SLOTS, 5460, "h") == ("10.0.0.1", 7001)
    assert owner_in(SLOTS, 5461, "h") == ("h", 7002)
    assert places_in(SLOTS, "h") == (("10.0.0.1", 7001), ("10.0.0.4", 7004), ("h", 7002))


def test_slots_are_those_of_the_servers() -> None:
    """The specification's own example, and redis-py's function."""
    assert slot_of("123456789") == 0x31C3 % 16384
    for tag in ("a", TAG, "x_y.z-1"):
        assert slot_of(tag) == redis.crc.key_slot(f"{{{tag}}}".encode())


@pytest.mark.parametrize(
    "url",
    [
        *("redis+cluster://a", "redis+cluster:///tag", "redis+cluster://a/ta{g", "redis+cluster://a:x/tag"),
        *("redis+cluster://a/tag?db=1", "redis+cluster://a/tag?ssl_ca_certs=/ca", "redis+cluster://a/tag/0"),
    ],
)
def test_a_url_that_is_none_is_an_error(url: str) -> None:
    """Nothing of it is left out or guessed."""
    with pytest.raises(ConfigError):
        storelink.open_store(url)


def test_a_cluster_s_url_is_read_whole() -> None:
    """User, password, several nodes, IPv6, TLS."""
    found = cluster_of("rediss+cluster://me:p%40s@a:1,[::1]:2,c/t?ssl_ca_certs=/ca")
    assert found is not None
    assert (found.places, found.tag) == ((("a", 1), ("::1", 2), ("c", 6379)), "t")
    assert found.login == {"username": "me", "password": "p@s"}
    assert found.tls == {"ssl_ca_certs": "/ca", "ssl_check_hostname": True}


def test_a_cluster_that_is_away_is_said_so_without_its_password() -> None:
    """Nobody answers: the error names the slot's tag and the address, and no secret."""
    client = storelink.open_store("redis+cluster://me:secret@127.0.0.1:1/tag")
    with client, pytest.raises(redis.exceptions.ConnectionError) as told:
        client.ping()
    assert "{tag}" in str(told.value)
    assert "secret" not in str(told.value)
