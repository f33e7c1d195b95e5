"""`ringfence kill`: kill jobs by name or selector, and wait for the receipts.

Called by commands.py. Must never report a kill that no trusted node signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final

import typer

from runner.app import App
from runner.cli import exitcode
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line
from runner.cli.site import site_of
from runner.errors import UsageError
from runner.wire.receipt import Receipt

__all__ = ["check_choice", "kill", "receipt_line"]

_AT_ONCE: Final = 16


def kill(
    context: typer.Context,
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="K=V")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="T")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="Q")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="N")] = None,
    secret: Annotated[str | None, typer.Option("--secret", metavar="S")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="T")] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="G")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every job there is.")] = False,
    grace: Annotated[float, typer.Option("--grace", metavar="S", min=0, help="SIGTERM first.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="End a running grace now.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="R")] = "",
    wait: Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for receipts.")] = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill jobs with all their processes; exits 0 confirmed, 3 unconfirmed, 4 unknown job, 5 already ended."""
    check_choice("kill", jobs or (), (tag, queue, node, secret, task, group), tenant, every)
    app = site_of(context, home, redis).app()
    if jobs:
        receipts = _kill_named(app, jobs, grace=grace, force=force, reason=reason, wait=wait)
    else:
        receipts = app.kill(
            tag=tag,
            queue=queue,
            node=node,
            task=task,
            secret=secret,
            group=group,
            all=every,
            tenant=tenant,
            grace=grace,
            force=force,
            reason=reason,
            wait=wait,
        )
    if as_json:
        print_json(receipts)
    else:
        for receipt in receipts:
            print_line(receipt_line(receipt))
        if not receipts:
            print_line("no job matches")
    raise typer.Exit(exitcode.of_kill(receipts))


def receipt_line(receipt: Receipt) -> str:
    """Return a receipt as people read it."""
    if receipt.outcome == "killed":
        forced = ", forced" if receipt.forced else ""
        proof = f"{receipt.processes} process(es), {receipt.survivors} survivors, {receipt.method}{forced}"
        return f"{receipt.job} killed on {receipt.node}: {proof}, {receipt.total_ms:.1f} ms"
    if receipt.outcome == "killed_before_start":
        return f"{receipt.job} killed before it started (signed by {receipt.node})"
    if receipt.outcome == "already_ended":
        return f"{receipt.job} had already ended: {receipt.state}"
    if receipt.outcome == "unknown":
        return f"{receipt.job} is not known"
    why = f": {receipt.reason}" if receipt.reason else ""
    return f"{receipt.job or receipt.node} UNCONFIRMED{why}; the kill stays in force, ask again or use `agent kill`"


def check_choice(
    what: str, jobs: Sequence[str], selectors: Sequence[str | None], tenant: str | None, every: bool
) -> None:
    """Check that jobs, or one selector, are named. Raises UsageError."""
    count = sum(word is not None for word in selectors) + every
    if jobs and (count or tenant):
        raise UsageError(f"{what} takes jobs or a selector, not both: run it once for each")
    if count > 1:
        raise UsageError(f"{what} takes one selector: run it once for each (--tenant may go with any)")
    if not jobs and not count and tenant is None:
        raise UsageError(f"{what} what? Name jobs, one selector such as --tag team=acme, or --all")


def _kill_named(app: App, jobs: Sequence[str], *, grace: float, force: bool, reason: str, wait: float) -> list[Receipt]:
    """Kill jobs at the same time, so that one silent node does not delay the others."""
    handles = [app.job(job) for job in dict.fromkeys(jobs)]
    if len(handles) == 1:
        return handles[0].kill_tree(reason=reason, grace=grace, force=force, wait=wait)
    with ThreadPoolExecutor(min(_AT_ONCE, len(handles))) as pool:
        found = [pool.submit(job.kill_tree, reason=reason, grace=grace, force=force, wait=wait) for job in handles]
        return [receipt for one in found for receipt in one.result()]
