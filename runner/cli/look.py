"""`ps`, `show`, `result`, `logs`, `events`, `nodes`: what there is to see.

Called by commands.py. Must never change a job, and never show foreign text that `output` has not made harmless.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Final

import typer

from runner.cli import exitcode, figures
from runner.cli.options import HomeOption, JobArgument, JsonOption, RedisOption, TenantOption
from runner.cli.output import JobOutput, print_fields, print_json, print_line, print_table, say
from runner.cli.site import site_of
from runner.errors import JobEndError, ResultTimeoutError
from runner.wire import record
from runner.wire.states import DEAD_STATES, State
from runner.wire.view import EventView, JobView

__all__ = ["events", "logs", "nodes", "ps", "result", "show"]

_MOST_JOBS: Final = 10_000


def ps(
    context: typer.Context,
    tenant: TenantOption = None,
    state: Annotated[str | None, typer.Option("--state", metavar="S", help="Only this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=_MOST_JOBS, help="The newest N.")] = 100,
    every: Annotated[bool, typer.Option("--all", "-a", help="The newest 10,000.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed, lost, expired and refused ones.")] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, the newest first."""
    app = site_of(context, home, redis).app()
    views = app.jobs(tenant=tenant, limit=_MOST_JOBS if every or failed else limit)
    if state is not None:
        views = [view for view in views if view.state == state]
    if failed:
        views = [view for view in views if view.state in DEAD_STATES][: None if every else limit]
    if as_json:
        print_json(views)
        return
    columns = ("JOB", "TASK", "STATE", "NODE", "ATTEMPT", "QUEUE", "ENQUEUED", "TAGS")
    print_table(columns, [_job_row(view) for view in views])


def show(
    context: typer.Context,
    job: JobArgument,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one job: state, evidence, and why it waits."""
    app = site_of(context, home, redis).app()
    handle = app.job(job)
    view = handle.status()
    said, given = handle.progress(), handle.artifacts()
    if as_json:
        print_json(replace(view, progress=said, artifacts=given))
        return
    plain = {name: value for name, value in record.encode(view).items() if value not in ({}, "", [])}
    used, tail = figures.usage(view.usage), plain.pop("tail", None)
    plain.pop("calls", None)
    if used:
        plain["usage"] = used
    if said is not None:
        plain["progress"] = f"{said.value:.0%} {said.note}".rstrip()
    fields = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in plain.items()]
    fields += [("calls" if not number else "", line) for number, line in enumerate(view.calls)]
    fields += [("artifacts" if not number else "", f"{one.name} ({one.bytes} B)") for number, one in enumerate(given)]
    # The last output comes last, a line each: what people look for first.
    fields += [("tail" if not number else "", line) for number, line in enumerate(str(tail or "").splitlines())]
    print_fields(fields)


def result(
    context: typer.Context,
    job: JobArgument,
    wait: Annotated[float, typer.Option("--wait", metavar="S", min=0, help="Wait so long for the end.")] = 0.0,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a job's result; exits as `run` does when the job ended without one, 1 when it has not ended."""
    app = site_of(context, home, redis).app()
    handle = app.job(job)
    try:
        value = handle.result(timeout=wait)
    except JobEndError as error:
        if not as_json:
            say(str(error))
    except ResultTimeoutError as error:
        say(str(error))
        raise typer.Exit(1) from None
    else:
        if not as_json:
            print_json(value)
    view = handle.status()
    if as_json:
        print_json(view)
    raise typer.Exit(exitcode.of_job(handle.outcome(timeout=0)))


def logs(
    context: typer.Context,
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="The exact bytes, also on a terminal.")] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a job wrote, its stdout to stdout and its stderr to stderr."""
    app = site_of(context, home, redis).app()
    chunks = app.job(job).logs(follow=follow)
    if as_json:
        for descriptor, data in chunks:
            print_json({"fd": descriptor, "text": data.decode("utf-8", "backslashreplace")})
        return
    output = JobOutput(raw=raw)
    for descriptor, data in chunks:
        output.write(descriptor, data)
    output.close()


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on for ever.")] = False,
    tenant: TenantOption = None,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="All that is kept of one job.")] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what happened to jobs and nodes, one event a line."""
    app = site_of(context, home, redis).app()
    for event in app.events(follow=follow, tenant=tenant, job=job):
        if as_json:
            print_json(event)
        else:
            print_line(_event_line(event))


def nodes(
    context: typer.Context,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the fleet's nodes."""
    app = site_of(context, home, redis).app()
    views = app.nodes()
    if as_json:
        print_json(views)
        return
    columns = ("NODE", "STATE", "LEVEL", "BUSY", "QUEUES", "LABELS", "HOST", "PID", "HEARTBEAT")
    print_table(
        columns,
        [
            (
                view.name,
                view.state,
                view.level,
                f"{view.busy}/{view.slots}",
                ",".join(view.queues),
                _pairs(view.labels),
                view.host,
                str(view.pid),
                view.heartbeat_at,
            )
            for view in views
        ],
    )


def _job_row(view: JobView) -> tuple[str, ...]:
    why = view.due_at if view.state == State.SCHEDULED else view.reason
    state = f"{view.state}({why})" if why else view.state
    enqueued = view.enqueued_at or "-"
    return (view.job, view.task, state, view.node or "-", str(view.attempt), view.queue, enqueued, _pairs(view.tags))


def _pairs(values: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(values.items())) or "-"


def _event_line(event: EventView) -> str:
    # The flight record's head is for programs: `--json` has it.
    detail = " ".join(f"{key}={value}" for key, value in sorted(event.detail.items()) if key != "flight")
    job = f" {event.job}.{event.attempt}" if event.job else ""
    node = f" on {event.node}" if event.node else ""
    return f"{event.at} {event.type}{job}{node} {detail}".rstrip()
