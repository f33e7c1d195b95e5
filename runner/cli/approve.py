"""`ringfence vault approve`, `deny` and `pending`: a person's word on secrets that jobs wait for.

Port: broker.vault's operators' socket. Called by vault.py. Must never report a decision that neither this host's broker
nor the job's own node has confirmed.

An attempt (JOB.N) is decided on this host's own socket; a job (JOB) from anywhere, by a command that the client's key
signs and the job's node verifies.
"""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal, cast

import typer

from broker.vault import operator
from broker.vault.errors import VaultBusyError, VaultError, VaultUsageError
from broker.vault.operator import COUNTER
from runner.cli import exitcode
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line, print_table
from runner.cli.site import site_of
from runner.errors import ConfigError, UsageError
from runner.home import Home
from runner.wire import ids
from runner.wire.errors import WireError
from runner.wire.receipt import PauseReceipt

__all__ = ["approve", "deny", "pending"]

WhoArgument = Annotated[str, typer.Argument(metavar="JOB|ATTEMPT", help="From anywhere, or on this host alone.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The secret's name.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="R", help="Kept in the signed command.")]
WaitOption = Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for the node's receipt.")]
_NONE_RUNS: Final = "no broker runs on this home, so nothing waits here: `ringfence broker` starts it"


def approve(
    context: typer.Context,
    who: WhoArgument,
    name: NameArgument,
    reason: ReasonOption = "",
    wait: WaitOption = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let one attempt have a secret whose rule asks for a person; exits 0 done, 3 refused or unconfirmed."""
    _decide(context, "approve", who, name, reason, wait, home=home, redis=redis, as_json=as_json)


def deny(
    context: typer.Context,
    who: WhoArgument,
    name: NameArgument,
    reason: ReasonOption = "",
    wait: WaitOption = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep one attempt from a secret that it waits for; without a word its time runs out, which is a no as well."""
    _decide(context, "deny", who, name, reason, wait, home=home, redis=redis, as_json=as_json)


def pending(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """List the secrets that live jobs of this host wait for, by attempt."""
    reply = _ask(site_of(context, home, redis).home, op="pending")
    found = cast("list[dict[str, str]]", reply["pending"])
    if as_json:
        print_json(found)
        return
    print_table(("ATTEMPT", "SECRET", "RULE"), [(one["attempt"], one["name"], one["rule"]) for one in found])


def _decide(
    context: typer.Context,
    op: Literal["approve", "deny"],
    who: str,
    name: str,
    reason: str,
    wait_s: float,
    *,
    home: HomeOption,
    redis: RedisOption,
    as_json: bool,
) -> None:
    site = site_of(context, home, redis)
    if _is_attempt(who):
        _ask(site.home, op=op, attempt=who, name=name, by=f"uid {os.getuid()}" + (f": {reason}" if reason else ""))
        if as_json:
            print_json({"attempt": who, "secret": name, "outcome": "approved" if op == "approve" else "denied"})
        return
    receipt = site.app().job(who).decide(name, op == "approve", reason=reason, wait=wait_s)
    if as_json:
        print_json(receipt)
    else:
        print_line(_line(receipt, name))
    raise typer.Exit(exitcode.of_pause([receipt]))


def _line(receipt: PauseReceipt, name: str) -> str:
    why = f": {receipt.reason}" if receipt.reason else ""
    if receipt.outcome in ("approved", "denied"):
        return f"{receipt.job}.{receipt.attempt} {name} {receipt.outcome} on {receipt.node}"
    if receipt.outcome == "not_running":
        return f"{receipt.job} does not run ({receipt.state}): it waits for nobody"
    return f"{receipt.job} {name} {receipt.outcome.upper()}{why}"


def _is_attempt(who: str) -> bool:
    try:
        ids.split_attempt(who)
    except WireError:
        return False
    return True


def _ask(place: Home, **order: object) -> dict[str, object]:
    try:
        return dict(operator.ask(place.sockets / COUNTER, order))
    except VaultBusyError:
        raise ConfigError(_NONE_RUNS) from None
    except VaultUsageError as error:
        raise UsageError(str(error)) from None
    except VaultError as error:
        raise ConfigError(str(error)) from None
