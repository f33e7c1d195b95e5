"""`ringfence drain`, `undrain`, `suspend` and `unsuspend`: what operators order of nodes and queues.

Called by commands.py. Must never report a node as drained, or a queue as held, that no trusted node signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from runner.cli import exitcode
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line
from runner.cli.site import site_of
from runner.wire.receipt import NodeReceipt

__all__ = ["drain", "suspend", "undrain", "unsuspend"]

_NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
_QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
_Reason = Annotated[str, typer.Option("--reason", metavar="R")]
_Wait = Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for receipts.")]


def drain(
    context: typer.Context,
    node: _NodeName,
    grace: Annotated[
        float | None, typer.Option("--grace", metavar="S", min=0, help="End what still runs after so many seconds.")
    ] = None,
    checkpoint: Annotated[
        float, typer.Option("--checkpoint", metavar="S", min=0, help="Seconds from SIGTERM to SIGKILL then.")
    ] = 0.0,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a node start nothing more; exits 0 once nothing runs there, 3 if that is not so yet or unconfirmed."""
    app = site_of(context, home, redis).app()
    receipt = app.drain(node, grace=grace, checkpoint=checkpoint, reason=reason, wait=wait)
    _tell([receipt], as_json=as_json)


def undrain(
    context: typer.Context,
    node: _NodeName,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a drained node take jobs again; exits 0, 3 unconfirmed or refused, 4 unknown node."""
    app = site_of(context, home, redis).app()
    _tell([app.undrain(node, reason=reason, wait=wait)], as_json=as_json)


def suspend(
    context: typer.Context,
    queue: _QueueName,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have no node take jobs of a queue; exits 0 when every live node confirms, else 3."""
    app = site_of(context, home, redis).app()
    _tell(app.suspend(queue, reason=reason, wait=wait), as_json=as_json)


def unsuspend(
    context: typer.Context,
    queue: _QueueName,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a suspended queue served again; exits as `suspend` does."""
    app = site_of(context, home, redis).app()
    _tell(app.unsuspend(queue, reason=reason, wait=wait), as_json=as_json)


def _tell(receipts: Sequence[NodeReceipt], *, as_json: bool) -> None:
    if as_json:
        print_json(list(receipts))
    else:
        for receipt in receipts:
            print_line(_line(receipt))
        if not receipts:
            print_line("no node is alive: it holds for whichever starts")
    raise typer.Exit(exitcode.of_operate(receipts))


def _line(receipt: NodeReceipt) -> str:
    why = f": {receipt.reason}" if receipt.reason else ""
    if receipt.outcome != "done":
        return f"{receipt.node} {receipt.outcome.upper()}{why}"
    if receipt.op == "drain":
        back = f", {receipt.handed_back} handed back" if receipt.handed_back else ""
        return f"{receipt.node} {receipt.state}: {receipt.busy} job(s) still run{back}"
    if receipt.op == "undrain":
        return f"{receipt.node} takes jobs again"
    return f"{receipt.node} {'holds' if receipt.op == 'suspend' else 'serves'} the queue"
