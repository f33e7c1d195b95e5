"""Which home and which store a command talks to: options before or after the command, then the environment.

Called by every command. Must never read a setting from the current folder, nor show a store's URL with its password.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import typer

from runner import home as homes
from runner.app import App
from runner.errors import UsageError
from runner.home import Home
from runner.wire import ids

__all__ = ["Site", "site_of"]


@dataclass(frozen=True, slots=True)
class Site:
    """The home (--home) and the store (--redis) as given; None means: the default."""

    home_option: Path | None = None
    redis: str | None = None

    @property
    def home(self) -> Home:
        """The home of this command. Raises ConfigError."""
        return homes.locate(self.home_option)

    def app(self, tenant: str | None = None) -> App:
        """Return the API on this site as one tenant, $RINGFENCE_TENANT by default. Raises ConfigError, GrammarError."""
        chosen = tenant or os.environ.get("RINGFENCE_TENANT") or ids.DEFAULT_TENANT
        return App(home=self.home.path, redis_url=self.redis, tenant=chosen)


def site_of(context: typer.Context, home: Path | None, redis: str | None) -> Site:
    """Return the site of a command: its own options, joined with those that stood before it.

    Raises:
        UsageError: an option stands before and after the command with different values.
    """
    before = context.obj if isinstance(context.obj, Site) else Site()
    for option, first, second in (("--home", before.home_option, home), ("--redis", before.redis, redis)):
        if first is not None and second is not None and first != second:
            raise UsageError(f"{option} is given twice, with different values")
    return Site(home or before.home_option, redis or before.redis)
