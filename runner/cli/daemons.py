"""`ringfence store`: the embedded store alone, in the foreground, for a Procfile or a service.

Called by commands.py. Must never start a second store on a home, nor leave client.json with another store's URL.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import typer

from runner import keyring
from runner.cli import launch
from runner.cli import store as stores
from runner.cli.children import environment
from runner.cli.options import HomeOption, RedisOption
from runner.cli.site import site_of
from runner.cli.up import only_one
from runner.errors import UsageError

__all__ = ["store"]

_LAUNCHER: Final = launch.__file__


def store(context: typer.Context, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Run the embedded store alone in the foreground, for a Procfile; `up` starts its own."""
    site = site_of(context, home, redis)
    if site.redis is not None:
        raise UsageError("store runs the embedded store: leave out --redis")
    keyring.init(site.home)
    with only_one(site.home) as lock:
        embedded = stores.prepare(site.home.path)
        keyring.init(site.home, redis_url=embedded.url)
        # The store keeps the lock for as long as it lives.
        os.set_inheritable(lock, True)
        uid = launch.NO_UID if embedded.uid is None else str(embedded.uid)
        words = [str(os.getppid()), str(int(signal.SIGTERM)), uid, str(embedded.program), str(embedded.config)]
        os.execve(sys.executable, [sys.executable, "-I", "-S", _LAUNCHER, *words], environment())  # noqa: S606 - no shell
