"""Celery's and Dramatiq's side of peers.py, in an environment that has them.

PEERS_SIDE names one, PEERS_SOCKET its store. Run by itself it is the client: each order on standard input is a number,
so many no-op jobs are enqueued one by one, and the seconds that took are the answer. The workers are started by
peers.py and import this file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

SOCKET = os.environ.get("PEERS_SOCKET", "")


def nothing() -> int:
    """Return 1."""
    return 1


def celery() -> Callable[[], object]:
    """Return what enqueues one job."""
    return app.task(name="noop")(nothing).delay  # type: ignore[no-any-return]  # of another environment


def dramatiq() -> Callable[[], object]:
    """Return what enqueues one job."""
    return noop.send  # type: ignore[no-any-return]  # of another environment


def main() -> None:
    """Obey."""
    send = {"celery": celery, "dramatiq": dramatiq}[os.environ["PEERS_SIDE"]]()
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            send()
        sys.stdout.write(f"{time.perf_counter() - begun}\n")
        sys.stdout.flush()


if os.environ.get("PEERS_SIDE") == "celery":
    url = f"redis+socket://{SOCKET}"
    app: Any = import_module("celery").Celery("peers_side", broker=url, backend=url)
    app.conf.update(result_expires=3600, worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)
    app.task(name="noop")(nothing)
if os.environ.get("PEERS_SIDE") == "dramatiq":
    redis_broker: Any = import_module("dramatiq.brokers.redis")
    results: Any = import_module("dramatiq.results")
    backends: Any = import_module("dramatiq.results.backends")
    broker = redis_broker.RedisBroker(url=f"unix://{SOCKET}")
    broker.add_middleware(results.Results(backend=backends.RedisBackend(url=f"unix://{SOCKET}")))
    import_module("dramatiq").set_broker(broker)
    noop = import_module("dramatiq").actor(store_results=True)(nothing)


if __name__ == "__main__":
    main()
