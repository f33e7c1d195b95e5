"""`ringfence approvals`, `approve` and `deny`: what waits for a person, and the person's word on it.

Called by commands.py. Must never report a decision as carried out that no node has confirmed: one that nobody waits for
at the moment is printed as stored.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Final, Literal

import typer

from runner.cli import exitcode
from runner.cli.options import HomeOption, JsonOption, RedisOption, TenantOption
from runner.cli.output import print_json, print_line, print_table
from runner.cli.site import Site, site_of
from runner.errors import JobNotFoundError, UsageError
from runner.limits import amounts_of
from runner.wire.receipt import PauseReceipt
from runner.wire.view import WaitView

__all__ = ["approvals", "approve", "deny"]

_COLUMNS: Final = ("JOB|BUDGET", "ASK", "ACTION", "RESOURCE", "WAITS", "UNTIL", "WHY")
_Job = Annotated[str | None, typer.Argument(metavar="[JOB]", help="Whose question, or whose budget.")]
_Ask = Annotated[str | None, typer.Option("--ask", metavar="ID", help="Which question, if it has several.")]
_Budget = Annotated[str | None, typer.Option("--budget", metavar="KEY", help="A budget instead of a job.")]
_Add = Annotated[
    list[str] | None,
    typer.Option("--add", metavar="UNIT=N", help="More of a budget; repeat. Without: as much again as was given."),
]
_Reason = Annotated[str, typer.Option("--reason", metavar="R", help="Kept in the signed word.")]
_Wait = Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for a node's receipt.")]
Op = Literal["approve", "deny"]


def approvals(
    context: typer.Context,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the calls and budgets that wait for a person, what ends first first."""
    views = site_of(context, home, redis).app(tenant).waiting()
    if as_json:
        print_json(views)
    else:
        print_table(_COLUMNS, [_row(view) for view in views])


def approve(
    context: typer.Context,
    job: _Job = None,
    ask: _Ask = None,
    budget: _Budget = None,
    add: _Add = None,
    reason: _Reason = "",
    wait: _Wait = 5.0,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a call through that policy leaves to a person, or add to a used-up budget; exits 0 done, 3 refused."""
    site = site_of(context, home, redis)
    receipts = _decided(site, "approve", job, ask, budget, add, reason, wait, tenant)
    _print(receipts, as_json=as_json)


def deny(
    context: typer.Context,
    job: _Job = None,
    ask: _Ask = None,
    budget: _Budget = None,
    reason: _Reason = "",
    wait: _Wait = 5.0,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse a call that waits for a person, or kill the jobs of a used-up budget; exits 0 done, 3 refused."""
    site = site_of(context, home, redis)
    receipts = _decided(site, "deny", job, ask, budget, None, reason, wait, tenant)
    _print(receipts, as_json=as_json)


def _decided(
    site: Site,
    op: Op,
    job: str | None,
    ask: str | None,
    budget: str | None,
    add: list[str] | None,
    reason: str,
    wait_s: float,
    tenant: str | None,
) -> list[PauseReceipt]:
    if (job is None) == (budget is None):
        raise UsageError(f"{op} takes a JOB, or --budget KEY")
    if ask is not None and job is None:
        raise UsageError("--ask goes with a JOB")
    app = site.app(tenant)
    if job is not None:
        asks = app.job(job)
        app = site.app(asks.tenant)
        if ask is None and not any(view.job == job for view in app.waiting()):
            # Nothing asked: then it is its budget that it stands still for. Of an unknown job the receipt says so.
            with contextlib.suppress(JobNotFoundError):
                budget = asks.budget_key()
        if budget is None:
            if add:
                raise UsageError("--add goes with a budget, and this job asks for a call")
            return [asks.answer(op == "approve", ask, reason=reason, wait=wait_s)]
    handle = app.budget(budget or "")
    if op == "deny":
        return handle.deny(reason=reason, wait=wait_s)
    return handle.approve(amounts_of(add or ()), reason=reason, wait=wait_s)


def _print(receipts: list[PauseReceipt], *, as_json: bool) -> None:
    if as_json:
        print_json(receipts)
    else:
        for receipt in receipts:
            print_line(_line(receipt))
    raise typer.Exit(exitcode.of_pause(receipts))


def _line(receipt: PauseReceipt) -> str:
    where = f" on {receipt.node}" if receipt.node else ""
    why = f": {receipt.reason}" if receipt.reason else ""
    return f"{receipt.job or receipt.op} {receipt.outcome}{where}{why}"


def _row(view: WaitView) -> tuple[str, ...]:
    name = view.job or f"budget {view.budget}"
    return (name, view.ask or "-", view.action or "-", view.resource or "-", view.how or "freeze", view.until, view.why)
