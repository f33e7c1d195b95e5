"""`ringfence agent` and `agent kill`: one node agent in the foreground, and a kill on this host without the store.

Port: node_agent.local, node_agent.egress, broker.vault. Called by commands.py. Must never pass a secret on the agent's
command line, and never trust a socket that another user serves (the agent's own module checks that).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from broker.client import CONTROL
from broker.vault.operator import COUNTER
from node_agent import local
from node_agent.egress import SOCKET_NAME
from runner.cli import exitcode
from runner.cli.kill import receipt_line
from runner.cli.options import HomeOption, JobArgument, JsonOption, RedisOption
from runner.cli.output import print_json, print_line
from runner.cli.site import Site, site_of
from runner.errors import ConfigError
from runner.home import Home
from runner.wire import record
from runner.wire.errors import WireError
from runner.wire.receipt import Receipt

__all__ = ["agent", "sockets"]

_EXTRA_S: Final = 5.0

agent = typer.Typer(
    name="agent",
    help="Run one node agent in the foreground; `agent kill JOB` kills on this host without the store.",
    invoke_without_command=True,
)


@agent.callback()
def start(
    context: typer.Context,
    name: Annotated[str | None, typer.Option("--name", metavar="NODE", help="Default: the host's name.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", metavar="N", min=1, help="Jobs at a time; default 4.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Default HOME/policy.toml.")] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Run one node agent in the foreground; its other settings are RINGFENCE_* variables (docs/operations.md)."""
    site = site_of(context, home, redis)
    context.obj = site
    if context.invoked_subcommand is None:
        _become_agent(site, name, slots, policy)


@agent.command(name="kill")
def kill(
    context: typer.Context,
    job: JobArgument,
    grace: Annotated[float, typer.Option("--grace", metavar="S", min=0, help="SIGTERM first.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="End a running grace now.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="R")] = "",
    wait: Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for the receipt.")] = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill a job that runs on this host, through its agent's own socket; works while the store is away."""
    place = site_of(context, home, redis).home
    request = {"op": "kill", "job": job, "grace_s": grace, "force": force, "reason": reason, "wait_s": wait}
    receipts = [receipt for path in sockets(place) if (receipt := _ask(path, request, grace + wait)) is not None]
    found = [receipt for receipt in receipts if receipt.outcome != "unknown"] or receipts[:1]
    if as_json:
        print_json(found)
    else:
        for receipt in found:
            print_line(receipt_line(receipt))
    raise typer.Exit(exitcode.of_kill(found) if found else exitcode.UNCONFIRMED)


def _become_agent(site: Site, name: str | None, slots: int | None, policy: Path | None) -> None:
    words = [sys.executable, "-I", "-m", "node_agent", "--home", str(site.home.path)]
    for option, value in (("--name", name), ("--slots", slots), ("--policy", policy and policy.absolute())):
        if value is not None:
            words += [option, str(value)]
    if site.redis is not None:
        # The URL may hold a password, and a command line can be read by everybody on the host.
        os.environ["RINGFENCE_REDIS"] = site.redis
    os.execv(words[0], words)  # noqa: S606 - becoming the agent is the command's job


#: Sockets in the same folder that are no agent's.
_OTHERS: Final = frozenset({SOCKET_NAME, CONTROL, COUNTER})


def sockets(place: Home) -> list[Path]:
    """Return where agents of this home listen. Raises ConfigError: nowhere."""
    found = sorted(path for path in place.sockets.glob("*") if path.name not in _OTHERS)
    if not found:
        raise ConfigError(f"no agent's socket in {place.sockets}: is an agent of this --home running on this host?")
    return found


def _ask(path: Path, request: dict[str, object], timeout_s: float) -> Receipt | None:
    try:
        answer = local.ask(path, request, timeout_s + _EXTRA_S)
    except (ConnectionError, TimeoutError):
        return None
    try:
        return record.decode(Receipt, answer.get("receipt", answer))
    except WireError:
        return None
