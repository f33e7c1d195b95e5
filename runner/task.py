"""Tasks: functions with a name that a node can find, and ``delay`` that keeps their signature.

Called by application modules at import (in guests too, so nothing heavy loads here) and by the guest, which looks a
task up in ``REGISTRY`` after importing its module. Must never run or import a function by a name from the queue itself.

A job's path goes on in runner/client.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, TypeVar, Unpack

from runner import context, request
from runner.errors import TaskNameError, UsageError
from runner.job import Job
from runner.place import Place
from runner.request import JobOptions

__all__ = ["REGISTRY", "Task", "name_of"]

P = ParamSpec("P")
R = TypeVar("R")

_MAIN: Final = "__main__"


class Task(Generic[P, R]):
    """A function that nodes can run. Calling it runs it here and now; ``delay`` makes a job of the call."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], place: Place, options: JobOptions) -> None:
        """Register ``function`` under its name. Raises TaskNameError, UsageError (async function, bad options)."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"task {function.__qualname__} is async: make it a plain function that calls asyncio.run")
        self.function = function
        self.name = name_of(function)
        self.options = request.merged(JobOptions(), options)
        self._place = place
        functools.update_wrapper(self, function)
        REGISTRY[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in this process, without any queue or isolation."""
        return self.function(*args, **kwargs)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue a call with the task's own options and return its handle.

        Raises:
            TypeError: the arguments do not fit the function. ValueTypeError: an argument has no form on the wire.
            InsideJobError, TaskNameError, ConfigError, StoreError, EnqueueError.
        """
        return self._enqueue(args, kwargs, JobOptions())

    def apply_async(
        self,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        **options: Unpack[JobOptions],
    ) -> Job[R]:
        """Like `delay`, with options for this call: ``tags`` are joined with the task's, all others replace them."""
        return self._enqueue(args, kwargs or {}, options)

    def _enqueue(self, args: Sequence[object], kwargs: Mapping[str, object], options: JobOptions) -> Job[R]:
        context.refuse_inside(f"{self.name}.delay()")
        from runner.client import connect  # loads redis: only at the first enqueue, never in a guest

        if self.name.startswith(_MAIN):
            raise TaskNameError(f"{self.name} is in the program itself: move it to a module that nodes can import")
        # Looked at here, not when the task is made: workers make every task of a module and enqueue none.
        inspect.signature(self.function).bind(*args, **kwargs)
        chosen = request.merged(self.options, options)
        spec = request.build(chosen, task=self.name, args=args, kwargs=kwargs, tenant=self._place.tenant)
        connect(self._place).enqueue([spec])
        return Job(self._place, spec.id, spec)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


#: Every task of the imported modules by ``module:qualname``.
REGISTRY: Final[dict[str, Task[Any, Any]]] = {}


def name_of(function: Callable[..., object]) -> str:
    """Return ``module:qualname``; a program started by ``python -m`` counts by its module's name.

    Raises:
        TaskNameError: a function inside a function, or a lambda: no node could find it.
    """
    qualname = function.__qualname__
    if "<" in qualname:
        raise TaskNameError(f"task {qualname} is not at the top of its module: nodes could not find it")
    module = function.__module__
    if module == _MAIN:
        spec = getattr(sys.modules[_MAIN], "__spec__", None)
        module = spec.name if spec is not None else _MAIN
    return f"{module}:{qualname}"
