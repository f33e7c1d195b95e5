"""A fleet reaches its store by TLS with certificates on both sides, and by Sentinel over a failover (A-L04)."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from node_agent.storecheck import store_places
from node_agent.storelink import connect, disconnect
from runner import App, storelink
from runner.errors import StoreError
from tests.stores.servers import certificates, guarded, tls_front
from tests.support.rig import rigged
from tests.support.wait import wait_until

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl makes certificates here")


@needs_openssl
def test_tls_wants_both_certificates_and_the_right_name(tmp_path: Path) -> None:
    """A job goes all the way by rediss://; no client's certificate, another authority or name is no connection."""
    made = certificates(tmp_path)
    with rigged() as rig, tls_front(rig.store.socket, made) as port:
        cert, key = made.client
        own = f"ssl_certfile={cert}&ssl_keyfile={key}"
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={made.ca}&{own}"
        rig.start("a", RINGFENCE_REDIS=url)
        with App(home=rig.home, redis_url=url) as app:
            assert app.command(["true"]).outcome(20).state == "finished"
        wrong = (
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={made.ca}",
            f"rediss://127.0.0.1:{port}?{own}",
            f"rediss://localhost:{port}?ssl_ca_certs={made.ca}&{own}",
        )
        with ThreadPoolExecutor(len(wrong)) as pool:
            told = list(pool.map(_refusal, wrong))
        assert all("CERTIFICATE_VERIFY_FAILED" in word for word in told[1:]), told
        rig.nodes["a"].stop()
        rig.app.close()


def test_sentinel_names_the_store_before_and_after_a_failover(tmp_path: Path) -> None:
    """Client and daemon find the store, and the other one after the failover; no job may be granted either."""
    with guarded(tmp_path) as store, rigged() as rig, App(home=rig.home, redis_url=store.url) as app:
        first = app.command(["true"])

        async def places() -> list[tuple[str, int]]:
            client = connect(store.url)
            try:
                return await store_places(client)
            finally:
                await disconnect(client)

        found = asyncio.run(places())
        assert {port for _, port in found} == {store.sentinel, *store.places}
        rig.redis.close()
        rig.redis = redis.Redis(port=store.primary())
        rig.start("a", RINGFENCE_REDIS=store.url)
        assert first.outcome(20).state == "finished"
        store.fail_over()
        wait_until(lambda: _finishes(app), "a job to be enqueued and run after the failover", 30)
        rig.nodes["a"].stop()
        rig.app.close()
        rig.redis.close()


def _refusal(url: str) -> str:
    """Return why a client of this URL has no connection."""
    client = storelink.open_store(url)
    try:
        with pytest.raises(redis.ConnectionError) as caught:
            client.ping()
        return str(caught.value)
    finally:
        storelink.close_store(client)


def _finishes(app: App) -> bool:
    try:
        return app.command(["true"]).outcome(5).state == "finished"
    except (StoreError, TimeoutError):
        return False
