"""A Python task in its sandbox: import, call, write the result.

Called by bootstrap. Must never run a function that its module does not offer as a task, and never let an exception of
the task, SystemExit and KeyboardInterrupt included, end the process without a result record.

The record on FD_RESULT is canonical JSON: {"ok": value} or {"error": {"type", "message", "traceback"}}.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import F_ADD_SEALS, fcntl
from gc import enable as enable_collector
from os import write
from types import ModuleType
from typing import Any, Final

from runner.guest.modules import load
from runner.wire.codec import Json
from runner.wire.codec import dump as dump_json
from runner.wire.errors import ValueTypeError, WireError
from runner.wire.flow import MAX_SPAN_S
from runner.wire.frames import FD_RESULT
from runner.wire.hints import Hinted
from runner.wire.values import decode as decode_value
from runner.wire.values import encode as encode_value

__all__ = ["preload", "rehearse", "run"]

#: Loaded by name: the application's side of the package, stdlib and wire only. Never a module of tasks before the fork.
CONTEXT: Final = "runner.context"
TASKS: Final = "runner.task"
APP: Final = "runner.app"
ERRORS: Final = "runner.errors"
PACKAGE: Final = "runner"
SAMPLE: Final = "sample:nothing"
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
        package = importlib.import_module(PACKAGE)
        for name in ("App", "current_job", "Grants", "Job", "Secret"):
            getattr(package, name)  # looked up once here, not by every task's import
    for stream in (sys.stdout, sys.stderr):
        # Lines reach the log as they are written, not when the task ends.
        stream.reconfigure(line_buffering=True, write_through=stream is sys.stderr)  # type: ignore[union-attr] # text files of the interpreter


def rehearse(payload: dict[str, Json]) -> None:
    """Go the way of a task without one; for ``bootstrap.preload``. Leaves nothing behind."""
    _outcome(payload | {"task": SAMPLE}, [os.path.dirname(os.path.abspath(__file__))], MAX_MESSAGE)
    sys.modules.pop(SAMPLE.partition(":")[0], None)
    with suppress(ImportError):
        _loaded(CONTEXT).leave()
        _loaded(TASKS).REGISTRY.clear()


def run(payload: dict[str, Json], folders: Sequence[str], limit_bytes: int) -> int:
    """Call the task of ``payload``, write its record, return the exit code: 0, or 1 after an exception.

    ``folders``: where the task's module is looked for first.
    """
    enable_collector()
    code, body = _outcome(payload, folders, limit_bytes)
    _flush()
    _write(body)
    return code


def _outcome(payload: dict[str, Json], folders: Sequence[str], limit_bytes: int) -> tuple[int, bytes]:
    try:
        _enter(payload)
        return 0, _encoded(_called(payload, folders), limit_bytes)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises is its result
        return EXIT_EXCEPTION, _failure(error, limit_bytes)


def _flush() -> None:
    # The task may have closed or replaced them.
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - suppress() touches six more pages, which each worker would have to copy
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


def _enter(payload: dict[str, Json]) -> None:
    context = _loaded(CONTEXT)
    attempt = str(payload.get("attempt", 0)).rpartition(".")[2]
    context.enter(
        context.Attempt(
            job=str(payload.get("job", "")),
            attempt=int(attempt) if attempt.isdecimal() else 0,
            task=str(payload["task"]),
            tags=_texts(payload.get("tags")),
        )
    )


def _called(payload: dict[str, Json], folders: Sequence[str]) -> object:
    name = str(payload["task"])
    function = _function(name, folders)
    given, named = payload.get("args"), payload.get("kwargs")
    if not given and not named:
        return function()
    classes = Hinted(function)
    args: Any = decode_value(given or [], classes, "args")
    kwargs: Any = decode_value(named or {}, classes, "kwargs")
    return function(*args, **kwargs)


def _texts(found: Json) -> dict[str, str]:
    return {name: str(value) for name, value in found.items()} if isinstance(found, dict) and found else {}


def _function(name: str, folders: Sequence[str]) -> Callable[..., object]:
    module = name.partition(":")[0]
    load(module, folders)
    task = _loaded(TASKS).REGISTRY.get(name)
    if task is None:
        raise UnknownTaskError(f"{module} has no task {name}: decorate the function with @app.task")
    found: Callable[..., object] = getattr(task, "function", task)
    return found


def _loaded(name: str) -> ModuleType:
    """Return a module, imported if need be; the preloaded ones are there and cost nothing."""
    return sys.modules.get(name) or importlib.import_module(name)


def _encoded(value: object, limit_bytes: int) -> bytes:
    try:
        body = dump_json({"ok": encode_value(value, path="result")})
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
    clean: dict[str, Json] = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in fields.items()}
    asked = _retry_of(error)
    body = dump_json({"error": clean | asked})
    if len(body) > limit_bytes:
        body = dump_json({"error": {"type": kind[:64], "message": "", "traceback": "", **asked}})
    return body


def _retry_of(error: BaseException) -> dict[str, Json]:
    """In how many seconds the task asks to be tried again, if it does."""
    asks = getattr(sys.modules.get(ERRORS), "Retry", None)
    if asks is None or not isinstance(error, asks):
        return {}
    in_s = getattr(error, "in_s", None)
    return {"retry_in_s": float(in_s)} if isinstance(in_s, int | float) and 0 <= in_s <= MAX_SPAN_S else {}


def _write(body: bytes) -> None:
    done = write(FD_RESULT, body)
    while done < len(body):
        done += write(FD_RESULT, body[done:])
    try:  # noqa: SIM105 - as in _flush
        # Nothing that the task left running may change the result any more.
        fcntl(FD_RESULT, F_ADD_SEALS, _ALL_SEALS)
    except OSError:
        pass
