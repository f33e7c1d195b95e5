"""For applications' own tests: a task in this process, with the values it would get from the wire; or a private fleet.

Called by tests alone. Must never stand between a running application and its fleet: `in_place` isolates nothing, and
`fleet` lives as long as its block.

    from runner.testing import in_place
    assert in_place(double.s(21)) == 42

    pytest_plugins = ["runner.testing_pytest"]          # in conftest.py: the fixture ringfence_fleet
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from runner import context
from runner.app import App
from runner.canvas import Group, Signature, Step
from runner.errors import ConfigError, JobEndError, end_error
from runner.request import MAX_ARGUMENTS_BYTES, merged, parse_tags
from runner.task import Task
from runner.wire import codec, ids, sealed, values
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.hints import Hinted
from runner.wire.passing import Failure
from runner.wire.receipt import Outcome
from runner.wire.sealed import Sealed
from runner.wire.states import FailReason, State

__all__ = ["PrivateFleet", "fleet", "in_place"]

R = TypeVar("R")

_READY_S: Final = 60.0
_STOP_S: Final = 40.0
#: A Unix socket's path holds 107 bytes; a home adds its own folders and names.
_LONGEST_TMP: Final = 60
_FAILED_LIMIT: Final = 64 * 1024


def in_place(step: Step) -> Any:  # noqa: ANN401 - what the application's task returns
    """Carry out a call, or a shape of calls, in this process and return its result.

    Arguments and results take the way over the wire and back, so what can't travel fails here, too; `current_job` works
    inside. Nothing is isolated and no limit is kept.

    Raises:
        ValueTypeError: an argument has no form on the wire. JobFailed: the task raised (its cause), or its result has
        no form on the wire. JobRefused: a step before it did not finish.
    """
    return _value(_carried(step, None))


def _carried(step: Step, before: object) -> object:
    """Return the result of a step, or the error that stands for it; ``before`` is what the step before it left."""
    if isinstance(step, Signature):
        return _called(step, before)
    if isinstance(step, Group):
        return [_carried(inner, before) for inner in step.steps]
    for inner in step.steps:
        before = _carried(inner, before)
    return before


def _called(call: Signature[Any], before: object) -> object:
    task = cast("Task[Any, Any]", call.target)
    job = ids.new_job_id()
    broken = next(_errors(before), None)
    options = merged(task.options, call.options)
    if broken is not None and options.get("on_failure") != "run":
        why = f"job {broken.job}, which this one waited for, ended {broken.state}"
        return end_error(_outcome(job, State.REFUSED, "dependency_failed", detail=why))
    args = call.args if before is None or call.immutable else (_passed(before), *call.args)
    sent = _over_the_wire(args, call.kwargs)
    classes = Hinted(task.function)
    got = [values.decode(sent[name], classes, name) for name in ("args", "kwargs")]
    context.enter(context.Attempt(job, 1, task.name, parse_tags(options.get("tags"))))
    try:
        found = task.function(*cast("list[Any]", got[0]), **cast("dict[str, Any]", got[1]))
        return values.loads(values.dumps(found, path="result"), Hinted(task.function, result=True))
    except WireError as error:
        return _failed(job, FailReason.RESULT_NOT_STORABLE, error)
    except Exception as error:  # noqa: BLE001 - whatever a task raises is its result
        return _failed(job, FailReason.EXCEPTION, error)
    finally:
        context.leave()


def _over_the_wire(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Json]:
    """Return the arguments as a guest reads them; sealed values are opened, as a node's broker would."""
    held: list[Sealed] = []
    words = values.encode(list(args), MAX_ARGUMENTS_BYTES, "args", held)
    named = values.encode(dict(kwargs), MAX_ARGUMENTS_BYTES, "kwargs", held)
    sent: dict[str, Json] = {"args": words, "kwargs": named}
    for place, value in zip(sealed.places(words, named), held, strict=True):
        sealed.fill(sent, place, values.encode(value.open()))
    return cast("dict[str, Json]", codec.load(codec.dump(sent)))


def _passed(before: object) -> object:
    """Return what the next call is given: results, and a Failure for each job that has none."""
    if isinstance(before, list):
        return [_passed(one) for one in before]
    if isinstance(before, JobEndError):
        return Failure(before.job, before.state, before.reason, before.evidence.detail)
    return before


def _value(found: object) -> object:
    broken = next(_errors(found), None)
    if broken is not None:
        raise broken
    return found


def _errors(found: object) -> Iterator[JobEndError]:
    if isinstance(found, JobEndError):
        yield found
    elif isinstance(found, list):
        for one in found:
            yield from _errors(one)


def _failed(job: str, reason: FailReason, error: Exception) -> JobEndError:
    told = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error))[-_FAILED_LIMIT:],
    }
    made = end_error(_outcome(job, State.FAILED, reason, detail=f"{told['type']}: {told['message']}", error=told))
    made.__cause__ = error
    return made


def _outcome(job: str, state: State, reason: str, **facts: Any) -> Outcome:  # noqa: ANN401 - fields of Outcome
    return Outcome(job, 1, state, "in-place", "", time.time_ns() // 1_000_000, reason=reason, **facts)


@dataclass(frozen=True, slots=True)
class PrivateFleet:
    """A running private fleet. ``app`` talks to it; ``work`` is the folder that its jobs may be granted paths below."""

    home: Path
    work: Path
    app: App


@contextmanager
def fleet(
    imports: Sequence[str] = (), *, nodes: int = 1, slots: int = 2, options: Sequence[str] = ()
) -> Iterator[PrivateFleet]:
    """Run a private fleet (`ringfence up`) on a temporary home while the block runs; as root or an ordinary user.

    ``imports``: modules with tasks, ``MODULE`` or ``MODULE:DIR``. ``options``: more words for `up`. Within the block
    RINGFENCE_HOME names the home, so an application's own ``App()`` talks to this fleet, too.

    Raises:
        ConfigError: it did not start; the message holds what it said.
    """
    folder = Path(tempfile.mkdtemp(prefix="rf-", dir=_root()))
    # Daemons and jobs under other users pass through it.
    folder.chmod(0o711)
    try:
        work, home = folder / "work", folder / "h"
        work.mkdir()
        words = ["--nodes", str(nodes), "--slots", str(slots), "--allow", str(work)]
        for module in imports:
            words += ["--import", module]
        with _running(home, [*words, *options], folder / "up.log"), _named(home), App(home=home) as app:
            yield PrivateFleet(home, work, app)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(home: Path, words: Sequence[str], log: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-m", "runner.cli", "--home", str(home), "up", *words]
    env = {name: text for name, text in os.environ.items() if not name.startswith("RINGFENCE_")}
    with log.open("wb") as told:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told, env=env)
    try:
        if _first_line(process) != b"ready":
            raise ConfigError(f"the private fleet did not start:\n{log.read_text('utf-8', 'replace')[-4000:]}")
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _named(home: Path) -> Iterator[None]:
    """Have every App() of this process talk to this home; what it was connected to before is closed."""
    from runner.client import disconnect_all

    before = os.environ.get("RINGFENCE_HOME")
    disconnect_all()
    os.environ["RINGFENCE_HOME"] = str(home)
    try:
        yield
    finally:
        disconnect_all()
        if before is None:
            del os.environ["RINGFENCE_HOME"]
        else:
            os.environ["RINGFENCE_HOME"] = before


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first line of a process's output, or b"" at its end or after _READY_S."""
    lines: list[bytes] = []

    def read() -> None:
        lines.append(process.stdout.readline() if process.stdout is not None else b"")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_READY_S)
    return lines[0].strip() if lines else b""


def _root() -> str:
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_TMP else "/tmp"  # noqa: S108 - mkdtemp makes it private
