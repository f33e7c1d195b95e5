"""The worker: an attempt's first process, from the fork to the moment it may run the job.

Called by the mould in a fresh child (``run``, never returns). Takes the plan from its channel, puts itself into the
view, gives up every right, checks that it did, answers READY, and hands over to the guest, which reads the payload.
Must fail closed: an error in any step is a FAILED record and the end of this process, and no step is ever skipped.

Port: the one file of the containment that loads the guest (runner.guest).
Source: DESIGN §5; the order of steps is part of the design.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from os import dup2
from typing import Final, NoReturn

from node_agent.containment import plan as plans
from node_agent.containment import seccomp, view
from node_agent.containment.answer import seated_rows
from node_agent.containment.known import HOME, MOST, Known
from node_agent.containment.outfit import (
    BROKER,
    FIRST_FD,
    Kit,
    Outfit,
    fence_rows,
    files_row,
    looked,
    view_rows,
)
from node_agent.containment.plan import Plan
from node_agent.containment.plan import needs as plan_needs
from node_agent.containment.plan import of as plan_of
from node_agent.containment.plan import values as plan_values
from node_agent.containment.reaper import leave
from node_agent.containment.script import ANY, Memory, StepError, Table, row
from node_agent.containment.script import run as carry_out
from node_agent.containment.seccomp import Filter
from node_agent.containment.view import ViewError
from runner.guest import again, bootstrap
from runner.guest.bootstrap import main as guest_main
from runner.wire import codec, frames
from runner.wire.frames import FD_KERNEL, Op

__all__ = ["OWN_PATHS", "Kit", "Progress", "learn", "make_kit", "run"]

EXIT_SETUP: Final = 70
#: The package that a task's module imports; in an editable install it lies outside of the environment.
OWN_PATHS: Final = (os.path.dirname(os.path.dirname(os.path.abspath(frames.__file__))),)
_PLAN: Final = int(Op.PLAN)
#: The kind of a task whose worker runs others after it.
_REUSED: Final = "reused"
LOOK_BYTES: Final = len(looked(0, 0))
_EXPECTED: Final = {count: tuple(range(FIRST_FD, FIRST_FD + count)) for count in (2, 3)}


class CheckError(Exception):
    """The finished sandbox is not what it must be; the message says what is wrong."""


@dataclass(slots=True)
class Progress:
    """The step that is being done, for the report of a failure."""

    step: str = "plan"


def make_kit() -> Kit:
    """Load and make, in the zygote, what all workers need: what is made before the fork is not made again by each."""
    bootstrap.preload()
    sample = plans.dumps(Plan("job.1", "task", "A", 1, 1))
    memory = Memory()
    rows = (row("rehearsal", "getpid", expect=ANY), row("rehearsal", "getppid", expect=ANY))
    table = Table(rows)
    for _ in range(bootstrap.REHEARSALS):
        plan_needs(plan_values(sample))
        carry_out(rows)
        table.run()
        memory.message(1)
        memory.arrived(1)
        memory.begin(LOOK_BYTES)
    forms = [(unix, execute) for unix in (True, False) for execute in (True, False)]
    filters: dict[tuple[bool, ...], Filter] = {
        form: seccomp.build(allow_unix=form[0], allow_exec=form[1]) for form in forms
    }
    filters |= {(*form, True): seccomp.build(allow_unix=form[0], allow_exec=form[1], alone=True) for form in forms}
    return Kit(filters, memory)


def run(channel_fd: int, ready: Outfit) -> NoReturn:
    """Restrict this process as the plan says, then become the job."""
    try:
        dup2(channel_fd, FD_KERNEL)
        size = ready.opening.run()  # it waits here for its plan, if it was forked ahead
        if not size:
            os._exit(EXIT_SETUP)  # the agent is gone
        known = ready.known.get(ready.memory.arrived(size))
        if known is None:
            kind, task_paths, result_bytes = _restrict(ready, size)
        else:
            kind, task_paths, result_bytes, look, restrict, answer = known
            restrict.run()
            if ready.memory.begin(LOOK_BYTES) != look:
                raise _unlike()  # noqa: TRY301 - a function that raises would cost every worker two pages
            answer.run()
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the mould's loop
        _fail(error)
    try:
        leave(again.main(task_paths, result_bytes) if kind == _REUSED else guest_main(kind, task_paths, result_bytes))
    finally:
        os._exit(EXIT_SETUP)


def learn(ready: Outfit, record: bytes) -> None:
    """Make, in the mould, all that its workers will do for a plan; one that is not plain (known.py) is an error."""
    values = plan_values(record[1:])
    kind, mounts, python_paths, task_paths, uid, gid, cwd, *rest = plan_needs(values)
    *sizes, files, pids, data_bytes, file_bytes, result_bytes, allow_unix, allow_exec, nice, broker, reuse = rest
    if record[0] != _PLAN or mounts or broker or reuse or not allow_exec or cwd != HOME:
        raise CheckError("this plan is not to be learned")
    stdio, own_paths = (3, OWN_PATHS) if kind == "task" else (2, ())
    rows = view_rows(ready, python_paths + task_paths + own_paths, stdio, (uid, gid), tuple(sizes))
    limits = (pids, data_bytes, file_bytes, nice)
    rows += fence_rows(ready, stdio, (uid, gid), limits, cwd, form=(allow_unix, allow_exec))
    if len(ready.known) >= MOST:
        del ready.known[next(iter(ready.known))]
    ready.known[Memory.expected(record, _EXPECTED[stdio])] = Known(
        kind=kind,
        task_paths=task_paths,
        result_bytes=result_bytes,
        look=looked(uid, gid),
        restrict=Table(rows),
        answer=Table((*ready.answer, *ready.shut[stdio], files_row(ready, files))),
    )


def _restrict(ready: Outfit, size: int) -> tuple[str, tuple[str, ...], int]:
    """Do as the plan says that has arrived, READY included. Returns its kind, task paths and largest result."""
    data, fds = ready.memory.message(size)
    if data[0] != _PLAN:
        raise CheckError("the first record is no plan")
    values = plan_values(data[1:])
    kind, mounts, python_paths, task_paths, uid, gid, cwd, *rest = plan_needs(values)
    *sizes, files, pids, data_bytes, file_bytes, result_bytes, allow_unix, allow_exec, nice, broker, reuse = rest
    stdio = 3 if kind == "task" else 2
    if fds[:stdio] != _EXPECTED[stdio]:
        raise CheckError("a descriptor arrived where a fixed one belongs")
    own_paths = OWN_PATHS if kind == "task" else ()
    grants = fds[stdio:]
    if broker:
        if grants[:1] != (FIRST_FD + stdio,):
            raise CheckError("the channel to the broker did not arrive where it belongs")
        grants, stdio = grants[1:], BROKER + stdio
    limits = (pids, data_bytes, file_bytes, nice)
    form = (allow_unix, allow_exec, True) if reuse else (allow_unix, allow_exec)
    if mounts or not allow_exec or broker:
        writable = _build(plan_of(values), ready, grants, own_paths)
        rows = fence_rows(ready, stdio, (uid, gid), limits, cwd, form=form, writable=writable)
    else:
        rows = view_rows(ready, python_paths + task_paths + own_paths, stdio, (uid, gid), tuple(sizes))
        rows += fence_rows(ready, stdio, (uid, gid), limits, cwd, form=form)
    carry_out(rows)
    if ready.memory.begin(LOOK_BYTES) != looked(uid, gid):
        raise _unlike()
    answer = seated_rows(ready.memory, ready.level) if broker else ready.answer
    carry_out((*answer, *ready.shut[stdio], files_row(ready, files)))
    return _REUSED if reuse else kind, task_paths, result_bytes


def _build(plan: Plan, ready: Outfit, grants: tuple[int, ...], own_paths: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Make a view with grants, or one in a mould that keeps the host's tree; return the writable paths."""
    step = "view"
    try:
        view.build(plan, ready.prepared, own_paths)
        step = "grant"
        view.attach_grants(plan, grants)
        step = "root"
        view.enter()
    except OSError as error:
        raise StepError(step, error.errno or 0, error.strerror or str(error)) from error
    except (ViewError, ValueError) as error:
        raise StepError(step, 0, str(error)) from error
    writable = [(grant.path, grant.kind == "dir") for grant in plan.mounts if grant.mode == "write"]
    return [*writable, (f"/{view.SECRETS}", True)] if plan.broker else writable


def _unlike() -> StepError:
    return StepError("check", 0, "a capability or a foreign uid or gid is left, or the folder lies outside the view")


def _fail(error: BaseException) -> NoReturn:
    errno = error.errno or 0 if isinstance(error, OSError) else 0
    step = error.step if isinstance(error, StepError) else "plan"
    body = codec.dump({"step": step, "errno": errno, "detail": ascii(str(error) or type(error).__name__)[1:301]})
    with suppress(OSError):
        os.write(FD_KERNEL, frames.pack(Op.FAILED, body))
    os._exit(EXIT_SETUP)
