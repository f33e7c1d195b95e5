"""`ringfence run` and `call`: enqueue one job, stream its output, exit as it did.

Called by commands.py. Must never exit 0 for an end that no trusted node signed, and never leave the job running after
Ctrl-C without saying so.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Final, TypeVar

import typer

from runner.cli import exitcode, figures
from runner.cli import joboptions as opt
from runner.cli.caution import warnings_said
from runner.cli.joboptions import Asked
from runner.cli.kill import receipt_line
from runner.cli.options import HomeOption, RedisOption, json_value, pairs
from runner.cli.output import JobOutput, print_json, print_line, say
from runner.cli.site import site_of
from runner.errors import RingfenceError
from runner.job import Job
from runner.wire import record
from runner.wire.receipt import Outcome
from runner.wire.states import State

__all__ = ["call", "run"]

_KILL_WAIT_S: Final = 15.0
#: So long no second Ctrl-C is heard, in which a running job's receipt normally comes.
_KILL_AT_ONCE_S: Final = 0.5
_REASON: Final = "interrupted"
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_INTERRUPTED: Final = 130
#: A job that waits longer than this gets a line that says why.
_PATIENCE_S: Final = 3.0
_R = TypeVar("_R")


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command and its arguments.")],
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
    timeout: opt.Timeout = None,
    eta: opt.Eta = None,
    countdown: opt.Countdown = None,
    expires: opt.Expires = None,
    after: opt.After = None,
    on_failure: opt.OnFailure = None,
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
    detach: opt.Detach = False,
    as_json: opt.Json = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Run a command as a job: live output, the job's own exit code; Ctrl-C kills it."""
    asked = Asked.of(context)
    app = site_of(context, home, redis).app(tenant)
    _attend(warnings_said(lambda: app.command(command, **asked.options())), asked, value=False)


def call(
    context: typer.Context,
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="A task that a node serves.")],
    arg: Annotated[list[str] | None, typer.Option("--arg", metavar="JSON", help="Positional argument; repeat.")] = None,
    kw: Annotated[list[str] | None, typer.Option("--kw", metavar="NAME=JSON", help="Keyword argument; repeat.")] = None,
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
    eta: opt.Eta = None,
    countdown: opt.Countdown = None,
    expires: opt.Expires = None,
    after: opt.After = None,
    on_failure: opt.OnFailure = None,
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
    detach: opt.Detach = False,
    as_json: opt.Json = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Call a Python task as a job; its result is printed as JSON after its output."""
    asked = Asked.of(context)
    args = [json_value(text, "--arg") for text in arg or ()]
    kwargs = {name: json_value(text, "--kw") for name, text in pairs(kw, "--kw").items()}
    app = site_of(context, home, redis).app(tenant)
    _attend(warnings_said(lambda: app.call(task, args, kwargs, **asked.options())), asked, value=True)


def _attend(start: Callable[[], Job[_R]], asked: Asked, *, value: bool) -> None:
    """Start a job, follow it to its end and exit as it did; Ctrl-C, SIGTERM and SIGHUP kill it."""
    if asked.detach:
        print_line(start().id)
        return
    # Loaded before it is needed: an interrupt in the middle of an import would make Python end itself by SIGINT.
    importlib.import_module("runner.control")
    started: list[Job[_R]] = []
    output: JobOutput | None = None
    with _signals_as_interrupt():
        try:
            # A job may run before we know of it: who interrupts at that moment means the job, too.
            with _interrupts_later():
                started.append(start())
            job, output = started[0], JobOutput(to_stderr=asked.as_json)
            say(f"job {job.id}")
            with _hint(job):
                for descriptor, data in job.logs(follow=True):
                    output.write(descriptor, data)
                end = job.outcome()
        except KeyboardInterrupt:
            if output is not None:
                output.close()
            job = started[0]
            end = _kill(job)
    if output is not None:
        output.close()
    if end.state != State.FINISHED:
        say(_end_line(end))
    if asked.as_json:
        print_json(job.status())
    elif value and end.state == State.FINISHED:
        print_json(job.result(timeout=0))
    raise typer.Exit(exitcode.of_job(end))


def _kill(job: Job[_R]) -> Outcome:
    """Kill after Ctrl-C and wait for the receipt; a second Ctrl-C stops the waiting. Exits if nothing is confirmed."""
    try:
        # The command itself can't be interrupted: "the kill stays in force" has to be true.
        with _interrupts_later():
            say(f"killing {job.id}")
            receipt = job.kill(reason=_REASON, wait=_KILL_AT_ONCE_S)
        if receipt.outcome == "unconfirmed":
            receipt = job.kill(reason=_REASON, wait=_KILL_WAIT_S)
    except KeyboardInterrupt:
        say(f"no receipt yet for {job.id}: the kill stays in force, `ringfence kill {job.id}` asks again")
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    say(receipt_line(receipt))
    code = exitcode.of_kill([receipt])
    if code not in {0, exitcode.ALREADY_ENDED}:
        raise typer.Exit(exitcode.INFRASTRUCTURE)
    return job.outcome(timeout=_KILL_WAIT_S)


def _end_line(end: Outcome) -> str:
    how = f"{end.state}({end.reason})" if end.reason else end.state
    where = f" on {end.node}" if end.node else ""
    why = end.detail or (end.error or {}).get("message") or ""
    used = figures.usage(record.encode(end))  # type: ignore[arg-type]  # the figures among its fields are numbers
    return f"job {end.job} {how}{where}" + (f": {why}" if why else "") + (f" ({used})" if used else "")


@contextlib.contextmanager
def _hint(job: Job[_R]) -> Iterator[None]:
    """Say why a job waits, once, if it has not started after a while."""

    def look() -> None:
        with contextlib.suppress(RingfenceError):
            view = job.status()
            if view.waiting:
                say(f"job {job.id} waits: {view.waiting}")

    timer = threading.Timer(_PATIENCE_S, look)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act as Ctrl-C does: the job is killed, not forgotten."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    old = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hear of signals at the end of the block. Blocking them would not do: another thread may take them for us."""
    heard: list[int] = []
    numbers = [number for number in _INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]
    old = [(number, signal.signal(number, lambda got, _: heard.append(got))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in old:
            signal.signal(number, handler)
    if heard:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
