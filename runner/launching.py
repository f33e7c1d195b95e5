"""From a shape of calls to signed jobs, enqueued together.

Called by task (``launch``, ``map``) and app (``enqueue_many``). Must never enqueue a part of a shape whose other part
can't be made: every call is checked and encoded before the first batch is sent. A batch of up to BATCH_JOBS (client.py)
is enqueued whole or not at all; a larger shape takes several, those that others wait for first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from runner import context, request
from runner.canvas import Output, Signature, Step, lower
from runner.errors import TaskNameError, UsageError
from runner.flow import Flow, Shape
from runner.job import Job
from runner.place import Place
from runner.request import JobOptions
from runner.wire import ids
from runner.wire.hints import Hinted
from runner.wire.spec import JobSpec

__all__ = ["enqueue_many", "launch"]

_MAIN = "__main__"


def launch(place: Place, step: Step, options: JobOptions) -> Flow[Any]:
    """Enqueue a shape; ``options`` come on top of each call's own. Raises as `Task.delay`, and UsageError."""
    context.refuse_inside("a flow")
    name = options.get("group") or f"flow-{ids.ulid()}"
    jobs: dict[str, Job[Any]] = {}
    specs: list[JobSpec] = []

    def make(call: Signature[Any], args: tuple[object, ...], after: tuple[str, ...]) -> str:
        if call.options.get("group") is not None:
            raise UsageError("a flow is a group of its own: name it with apply_async(group=…), not a call of it")
        named = cast("JobOptions", {**options, "group": name, "after": (*request.named_after(call.options), *after)})
        spec = _spec_of(place, call, args, named)
        specs.append(spec)
        jobs[spec.id] = _handle(place, call, spec)
        return spec.id

    output = lower(step, make)
    tenants = {spec.tenant for spec in specs}
    if len(tenants) > 1:
        raise UsageError(f"a flow belongs to one tenant, not to {', '.join(sorted(tenants))}")
    _send(place, specs)
    return Flow(replace(place, tenant=tenants.pop()), name, jobs.values(), _shape(output, jobs))


def enqueue_many(place: Place, calls: Iterable[Signature[Any]]) -> list[Job[Any]]:
    """Enqueue single calls and return their handles in order. Raises as `launch`."""
    context.refuse_inside("app.enqueue_many()")
    chosen = list(calls)
    specs = [_spec_of(place, call, call.args, JobOptions()) for call in chosen]
    _send(place, specs)
    return [_handle(place, call, spec) for call, spec in zip(chosen, specs, strict=True)]


def _send(place: Place, specs: list[JobSpec]) -> None:
    """Sign and send jobs, in their order."""
    from runner.client import connect

    connect(place).enqueue(specs)


def _spec_of(place: Place, call: Signature[Any], args: tuple[object, ...], options: JobOptions) -> JobSpec:
    """Return the job of one call. Raises TypeError (arguments that do not fit), TaskNameError, UsageError, …"""
    target: Any = call.target
    _check(target.name, target.function, args, call.kwargs)
    own = request.merged(request.merged(target.options, call.options), options)
    if own.get("on_duplicate") == "return":
        raise UsageError("on_duplicate=return is for single calls: of several, none is enqueued if a name is taken")
    return request.build(own, task=target.name, args=args, kwargs=call.kwargs, tenant=place.tenant)


def _check(name: str, function: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    """Raise what a call that no node could carry out raises: TypeError, TaskNameError."""
    if name.startswith(_MAIN):
        raise TaskNameError(f"{name} is in the program itself: move it to a module that nodes can import")
    # Looked at here, not when the task is made: workers make every task of a module and enqueue none.
    inspect.signature(function).bind(*args, **kwargs)


def _handle(place: Place, call: Signature[Any], spec: JobSpec) -> Job[Any]:
    target: Any = call.target
    return Job(place, spec.id, spec, Hinted(target.function, result=True))


def _shape(output: Output, jobs: dict[str, Job[Any]]) -> Shape:
    if isinstance(output, list):
        return [_shape(each, jobs) for each in output]
    return jobs[output.job]
