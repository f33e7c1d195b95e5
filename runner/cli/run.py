"""`ringfence run` and `call`: enqueue one job, stream its output, exit as it did.

Called by commands.py. Must never exit 0 for an end that no trusted node signed, and never leave the job running after
Ctrl-C without saying so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, TypeVar

import typer

from runner.cli import exitcode, figures
from runner.cli.kill import receipt_line
from runner.cli.options import HomeOption, RedisOption, build_grants, json_value, not_in_this_version, pairs
from runner.cli.output import JobOutput, print_json, print_line, say
from runner.cli.site import site_of
from runner.errors import RingfenceError, UsageError
from runner.job import Job
from runner.request import JobOptions
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

_Queue = Annotated[str | None, typer.Option("--queue", metavar="Q", help="Queue; default agents.")]
_Tag = Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="Repeat.")]
_Node = Annotated[str | None, typer.Option("--node", metavar="N", help="Only on this node.")]
_Label = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Only on nodes with it; repeat.")]
_Retries = Annotated[int, typer.Option("--retries", metavar="N", min=0, help="Further attempts after a failure.")]
_Fresh = Annotated[bool, typer.Option("--fresh", help="A sandbox that no other job used before.")]
_Timeout = Annotated[float | None, typer.Option("--timeout", metavar="S", help="Time limit of an attempt.")]
_Env = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Public; repeat. Never for secrets.")]
_Cwd = Annotated[Path | None, typer.Option("--cwd", metavar="P", help="Working folder, inside a grant.")]
_Tenant = Annotated[str | None, typer.Option("--tenant", metavar="T")]
_Detach = Annotated[bool, typer.Option("--detach", help="Print the job's id and leave.")]
_Json = Annotated[bool, typer.Option("--json", help="Output to stderr, one outcome object to stdout.")]
_Secret = Annotated[list[str] | None, typer.Option("--secret", metavar="NAME[:WAY]", help="Ask for a secret; repeat.")]
_Read = Annotated[list[str] | None, typer.Option("--read", metavar="P", help="Grant reading below P; repeat.")]
_Write = Annotated[list[str] | None, typer.Option("--write", metavar="P", help="Grant writing below P; repeat.")]
_Net = Annotated[list[str] | None, typer.Option("--net", metavar="none|HOST:PORT", help="Grant a destination; repeat.")]
_Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Such as 512M.")]
_Cpus = Annotated[float | None, typer.Option("--cpus", metavar="N", help="Such as 1.5.")]
_Pids = Annotated[int | None, typer.Option("--pids", metavar="N", help="Processes at a time.")]
_Disk = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Size of /work.")]
_NoExec = Annotated[bool, typer.Option("--no-exec", help="Only the node's own programs can be executed.")]
_Trusted = Annotated[bool, typer.Option("--trusted", help="May run below level B, where policy agrees.")]
_Tool = Annotated[list[str] | None, typer.Option("--tool", metavar="NAME", help="Not in this version.")]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options that `run` and `call` share, by the names of their parameters."""

    queue: str | None
    tag: list[str] | None
    node: str | None
    label: list[str] | None
    retries: int
    fresh: bool
    timeout: float | None
    env: list[str] | None
    cwd: Path | None
    tenant: str | None
    secret: list[str] | None
    read: list[str] | None
    write: list[str] | None
    net: list[str] | None
    memory: str | None
    cpus: float | None
    pids: int | None
    disk: str | None
    no_exec: bool
    trusted: bool
    tool: list[str] | None
    detach: bool
    as_json: bool

    @classmethod
    def of(cls, context: typer.Context) -> _Asked:
        """Return what typer parsed for the running command."""
        return cls(**{field.name: context.params[field.name] for field in dataclasses.fields(cls)})

    def options(self) -> JobOptions:
        """Return the API's options. Raises UsageError."""
        not_in_this_version("--tool", self.tool)
        if self.as_json and self.detach:
            raise UsageError("--detach prints the job's id alone: leave out --json")
        given = JobOptions(
            labels=pairs(self.label, "--label"),
            retries=self.retries,
            grants=build_grants(
                read=self.read,
                write=self.write,
                net=self.net,
                secret=self.secret,
                memory=self.memory,
                cpus=self.cpus,
                pids=self.pids,
                disk=self.disk,
                no_exec=self.no_exec,
            ),
            tags=pairs(self.tag, "--tag"),
            env=pairs(self.env, "--env"),
            fresh=self.fresh,
            trusted=self.trusted,
        )
        if self.queue is not None:
            given["queue"] = self.queue
        if self.node is not None:
            given["node"] = self.node
        if self.timeout is not None:
            given["timeout"] = self.timeout
        if self.cwd is not None:
            given["cwd"] = str(self.cwd.resolve())
        return given


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command and its arguments.")],
    queue: _Queue = None,
    tag: _Tag = None,
    node: _Node = None,
    label: _Label = None,
    retries: _Retries = 0,
    fresh: _Fresh = False,
    timeout: _Timeout = None,
    env: _Env = None,
    cwd: _Cwd = None,
    tenant: _Tenant = None,
    secret: _Secret = None,
    read: _Read = None,
    write: _Write = None,
    net: _Net = None,
    memory: _Memory = None,
    cpus: _Cpus = None,
    pids: _Pids = None,
    disk: _Disk = None,
    no_exec: _NoExec = False,
    trusted: _Trusted = False,
    tool: _Tool = None,
    detach: _Detach = False,
    as_json: _Json = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Run a command as a job: live output, the job's own exit code; Ctrl-C kills it."""
    asked = _Asked.of(context)
    app = site_of(context, home, redis).app(tenant)
    _attend(lambda: app.command(command, **asked.options()), asked, value=False)


def call(
    context: typer.Context,
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="A task that a node serves.")],
    arg: Annotated[list[str] | None, typer.Option("--arg", metavar="JSON", help="Positional argument; repeat.")] = None,
    kw: Annotated[list[str] | None, typer.Option("--kw", metavar="NAME=JSON", help="Keyword argument; repeat.")] = None,
    queue: _Queue = None,
    tag: _Tag = None,
    node: _Node = None,
    label: _Label = None,
    retries: _Retries = 0,
    fresh: _Fresh = False,
    timeout: _Timeout = None,
    env: _Env = None,
    cwd: _Cwd = None,
    tenant: _Tenant = None,
    secret: _Secret = None,
    read: _Read = None,
    write: _Write = None,
    net: _Net = None,
    memory: _Memory = None,
    cpus: _Cpus = None,
    pids: _Pids = None,
    disk: _Disk = None,
    no_exec: _NoExec = False,
    trusted: _Trusted = False,
    tool: _Tool = None,
    detach: _Detach = False,
    as_json: _Json = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Call a Python task as a job; its result is printed as JSON after its output."""
    asked = _Asked.of(context)
    args = [json_value(text, "--arg") for text in arg or ()]
    kwargs = {name: json_value(text, "--kw") for name, text in pairs(kw, "--kw").items()}
    app = site_of(context, home, redis).app(tenant)
    _attend(lambda: app.call(task, args, kwargs, **asked.options()), asked, value=True)


def _attend(start: Callable[[], Job[_R]], asked: _Asked, *, value: bool) -> None:
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
