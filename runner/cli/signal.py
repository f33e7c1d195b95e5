"""`ringfence signal`: send a signal to jobs by name or selector, and wait for the receipts.

Called by commands.py. Must never report a signal that no trusted node signed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final

import typer

from runner.cli import exitcode
from runner.cli.kill import check_choice, receipt_line
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line
from runner.cli.pause import pause_line
from runner.cli.site import site_of
from runner.wire.receipt import PauseReceipt, Receipt

__all__ = ["signal"]

_AT_ONCE: Final = 16
_Answer = Receipt | PauseReceipt


def signal(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="KILL STOP CONT INT TERM USR1 USR2 POLICY TRUST BUDGET LOOP DRIFT."),
    ],
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="K=V")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="T")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="Q")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="N")] = None,
    secret: Annotated[str | None, typer.Option("--secret", metavar="S")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="T")] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="G")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every job that runs now.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="R")] = "",
    wait: Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Seconds for receipts.")] = 15.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a signal to running jobs; exits 0 done, 3 unconfirmed or refused, 4 unknown job, 5 not running."""
    from runner import signalling

    known = signalling.name_of(name)
    named = {"tag": tag, "queue": queue, "node": node, "task": task, "secret": secret, "group": group}
    check_choice("signal", jobs or (), tuple(named.values()), tenant, every)
    client = site_of(context, home, redis).app().client()
    if jobs:
        found = _each(jobs, lambda job: signalling.signal_job(client, known, job, reason=reason, wait_s=wait))
    else:
        chosen = signalling.chosen(named, tenant)
        found = list(signalling.signal_many(client, known, chosen, tenant, reason=reason, wait_s=wait))
    if as_json:
        print_json(found)
    else:
        for answer in found:
            print_line(receipt_line(answer) if isinstance(answer, Receipt) else pause_line(answer))
        if not found:
            print_line("no running job matches")
    raise typer.Exit(_code(found))


def _each(jobs: Sequence[str], send: Callable[[str], _Answer]) -> list[_Answer]:
    """Send one signal per job at the same time, so that one silent node does not delay the others."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(jobs))) as pool:
        return list(pool.map(send, dict.fromkeys(jobs)))


def _code(found: Sequence[_Answer]) -> int:
    codes = {
        exitcode.of_kill(one for one in found if isinstance(one, Receipt)),
        exitcode.of_pause(one for one in found if isinstance(one, PauseReceipt)),
    }
    return next((code for code in (exitcode.UNCONFIRMED, exitcode.UNKNOWN, exitcode.ALREADY_ENDED) if code in codes), 0)
