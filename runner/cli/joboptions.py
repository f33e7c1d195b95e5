"""The options that say what a job may be asked for, and their values as the API wants them.

Called by `call`, which has all of them, `run` and `schedule add`. Must never accept one that has no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from runner.cli.options import build_grants, moment, pairs, seconds_or_moment
from runner.errors import UsageError
from runner.limits import budget_of, concurrency_of, rate_of
from runner.request import JobOptions
from runner.wire.spec import MAX_PRIORITY, MAX_REUSE, MAX_SPAWN

__all__ = [
    "After",
    "Agent",
    "Asked",
    "Backoff",
    "Budget",
    "Concurrency",
    "Countdown",
    "Cpus",
    "Cwd",
    "Detach",
    "Disk",
    "Env",
    "Eta",
    "Expires",
    "Fresh",
    "Json",
    "Label",
    "Mail",
    "Memory",
    "Net",
    "NoExec",
    "Node",
    "OnFailure",
    "Pids",
    "Priority",
    "Queue",
    "Rate",
    "Read",
    "Retries",
    "Secret",
    "Service",
    "Spawn",
    "State",
    "Tag",
    "Tenant",
    "Timeout",
    "Tool",
    "Trusted",
    "Unique",
    "Watch",
    "Write",
]

Queue = Annotated[str | None, typer.Option("--queue", metavar="Q", help="Queue; default agents.")]
Tag = Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="Repeat.")]
Node = Annotated[str | None, typer.Option("--node", metavar="N", help="Only on this node.")]
Label = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Only on nodes with it; repeat.")]
Retries = Annotated[int, typer.Option("--retries", metavar="N", min=0, help="Further attempts after a failure.")]
Backoff = Annotated[
    float | None,
    typer.Option("--backoff", metavar="S", min=0, help="Wait S, then 2 S, 4 S… before a retry, at most an hour."),
]
Priority = Annotated[
    int, typer.Option("--priority", metavar="N", min=-MAX_PRIORITY, max=MAX_PRIORITY, help="-1000 to 1000; default 0.")
]
Unique = Annotated[
    str | None, typer.Option("--unique", metavar="KEY", help="Refused while KEY's last job has not ended.")
]
Rate = Annotated[str | None, typer.Option("--rate", metavar="KEY=N/S", help="At most N starts in S seconds.")]
Concurrency = Annotated[str | None, typer.Option("--concurrency", metavar="KEY=N", help="At most N jobs at a time.")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="KEY:UNIT=N,…", help="Shared bound: tokens, requests, cost, cpu, wall, calls."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="A sandbox that no other job used before.")]
Reuse = Annotated[
    int | None,
    typer.Option("--reuse", metavar="N", min=1, max=MAX_REUSE, help="One worker for up to N jobs like it, in turn."),
]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="S", help="Time limit of an attempt.")]
Eta = Annotated[str | None, typer.Option("--eta", metavar="TIME", help="Not before this ISO 8601 time with zone.")]
Countdown = Annotated[float | None, typer.Option("--countdown", metavar="S", min=0, help="Not before S seconds.")]
Expires = Annotated[str | None, typer.Option("--expires", metavar="S|TIME", help="Void if not started by then.")]
After = Annotated[list[str] | None, typer.Option("--after", metavar="JOB", help="Not before JOB has ended; repeat.")]
OnFailure = Annotated[
    str | None, typer.Option("--on-failure", metavar="refuse|run", help="If a JOB of --after did not finish; refuse.")
]
Env = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Public; repeat. Never for secrets.")]
Cwd = Annotated[Path | None, typer.Option("--cwd", metavar="P", help="Working folder, inside a grant.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="T")]
Detach = Annotated[bool, typer.Option("--detach", help="Print the job's id and leave.")]
Json = Annotated[bool, typer.Option("--json", help="Output to stderr, one outcome object to stdout.")]
Secret = Annotated[list[str] | None, typer.Option("--secret", metavar="NAME[:WAY]", help="Ask for a secret; repeat.")]
Read = Annotated[list[str] | None, typer.Option("--read", metavar="P", help="Grant reading below P; repeat.")]
Write = Annotated[list[str] | None, typer.Option("--write", metavar="P", help="Grant writing below P; repeat.")]
Net = Annotated[list[str] | None, typer.Option("--net", metavar="none|HOST:PORT", help="Grant a destination; repeat.")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Such as 512M.")]
Cpus = Annotated[float | None, typer.Option("--cpus", metavar="N", help="Such as 1.5.")]
Pids = Annotated[int | None, typer.Option("--pids", metavar="N", help="Processes at a time.")]
Disk = Annotated[str | None, typer.Option("--disk", metavar="SIZE", help="Size of /work.")]
NoExec = Annotated[bool, typer.Option("--no-exec", help="Only the node's own programs can be executed.")]
Service = Annotated[bool, typer.Option("--service", help="Its tools reach the broker on loopback; no values there.")]
Unix = Annotated[bool, typer.Option("--unix", help="Unix sockets also beside granted paths, where policy agrees.")]
Spawn = Annotated[
    int | None,
    typer.Option("--spawn", metavar="N", min=1, max=MAX_SPAWN, help="May start N jobs in all, within its own grants."),
]
State = Annotated[str | None, typer.Option("--state", metavar="SIZE", help="Its /state, kept for its next attempt.")]
Mail = Annotated[
    list[str] | None,
    typer.Option("--mail", metavar="NAME[:send|receive]", help="Grant a mailbox, or topic/NAME; repeat."),
]
Watch = Annotated[
    list[str] | None, typer.Option("--watch", metavar="SELECTOR", help="May watch and signal such jobs; repeat.")
]
Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Uses what this name remembers (/mem).")]
Trusted = Annotated[bool, typer.Option("--trusted", help="May run below level B, where policy agrees.")]
Tool = Annotated[list[str] | None, typer.Option("--tool", metavar="NAME", help="One of the node's tools; repeat.")]


def on_failure_of(text: str, after: Sequence[str] | None) -> str:
    """Return what to do if a job before this one did not finish. Raises UsageError."""
    if text not in {"refuse", "run"} or not after:
        raise UsageError("--on-failure takes refuse or run, and goes with --after JOB")
    return text


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that these commands share, by the names of their parameters."""

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
    service: bool
    unix: bool
    spawn: int | None
    state: str | None
    agent: str | None
    mail: list[str] | None
    watch: list[str] | None
    trusted: bool
    tool: list[str] | None
    backoff: float | None = None
    reuse: int | None = None
    priority: int = 0
    unique: str | None = None
    rate: str | None = None
    concurrency: str | None = None
    budget: str | None = None
    #: `schedule add` has no use for these, and another form of --expires.
    eta: str | None = None
    countdown: float | None = None
    expires: str | None = None
    after: list[str] | None = None
    on_failure: str | None = None
    detach: bool = False
    as_json: bool = False

    @classmethod
    def of(cls, context: typer.Context) -> Asked:
        """Return what typer parsed for the running command."""
        named = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in context.params.items() if name in named})

    def options(self) -> JobOptions:
        """Return the API's options. Raises UsageError."""
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
                service=self.service,
                unix=self.unix,
                spawn=self.spawn,
                tool=self.tool,
                state=self.state,
                agent=self.agent,
                mail=self.mail,
                watch=self.watch,
            ),
            tags=pairs(self.tag, "--tag"),
            env=pairs(self.env, "--env"),
            fresh=self.fresh,
            trusted=self.trusted,
            priority=self.priority,
        )
        return cast("JobOptions", {**given, **self._optional()})

    def _optional(self) -> dict[str, object]:
        """What is left to the task's own options, or the defaults, unless it was given."""
        found = {
            "backoff": self.backoff,
            "reuse": self.reuse,
            "unique": self.unique,
            "rate": None if self.rate is None else rate_of(self.rate),
            "budget": None if self.budget is None else budget_of(self.budget),
            "concurrency": None if self.concurrency is None else concurrency_of(self.concurrency),
            "queue": self.queue,
            "node": self.node,
            "timeout": self.timeout,
            "eta": None if self.eta is None else moment(self.eta, "--eta"),
            "countdown": self.countdown,
            "expires": None if self.expires is None else seconds_or_moment(self.expires, "--expires"),
            "after": self.after or None,
            "on_failure": None if self.on_failure is None else on_failure_of(self.on_failure, self.after),
            "cwd": None if self.cwd is None else str(self.cwd.resolve()),
        }
        return {name: value for name, value in found.items() if value is not None}
