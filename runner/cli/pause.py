"""`ringfence pause` and `resume`: stop jobs where they stand, and let them go on.

Called by commands.py. Must never report a pause that no trusted node signed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final

import typer

from runner.cli import exitcode
from runner.cli.kill import check_choice
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line
from runner.cli.site import site_of
from runner.wire.receipt import PauseReceipt

__all__ = ["pause", "pause_line", "resume"]

_AT_ONCE: Final = 16
_Jobs = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")]
_Tag = Annotated[str | None, typer.Option("--tag", metavar="K=V")]
_Tenant = Annotated[str | None, typer.Option("--tenant", metavar="T")]
_Queue = Annotated[str | None, typer.Option("--queue", metavar="Q")]
_Node = Annotated[str | None, typer.Option("--node", metavar="N")]
_Secret = Annotated[str | None, typer.Option("--secret", metavar="S")]
_Task = Annotated[str | None, typer.Option("--task", metavar="T")]
_Group = Annotated[str | None, typer.Option("--group", metavar="G")]
_Every = Annotated[bool, typer.Option("--all", help="Every job that runs now.")]
_Reason = Annotated[str, typer.Option("--reason", metavar="R")]
_Wait = Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for receipts.")]


def pause(
    context: typer.Context,
    jobs: _Jobs = None,
    tag: _Tag = None,
    tenant: _Tenant = None,
    queue: _Queue = None,
    node: _Node = None,
    secret: _Secret = None,
    task: _Task = None,
    group: _Group = None,
    every: _Every = False,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop running jobs where they stand; exits 0 paused, 3 unconfirmed or refused, 4 unknown job, 5 not running."""
    check_choice("pause", jobs or (), (tag, queue, node, secret, task, group), tenant, every)
    app = site_of(context, home, redis).app()
    if jobs:
        receipts = _each(jobs, lambda job: app.job(job).pause(reason=reason, wait=wait))
    else:
        receipts = app.pause(
            tag=tag,
            queue=queue,
            node=node,
            task=task,
            secret=secret,
            group=group,
            all=every,
            tenant=tenant,
            reason=reason,
            wait=wait,
        )
    _tell(receipts, as_json=as_json)


def resume(
    context: typer.Context,
    jobs: _Jobs = None,
    tag: _Tag = None,
    tenant: _Tenant = None,
    queue: _Queue = None,
    node: _Node = None,
    secret: _Secret = None,
    task: _Task = None,
    group: _Group = None,
    every: _Every = False,
    reason: _Reason = "",
    wait: _Wait = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let paused jobs go on; exits as `pause` does."""
    check_choice("resume", jobs or (), (tag, queue, node, secret, task, group), tenant, every)
    app = site_of(context, home, redis).app()
    if jobs:
        receipts = _each(jobs, lambda job: app.job(job).resume(reason=reason, wait=wait))
    else:
        receipts = app.resume(
            tag=tag,
            queue=queue,
            node=node,
            task=task,
            secret=secret,
            group=group,
            all=every,
            tenant=tenant,
            reason=reason,
            wait=wait,
        )
    _tell(receipts, as_json=as_json)


def _each(jobs: Sequence[str], order: Callable[[str], PauseReceipt]) -> list[PauseReceipt]:
    """Give one order per job at the same time, so that one silent node does not delay the others."""
    named = list(dict.fromkeys(jobs))
    with ThreadPoolExecutor(min(_AT_ONCE, len(named))) as pool:
        return list(pool.map(order, named))


def _tell(receipts: list[PauseReceipt], *, as_json: bool) -> None:
    if as_json:
        print_json(receipts)
    else:
        for receipt in receipts:
            print_line(pause_line(receipt))
        if not receipts:
            print_line("no running job matches")
    raise typer.Exit(exitcode.of_pause(receipts))


def pause_line(receipt: PauseReceipt) -> str:
    """Return a receipt as people read it."""
    why = f": {receipt.reason}" if receipt.reason else ""
    if receipt.outcome == "paused":
        how = f"{receipt.processes} process(es) stand still, {receipt.method}, {receipt.took_ms:.1f} ms"
        return f"{receipt.job} paused on {receipt.node}: {how}"
    if receipt.outcome == "resumed":
        return f"{receipt.job} resumed on {receipt.node}"
    if receipt.outcome in ("delivered", "queued", "applied"):
        return f"{receipt.job} signal {receipt.outcome} on {receipt.node}{why}"
    if receipt.outcome == "not_running":
        return f"{receipt.job} does not run ({receipt.state}): nothing to pause; `kill` keeps it from starting"
    if receipt.outcome == "already_ended":
        return f"{receipt.job} had already ended: {receipt.state}"
    if receipt.outcome == "unknown":
        return f"{receipt.job} is not known"
    if receipt.outcome == "refused":
        return f"{receipt.job} REFUSED by {receipt.node}{why}"
    return f"{receipt.job or receipt.node} UNCONFIRMED{why}"
