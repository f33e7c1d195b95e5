"""A Python task in its sandbox: import, call, write the result.

Called by bootstrap. Must never run a function that its module does not offer as a task, and never let an exception of
the task, SystemExit and KeyboardInterrupt included, end the process without a result record.

The record on FD_RESULT is canonical JSON: {"ok": value} or {"error": {"type", "message", "traceback"}}.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Final, cast

from runner.wire import codec, values
from runner.wire.codec import Json
from runner.wire.errors import ValueTypeError, WireError
from runner.wire.frames import FD_RESULT

__all__ = ["preload", "rehearse", "run"]

#: Loaded by name: the application's side of the package, stdlib and wire only. Never a module of tasks before the fork.
CONTEXT: Final = "runner.context"
TASKS: Final = "runner.task"
APP: Final = "runner.app"
MAX_MESSAGE: Final = 4096
MAX_TRACEBACK: Final = 64 * 1024
EXIT_EXCEPTION: Final = 1
#: F_SEAL_SEAL, SHRINK, GROW and WRITE.
_ALL_SEALS: Final = 0xF


class UnknownTaskError(Exception):
    """The module offers no task of this name."""


class ResultNotStorable(Exception):
    """The task's return value has no form on the wire."""


class ResultTooLarge(Exception):
    """The task's return value is over the job's limit."""


def preload() -> None:
    """Load, once in the zygote, what every module of tasks imports; commands do without it."""
    with suppress(ImportError):
        for name in (CONTEXT, TASKS, APP):
            importlib.import_module(name)
    for stream in (sys.stdout, sys.stderr):
        # Lines reach the log as they are written, not when the task ends.
        stream.reconfigure(line_buffering=True, write_through=stream is sys.stderr)  # type: ignore[union-attr]


def rehearse(payload: dict[str, Json]) -> None:
    """Go the way of a task without one; for ``bootstrap.preload``. Leaves nothing behind."""
    with suppress(ImportError):
        _enter(payload)
        _loaded(CONTEXT).leave()
    values.decode(payload["args"], path="args")
    _encoded(1, len(CONTEXT))
    importlib.util.find_spec("ringfence_no_such_module")


def run(payload: dict[str, Json], limit_bytes: int) -> int:
    """Call the task of ``payload``, write its record, return the exit code: 0, or 1 after an exception."""
    gc.enable()
    code = 0
    try:
        _enter(payload)
        body = _encoded(_called(payload), limit_bytes)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises is its result
        code = EXIT_EXCEPTION
        body = _failure(error, limit_bytes)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    _write(body)
    return code


def _enter(payload: dict[str, Json]) -> None:
    context = _loaded(CONTEXT)
    attempt = str(payload.get("attempt", 0)).rpartition(".")[2]
    context.enter(
        context.Attempt(
            job=str(payload.get("job", "")),
            attempt=int(attempt) if attempt.isdecimal() else 0,
            task=str(payload["task"]),
            tags={name: str(value) for name, value in cast("dict[str, Json]", payload.get("tags") or {}).items()},
        )
    )


def _called(payload: dict[str, Json]) -> object:
    name = str(payload["task"])
    function = _function(name)
    args = cast("list[object]", values.decode(payload.get("args") or [], path="args"))
    kwargs = cast("dict[str, object]", values.decode(payload.get("kwargs") or {}, path="kwargs"))
    return function(*args, **kwargs)


def _function(name: str) -> Callable[..., object]:
    module = name.partition(":")[0]
    _loaded(module)
    registry = cast("dict[str, object]", _loaded(TASKS).REGISTRY)
    task = registry.get(name)
    if task is None:
        raise UnknownTaskError(f"{module} has no task {name}: decorate the function with @app.task")
    return cast("Callable[..., object]", getattr(task, "function", task))


def _loaded(name: str) -> ModuleType:
    """Return a module, imported if need be; the preloaded ones are there and cost nothing."""
    return sys.modules.get(name) or importlib.import_module(name)


def _encoded(value: object, limit_bytes: int) -> bytes:
    try:
        body = codec.dump({"ok": values.encode(value, path="result")})
    except WireError as error:
        if isinstance(error, ValueTypeError) and "larger than" in str(error):
            raise ResultTooLarge(str(error)) from None
        raise ResultNotStorable(str(error)) from None
    if len(body) > limit_bytes:
        raise ResultTooLarge(f"{len(body)} bytes, the limit is {limit_bytes}: write a file and return its path")
    return body


def _failure(error: BaseException, limit_bytes: int) -> bytes:
    """Return the record of an exception; whatever its parts do when asked for text, there is a record."""
    kind = type(error).__name__
    try:
        message, trace = str(error), "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - __str__ and __repr__ belong to the task
        message, trace = "the exception can't be shown", ""
    fields = {"type": kind, "message": message[:MAX_MESSAGE], "traceback": trace[-MAX_TRACEBACK:]}
    clean = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in fields.items()}
    body = codec.dump({"error": clean})
    if len(body) > limit_bytes:
        body = codec.dump({"error": {"type": kind[:64], "message": "", "traceback": ""}})
    return body


def _write(body: bytes) -> None:
    view = memoryview(body)
    while view:
        view = view[os.write(FD_RESULT, view) :]
    # Nothing that the task left running may change the result any more.
    with suppress(OSError):
        fcntl.fcntl(FD_RESULT, fcntl.F_ADD_SEALS, _ALL_SEALS)
