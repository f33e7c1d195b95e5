"""Child jobs, as a running job starts and awaits them.

Called by jobs (`from runner.inside import jobs`) and by ringfence-guest. Standard library and
wire alone. Must never decide anything: what a child may be is worked out by every node from what was signed.

    child = jobs.task(work, 3, name="part-3", inherit=True)      # the same module's task
    child = jobs.run(["python3", "part.py"], read=["/srv/data"], retries=1)
    child.result(timeout=60)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypedDict, Unpack, cast

from runner.guest.calls import CallRefused, call
from runner.wire import values
from runner.wire.calls import MAX_DATA_BYTES
from runner.wire.codec import Json
from runner.wire.grants import parse_bytes, parse_net

__all__ = ["Child", "ChildError", "End", "Options", "command", "leave", "run", "task"]

#: One wait of a call; a longer one is several.
_STEP_S: Final = 60.0
_FOR_EVER: Final = float("inf")
_USAGE: Final = """usage: ringfence-guest jobs
    run [--name N] [--inherit] -- CMD…   starts this job's own program with other words; prints the child's id
    wait JOB [SECONDS]                   prints its end as JSON; 0 only if it finished
    status JOB                           prints its state
    exit [CODE]                          ends this attempt with all its processes
"""


class ChildError(Exception):
    """A child did not finish, or its result can't be had. ``end``: how it ended, if it did."""

    def __init__(self, message: str, end: End | None = None) -> None:
        super().__init__(message)
        self.end = end


class Options(TypedDict, total=False):
    """What a child may be given, none of it beyond the parent's own.

    ``inherit``: all grants of this job but its children; else those named: ``read``, ``write`` (paths as this job was
    granted them), ``net`` (HOST:PORT), ``tools``, ``memory``, ``cpus``, ``pids``, ``disk``, ``spawn``. ``timeout``: of
    an attempt, in seconds. ``expires``: void if not started in so many seconds. ``name``: the second child of one name
    is the first one. ``kwargs``: a task's arguments by name.
    """

    name: str
    kwargs: Mapping[str, object]
    inherit: bool
    read: Sequence[str]
    write: Sequence[str]
    net: Sequence[str]
    tools: Sequence[str]
    memory: str | int
    cpus: float
    pids: int
    disk: str | int
    exec: bool
    spawn: int
    env: Mapping[str, str]
    cwd: str
    timeout: float
    expires: float
    retries: int
    priority: int
    node: str
    fresh: bool
    at_most_once: bool


@dataclass(frozen=True, slots=True)
class End:
    """How a child ended, as the node that ran it signed it."""

    job: str
    state: str
    reason: str | None
    exit_code: int | None
    signal: int | None
    node: str
    attempt: int
    detail: str
    value: object = None
    omitted: bool = False


@dataclass(frozen=True, slots=True)
class Child:
    """A job that this job started. ``known``: one of that name had been started before."""

    id: str
    known: bool = False

    def wait(self, timeout: float | None = None) -> End:
        """Wait for the end, whatever it is. Raises CallRefused: TIMEOUT after ``timeout`` seconds; see job.wait."""
        until_s = time.monotonic() + (_FOR_EVER if timeout is None else timeout)
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                found = cast("dict[str, Json]", call("job.wait", job=self.id, timeout_s=min(left_s, _STEP_S)))
            except CallRefused as error:
                if error.code != "timeout" or left_s <= _STEP_S:
                    raise
                continue
            value = values.decode(found.pop("result", None), {}, "result")
            return End(**cast("dict[str, str]", found), value=value)  # type: ignore[arg-type] # the node's answer, field by field

    def result(self, timeout: float | None = None) -> object:
        """Wait, and return what the child's task returned. Raises ChildError for any other end; CallRefused."""
        end = self.wait(timeout)
        if end.state != "finished":
            why = f" ({end.reason})" if end.reason else ""
            raise ChildError(f"job {self.id} {end.state}{why}: {end.detail}", end)
        if end.omitted:
            message = f"the result of job {self.id} has more than {MAX_DATA_BYTES} bytes: pass it as a file"
            raise ChildError(message, end)
        return end.value

    def status(self) -> str:
        """Return the state that the store shows; a hint."""
        return str(cast("dict[str, Json]", call("job.status", job=self.id))["state"])


def run(argv: Sequence[str], **options: Unpack[Options]) -> Child:
    """Start this job's own program with other words. Raises CallRefused."""
    return _spawn({"argv": list(argv)}, options)


def task(what: Callable[..., object] | str, *args: object, **options: Unpack[Options]) -> Child:
    """Start another task of this task's module, by itself or by its name; ``kwargs``: arguments by name.

    Raises CallRefused.
    """
    name = what if isinstance(what, str) else str(getattr(what, "name", ""))
    if not name:
        raise TypeError("a task, or its name MODULE:TASK, is expected")
    named = values.encode(dict(options.get("kwargs", {})))
    return _spawn({"task": name, "args": values.encode(list(args)), "kwargs": named}, options)


def leave(code: int = 0) -> NoReturn:
    """End this attempt with all its processes, as if the first of them had exited with ``code``."""
    call("job.exit", code=code)
    while True:
        time.sleep(1)


def command(words: Sequence[str]) -> int:
    """Carry out `ringfence-guest jobs …`; return its exit code. Raises CallRefused."""
    verb, *given = words or [""]
    try:
        if verb == "run" and "--" in given:
            return _print(_run_words(given).id)
        if verb == "wait" and len(given) in (1, 2):
            end = call("job.wait", job=given[0], timeout_s=float(*given[1:] or ("60",)))
            _print(json.dumps(end))
            return 0 if cast("dict[str, Json]", end)["state"] == "finished" else 1
        if verb == "status" and len(given) == 1:
            return _print(Child(given[0]).status())
        if verb == "exit" and len(given) < 2:
            leave(int(*given or ("0",)))
    except ValueError as error:
        sys.stderr.write(f"ringfence-guest: {error}\n")
        return 2
    sys.stderr.write(_USAGE)
    return 2


def _run_words(words: Sequence[str]) -> Child:
    at = words.index("--")
    head, options = list(words[:at]), Options(inherit=False)
    while head:
        word = head.pop(0)
        if word == "--inherit":
            options["inherit"] = True
        elif word == "--name" and head:
            options["name"] = head.pop(0)
        else:
            # A grant that was asked for and not given would be missed by nobody until the child needs it.
            raise ValueError(f"jobs run takes --name N and --inherit before --, not {word!r}")
    return run(words[at + 1 :], **options)


def _print(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return 0


def _spawn(work: dict[str, Json], options: Options) -> Child:
    fields: dict[str, Json] = dict(work)
    for key in ("name", "cwd", "retries", "priority", "node", "fresh", "at_most_once", "inherit"):
        if key in options:
            fields[key] = cast("dict[str, Json]", options)[key]
    if "env" in options:
        fields["env"] = dict(options["env"])
    if "timeout" in options:
        fields["limits"] = {"timeout_s": float(options["timeout"])}
    if "expires" in options:
        fields["not_after_ms"] = int((time.time() + options["expires"]) * 1000)
    if grants := _grants(options):
        fields["grants"] = grants
    found = cast("dict[str, Json]", call("job.spawn", **fields))
    return Child(str(found["job"]), bool(found["known"]))


def _grants(options: Options) -> dict[str, Json]:
    found: dict[str, Json] = {}
    paths: list[Json] = [{"path": path, "mode": "read"} for path in options.get("read", ())]
    for path in options.get("write", ()):
        paths.append({"path": path.removesuffix(":all"), "mode": "write", "all": path.endswith(":all")})
    if paths:
        found["paths"] = paths
    if net := [one for text in options.get("net", ()) for one in parse_net(text)]:
        found["net"] = [{"host": one.host, "port": one.port} for one in net]
    if tools := options.get("tools"):
        found["tools"] = list(tools)
    if not options.get("exec", True):
        found["no_exec"] = True
    return found | _totals(options)


def _totals(options: Options) -> dict[str, Json]:
    given = cast("dict[str, str | int | float]", options)
    found: dict[str, Json] = {}
    for key, name in (("memory", "memory_bytes"), ("disk", "disk_bytes")):
        if key in given:
            size = given[key]
            found[name] = parse_bytes(size) if isinstance(size, str) else size
    found |= {key: given[key] for key in ("pids", "spawn") if key in given}
    if "cpus" in given:
        found["cpus"] = float(given["cpus"])
    return found
