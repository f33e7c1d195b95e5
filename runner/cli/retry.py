"""`ringfence retry`: run ended jobs again, as new ones that name the old.

Called by commands.py. Must never repeat a job twice unless --force says so.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from runner.cli.options import HomeOption, JsonOption, RedisOption, TenantOption
from runner.cli.output import print_json, print_line, say
from runner.cli.site import site_of
from runner.errors import UsageError

__all__ = ["retry", "seconds_of"]

_SPAN: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd]?)")
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def retry(
    context: typer.Context,
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids.")] = None,
    every: Annotated[bool, typer.Option("--all-failed", help="Every failed job that was not repeated yet.")] = False,
    since: Annotated[str | None, typer.Option("--since", metavar="SPAN", help="Ended in the last 30m, 1h, 2d.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="Q", help="Only this queue.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also jobs that were to run at most once; a named one whatever its end.")
    ] = False,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run failed, lost, expired and refused jobs again as new ones; exits 1 if one could not be."""
    if bool(jobs) == every:
        raise UsageError("retry takes jobs or --all-failed: name one of the two")
    if jobs and (since or queue or tenant):
        raise UsageError("--since, --queue and --tenant go with --all-failed")
    app = site_of(context, home, redis).app(tenant)
    since_s = None if since is None else seconds_of(since)
    found = app.retry(jobs or (), all_failed=every, since=since_s, queue=queue, force=force)
    if as_json:
        print_json(found)
    else:
        for one in found:
            if one.repeated_as is not None:
                print_line(f"{one.job} runs again as {one.repeated_as}")
            else:
                say(f"{one.job} not repeated: {one.why}")
        if not found:
            print_line("no job matches")
    if any(one.repeated_as is None for one in found):
        raise typer.Exit(1)


def seconds_of(text: str) -> float:
    """Return the seconds of ``90``, ``30m``, ``1h``, ``2d``. Raises UsageError."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UsageError("--since takes a span such as 90s, 30m, 1h or 2d")
    return float(match[1]) * _UNITS[match[2]]
