"""Tasks: functions with a name that a node can find, and ``delay`` that keeps their signature.

Called by application modules at import (in guests too, so nothing heavy loads here) and by the guest, which looks a
task up in ``REGISTRY`` after importing its module. Must never run or import a function by a name from the queue itself.

A job's path goes on in runner/client.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, Unpack

from runner import context, request
from runner.aio import in_thread
from runner.errors import TaskNameError, UsageError
from runner.job import Job
from runner.place import Place
from runner.request import JobOptions
from runner.wire.hints import Hinted

if TYPE_CHECKING:
    from runner.canvas import Group, Signature, Step
    from runner.flow import Flow

__all__ = ["REGISTRY", "Task", "name_of"]

P = ParamSpec("P")
R = TypeVar("R")

_MAIN: Final = "__main__"
_ASYNC: Final = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Task(Generic[P, R]):
    """A function that nodes can run. Calling it runs it here and now; ``delay`` makes a job of the call."""

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], place: Place, options: JobOptions) -> None:
        """Register ``function`` under its name. Raises TaskNameError, UsageError (async function, bad options)."""
        if _is_async(function):
            raise UsageError(f"task {function.__qualname__} is async: make it a plain function that calls asyncio.run")
        self.function = function
        self.name = name_of(function)
        self.options = request.merged(JobOptions(), options) if options else options
        self._place = place
        self._signature: inspect.Signature | None = None
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

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """`delay` without blocking the event loop."""
        return await in_thread(self._enqueue, args, kwargs, JobOptions())

    async def aapply_async(
        self,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        **options: Unpack[JobOptions],
    ) -> Job[R]:
        """`apply_async` without blocking the event loop."""
        return await in_thread(self._enqueue, args, kwargs or {}, options)

    def s(self, *args: object, **kwargs: object) -> Signature[R]:
        """Return this call, not made yet, as a step of a flow: it takes the result of the step before it first."""
        from runner.canvas import Signature

        return Signature(self, args, kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """Return this call, not made yet, as a step of a flow that takes no result of the step before it."""
        from runner.canvas import Signature

        return Signature(self, args, kwargs, immutable=True)

    def map(self, inputs: Iterable[object]) -> Group[list[R]]:
        """Return a group of one call per input: ``task.map([1, 2]).delay().result()`` is a list in their order."""
        from runner.canvas import Group, Signature

        return Group(tuple(Signature(self, (one,)) for one in inputs))

    def starmap(self, inputs: Iterable[Sequence[object]]) -> Group[list[R]]:
        """Like `map`, each input being all arguments of one call."""
        from runner.canvas import Group, Signature

        return Group(tuple(Signature(self, tuple(one)) for one in inputs))

    def launch(self, step: Step, options: JobOptions) -> Flow[Any]:
        """Enqueue a shape of calls of which this task's is the first; for the shapes themselves."""
        from runner.launching import launch

        return launch(self._place, step, options)

    def _enqueue(self, args: Sequence[object], kwargs: Mapping[str, object], options: JobOptions) -> Job[R]:
        context.refuse_inside(f"{self.name}.delay()")
        from runner.client import connect  # loads redis: only at the first enqueue, never in a guest

        if self.name.startswith(_MAIN):
            raise TaskNameError(f"{self.name} is in the program itself: move it to a module that nodes can import")
        # Looked at here, not when the task is made: workers make every task of a module and enqueue none.
        if self._signature is None:
            self._signature = inspect.signature(self.function)
        self._signature.bind(*args, **kwargs)
        chosen = request.merged(self.options, options)
        made = request.draft(chosen, task=self.name, args=args, kwargs=kwargs, tenant=self._place.tenant)
        job_id = connect(self._place).enqueue_one(made, chosen.get("on_duplicate"))
        like = request.spec_of(made) if job_id == made.id else None
        return Job(self._place, job_id, like, Hinted(self.function, result=True))

    def __repr__(self) -> str:
        return f"<task {self.name}>"


def _is_async(function: Callable[..., object]) -> bool:
    if type(function) is FunctionType and not function.__dict__:
        # What inspect would find by way of four modules: every worker makes the tasks of its module.
        return function.__code__.co_flags & _ASYNC != 0
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


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
