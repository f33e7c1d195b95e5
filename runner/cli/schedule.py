"""`ringfence schedule`: jobs at the times of a rule; and `ringfence scheduler`, which enqueues them.

Called by commands.py. Must never change a schedule without naming it, nor put the store's password on a command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, TypedDict

import typer

from runner.app import App
from runner.cli import joboptions as opt
from runner.cli.caution import warnings_said
from runner.cli.joboptions import Asked
from runner.cli.options import HomeOption, JsonOption, RedisOption, TenantOption, json_value, moment, pairs
from runner.cli.output import print_json, print_line, print_table
from runner.cli.site import site_of
from runner.errors import UsageError
from runner.request import JobOptions
from runner.wire.schedule import Missed
from runner.wire.view import ScheduleView

__all__ = ["schedule", "scheduler"]

schedule = typer.Typer(name="schedule", help="Enqueue a job at the times of a rule.", no_args_is_help=True)
_Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
_COLUMNS: Final = ("NAME", "STATE", "NEXT", "RULE", "MISSED", "TASK", "QUEUE", "SIGNED")


@schedule.command()
def add(
    context: typer.Context,
    name: _Name,
    command: Annotated[list[str] | None, typer.Argument(metavar="[CMD]...", help="The command, or --call.")] = None,
    cron: Annotated[str | None, typer.Option("--cron", metavar="RULE", help="Such as '0 3 * * *'.")] = None,
    every: Annotated[float | None, typer.Option("--every", metavar="S", help="Every S seconds.")] = None,
    zone: Annotated[str, typer.Option("--zone", metavar="ZONE", help="Of --cron; IANA name.")] = "UTC",
    missed: Annotated[str, typer.Option("--missed", metavar="skip|once|all", help="Times that passed.")] = "once",
    start: Annotated[str | None, typer.Option("--start", metavar="TIME", help="No time before it.")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="TIME", help="No time after it.")] = None,
    void_s: Annotated[float | None, typer.Option("--expires", metavar="S", help="Void so long after due.")] = None,
    task: Annotated[str | None, typer.Option("--call", metavar="MODULE:TASK", help="A task instead of CMD.")] = None,
    arg: Annotated[list[str] | None, typer.Option("--arg", metavar="JSON", help="Of --call; repeat.")] = None,
    kw: Annotated[list[str] | None, typer.Option("--kw", metavar="NAME=JSON", help="Of --call; repeat.")] = None,
    queue: opt.Queue = None,
    tag: opt.Tag = None,
    node: opt.Node = None,
    label: opt.Label = None,
    retries: opt.Retries = 0,
    backoff: opt.Backoff = None,
    priority: opt.Priority = 0,
    unique: opt.Unique = None,
    rate: opt.Rate = None,
    concurrency: opt.Concurrency = None,
    budget: opt.Budget = None,
    fresh: opt.Fresh = False,
    reuse: opt.Reuse = None,
    timeout: opt.Timeout = None,
    env: opt.Env = None,
    cwd: opt.Cwd = None,
    tenant: opt.Tenant = None,
    secret: opt.Secret = None,
    read: opt.Read = None,
    write: opt.Write = None,
    net: opt.Net = None,
    memory: opt.Memory = None,
    cpus: opt.Cpus = None,
    pids: opt.Pids = None,
    disk: opt.Disk = None,
    no_exec: opt.NoExec = False,
    service: opt.Service = False,
    unix: opt.Unix = False,
    spawn: opt.Spawn = None,
    state: opt.State = None,
    agent: opt.Agent = None,
    mail: opt.Mail = None,
    watch: opt.Watch = None,
    trusted: opt.Trusted = False,
    tool: opt.Tool = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a schedule; the command stands after --. One of the same name is replaced."""
    if (task is None) == (not command):
        raise UsageError("schedule add takes a command after NAME, or --call MODULE:TASK")
    app = site_of(context, home, redis).app(tenant)
    view = _stored(context, app, name, task or command or (), arg or (), kw, void_s)
    print_json(view) if as_json else print_line(f"{view.name} {view.state}, next at {view.next_at or '-'}")


def _stored(
    context: typer.Context,
    app: App,
    name: str,
    work: str | Sequence[str],
    arg: Sequence[str],
    kw: Sequence[str] | None,
    void_s: float | None,
) -> ScheduleView:
    args = [json_value(text, "--arg") for text in arg]
    kwargs = {key: json_value(text, "--kw") for key, text in pairs(kw, "--kw").items()}
    return warnings_said(
        lambda: app.schedule(name, work, args, kwargs, **_times(context), **_options(context, void_s))
    )()


@schedule.command(name="list")
def list_schedules(
    context: typer.Context,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the schedules by name."""
    views = site_of(context, home, redis).app(tenant).schedules()
    if as_json:
        print_json(views)
        return
    print_table(_COLUMNS, [_row(view) for view in views])


@schedule.command()
def show(
    context: typer.Context,
    name: _Name,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one schedule."""
    found = [view for view in site_of(context, home, redis).app(tenant).schedules() if view.name == name]
    if not found:
        raise UsageError(f"no schedule {name[:64]!r}: `ringfence schedule list` shows them")
    if as_json:
        print_json(found[0])
    else:
        print_table(_COLUMNS, [_row(found[0])])


@schedule.command(name="next")
def coming(
    context: typer.Context,
    name: _Name,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, max=1000, help="How many.")] = 5,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the next times of a schedule, also of a paused one."""
    times = site_of(context, home, redis).app(tenant).schedule_times(name, count)
    if as_json:
        print_json(times)
        return
    for time in times:
        print_line(time)


@schedule.command()
def pause(
    context: typer.Context,
    name: _Name,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Enqueue nothing for a schedule until it is resumed."""
    site_of(context, home, redis).app(tenant).pause_schedule(name)
    print_line(f"{name} paused")


@schedule.command()
def resume(
    context: typer.Context,
    name: _Name,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Let a schedule go on with its next time; what was left out stays out."""
    site_of(context, home, redis).app(tenant).resume_schedule(name)
    print_line(f"{name} goes on")


@schedule.command()
def rm(
    context: typer.Context,
    name: _Name,
    tenant: TenantOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Remove a schedule; jobs that it enqueued stay."""
    site_of(context, home, redis).app(tenant).unschedule(name)
    print_line(f"{name} removed")


def scheduler(context: typer.Context, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Run a scheduler alone in the foreground; every node agent has one, too."""
    site = site_of(context, home, redis)
    words = [sys.executable, "-I", "-m", "node_agent", "scheduler", "--home", str(site.home.path)]
    if site.redis is not None:
        os.environ["RINGFENCE_REDIS"] = site.redis
    os.execv(words[0], words)  # noqa: S606 - becoming the scheduler is the command's job


class _Times(TypedDict):
    cron: str | None
    every: float | None
    zone: str
    missed: Missed
    start: datetime | None
    end: datetime | None


def _times(context: typer.Context) -> _Times:
    """The rule that `add` was given. Raises UsageError."""
    given = context.params
    if given["missed"] not in {"skip", "once", "all"}:
        raise UsageError("--missed is skip, once or all")
    return _Times(
        cron=given["cron"],
        every=given["every"],
        zone=given["zone"],
        missed=given["missed"],
        start=None if given["start"] is None else moment(given["start"], "--start"),
        end=None if given["end"] is None else moment(given["end"], "--end"),
    )


def _options(context: typer.Context, void_s: float | None) -> JobOptions:
    options = Asked.of(context).options()
    if void_s is not None:
        options["expires"] = void_s
    return options


def _row(view: ScheduleView) -> tuple[str, ...]:
    rule = f"{view.cron} {view.zone}" if view.cron is not None else f"every {view.every_s:g} s"
    signed = "yes" if view.verified else "UNKNOWN KEY"
    return (view.name, view.state, view.next_at or "-", rule, view.missed, view.task, view.queue, signed)
