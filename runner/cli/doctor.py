"""`ringfence doctor`: what this host can enforce, and whether this home can be used; each fault with its fix.

Port: node_agent.containment. Called by commands.py. Must never show the store's password or a key, and never
call fit what it has not tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import typer

from node_agent.containment import probe
from runner import keyring
from runner.cli import store
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_fields, print_json, print_line
from runner.cli.site import Site, site_of
from runner.errors import RingfenceError
from runner.home import check_safe

__all__ = ["doctor"]

_EXIT_UNFIT: Final = 78


@dataclass(frozen=True, slots=True)
class _Check:
    """One thing looked at. ``detail`` says what is wrong and how it is put right, or what was found."""

    name: str
    ok: bool
    detail: str


def doctor(
    context: typer.Context,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try what this host can enforce and check home, keys and store; exits 78 if no isolated job can run here."""
    site = site_of(context, home, redis)
    host = asyncio.run(probe.probe(site.home.path))
    checks = [_tried(name, check) for name, check in _checks(site)]
    if as_json:
        print_json({"host": host.as_json(), "checks": checks})
    else:
        print_line(f"isolation level: {host.level}")
        print_fields([(f"missing: {missing.what}", f"{missing.why}; fix: {missing.fix}") for missing in host.missing])
        print_fields([(f"{'ok ' if check.ok else 'BAD'} {check.name}", check.detail) for check in checks])
    raise typer.Exit(0 if host.level in {"A", "B"} else _EXIT_UNFIT)


def _checks(site: Site) -> Sequence[tuple[str, Callable[[], str]]]:
    def home_is_safe() -> str:
        check_safe(site.home)
        return str(site.home.path)

    def keys() -> str:
        return ", ".join(f"{view.kind} {view.id}" for view in keyring.show(site.home) if view.kind != "trusted")

    def nodes() -> str:
        found = site.app().nodes()
        return f"answers; nodes: {', '.join(f'{node.name} {node.state}' for node in found) or 'none'}"

    return (
        ("embedded store", lambda: str(store.binary())),
        ("home", home_is_safe),
        ("keys", keys),
        ("store", nodes),
    )


def _tried(name: str, check: Callable[[], str]) -> _Check:
    try:
        return _Check(name, True, check())
    except RingfenceError as error:
        return _Check(name, False, str(error))
