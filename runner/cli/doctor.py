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
from node_agent.containment.host import HostReport, Rung
from runner import keyring
from runner.cli import egress, store, vaultdoctor
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_fields, print_json, print_line, print_table
from runner.cli.site import Site, site_of
from runner.errors import RingfenceError
from runner.home import check_safe

__all__ = ["doctor"]

_EXIT_UNFIT: Final = 1


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
    """Try every isolation level here, say what each promise rests on, and check home, keys, store; exits 1 below B."""
    site = site_of(context, home, redis)
    host = asyncio.run(probe.probe(site.home.path, every=True))
    checks = [_tried(name, check) for name, check in _checks(site)]
    if as_json:
        promises = [{"name": each.name, "kept": each.kept, "how": each.how} for each in host.promises]
        facts: dict[str, object] = {"promises": promises, "why": host.why, "fix": host.fix, "higher": host.higher}
        print_json({"host": host.as_json() | facts, "checks": checks})
    else:
        _show(host, checks)
    raise typer.Exit(0 if host.level in {"A", "B"} else _EXIT_UNFIT)


def _show(host: HostReport, checks: Sequence[_Check]) -> None:
    """Print the level, the ladder, every promise, what is missing with its fix, and the checks."""
    what = f"Linux {host.kernel}, cgroup {host.cgroup}, Landlock {host.landlock_abi or 'none'}, uid {host.user}"
    print_line(f"isolation level: {host.level}  ({what})")
    if host.level not in {"A", "B"}:
        print_line("no untrusted job runs on this host")
    if host.higher:
        print_line(host.higher)
    print_line("")
    print_table(("level", "works", "what was seen"), [_rung(rung) for rung in host.tried])
    print_line("")
    rows = [(each.name, "yes" if each.kept else "no", each.how) for each in host.promises]
    print_table(("promise", "kept", "how, or why not"), rows)
    if host.missing:
        print_line("")
        for missing in host.missing:
            print_line(f"missing: {missing.what}: {missing.why}")
            print_line(f"    fix: {missing.fix}")
    print_line("")
    print_fields([(f"{'ok ' if check.ok else 'BAD'} {check.name}", check.detail) for check in checks])


def _rung(rung: Rung) -> tuple[str, str, str]:
    if not rung.works:
        return rung.level, "no", rung.why
    seen = f"{rung.processes_killed} detached processes, up in {rung.spawn_ms:.0f} ms, killed with proof in"
    return rung.level, "yes", f"{seen} {rung.kill_ms:.1f} ms"


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
        ("egress", lambda: egress.describe(site.home)),
        ("vault", lambda: vaultdoctor.describe(site.home)),
    )


def _tried(name: str, check: Callable[[], str]) -> _Check:
    try:
        return _Check(name, True, check())
    except RingfenceError as error:
        return _Check(name, False, str(error))
