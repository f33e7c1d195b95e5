"""Shapes of work: calls in a chain, in a group, or a group with a body (a chord), and what each call waits for.

Called by applications (``chain``, ``group``, ``chord``, ``task.s``) and by launching (which makes jobs of a shape).
Pure: it draws no id, reads no clock and sends nothing. Must never drop a step silently: an empty shape, or one that is
wider than a job may wait for, is refused before anything is signed.

    chain(a.s(1), b.s(2))          b(result of a, 2)
    group(a.s(1), a.s(2))          both at once; the results in order
    chord(group(...), c.s())       c([result, ...]); the same as chain(group(...), c.s())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar, Unpack, cast

from runner import aio
from runner.errors import UsageError
from runner.request import JobOptions
from runner.wire.flow import MAX_AFTER
from runner.wire.values import ResultOf

if TYPE_CHECKING:
    from runner.flow import Flow
    from runner.job import Job

__all__ = ["Chain", "Group", "Make", "Signature", "Step", "Target", "chain", "chord", "group", "lower", "signatures"]

R = TypeVar("R")

#: What a step hands to the next one: the place of one result, or a list of them.
Output: TypeAlias = "ResultOf | list[Output]"
#: Makes a job of one call: (call, its arguments, the jobs it waits for); returns the job's id.
Make: TypeAlias = "Callable[[Signature[Any], tuple[object, ...], tuple[str, ...]], str]"


class Target(Protocol):
    """A task, as far as a shape needs it."""

    @property
    def name(self) -> str:
        """``module:qualname``."""

    def launch(self, step: Step, options: JobOptions) -> Flow[Any]:
        """Enqueue a whole shape and return its handle."""

    def apply_async(
        self, args: Sequence[object] = ..., kwargs: Mapping[str, object] | None = ..., **options: Unpack[JobOptions]
    ) -> Job[Any]:
        """Enqueue one call."""


class _Shape(Generic[R]):
    """What every shape of several calls can do."""

    __slots__ = ()

    def delay(self) -> Flow[R]:
        """Enqueue every call of the shape and return the handle of the whole. Raises as `apply_async`."""
        return self.apply_async()

    def apply_async(self, **options: Unpack[JobOptions]) -> Flow[R]:
        """Like `delay`, with options that every call gets in addition to its own; ``group`` names the whole.

        Raises UsageError, ValueTypeError, ConfigError, StoreError, EnqueueError, InsideJobError.
        """
        step = cast("Step", self)
        first = next(signatures(step), None)
        if first is None:
            raise UsageError(f"an empty {type(self).__name__.lower()}: give it at least one call")
        return cast("Flow[R]", first.target.launch(step, options))

    async def adelay(self) -> Flow[R]:
        """`delay` without blocking the event loop."""
        return await aio.in_thread(self.delay)

    async def aapply_async(self, **options: Unpack[JobOptions]) -> Flow[R]:
        """`apply_async` without blocking the event loop."""
        return await aio.in_thread(self.apply_async, **options)


@dataclass(frozen=True, slots=True)
class Signature(Generic[R]):
    """One call that has not been made. ``immutable``: it takes no result of the step before it."""

    target: Target
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    options: JobOptions = field(default_factory=lambda: JobOptions())
    immutable: bool = False

    def set(self, **options: Unpack[JobOptions]) -> Signature[R]:
        """Return the same call with these options on top of its own, such as ``on_failure="run"``."""
        return replace(self, options=cast("JobOptions", {**self.options, **options}))

    def delay(self) -> Job[R]:
        """Enqueue this call alone."""
        return self.target.apply_async(self.args, self.kwargs, **self.options)

    def apply_async(self, **options: Unpack[JobOptions]) -> Job[R]:
        """Enqueue this call alone, with these options on top of its own."""
        return self.set(**options).delay()

    async def adelay(self) -> Job[R]:
        """`delay` without blocking the event loop."""
        return await aio.in_thread(self.delay)

    async def aapply_async(self, **options: Unpack[JobOptions]) -> Job[R]:
        """`apply_async` without blocking the event loop."""
        return await aio.in_thread(self.apply_async, **options)


@dataclass(frozen=True, slots=True)
class Chain(_Shape[R]):
    """Steps one after another; each gets the result of the one before it as its first argument."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Group(_Shape[R]):
    """Steps side by side; their results are a list in this order."""

    steps: tuple[Step, ...]


Step: TypeAlias = "Signature[Any] | Chain[Any] | Group[Any]"


def chain(*steps: Step | Iterable[Step]) -> Chain[Any]:
    """Return the steps as a chain; its result is the last one's. If one step does not finish, those after it don't run.

    ``.s`` calls get the result of the step before them as their first argument, ``.si`` calls don't; after a group that
    is the list of its results.
    """
    return Chain(_steps(steps, "chain"))


def group(*steps: Step | Iterable[Step]) -> Group[list[Any]]:
    """Return the steps as a group: side by side, each whatever becomes of the others."""
    return Group(_steps(steps, "group"))


def chord(members: Group[Any] | Iterable[Step], body: Signature[R]) -> Chain[R]:
    """Return a group and what is called with the list of its results.

    If a member does not finish, the body is refused (``dependency_failed``) as soon as that is known. With
    ``body.set(on_failure="run")`` it runs when all have ended, and gets a `Failure` in the place of each missing
    result.
    """
    return Chain((members if isinstance(members, Group) else group(members), body))


def signatures(step: Step) -> Iterator[Signature[Any]]:
    """Yield the calls of a shape in the order in which they become jobs."""
    if isinstance(step, Signature):
        yield step
    else:
        for inner in step.steps:
            yield from signatures(inner)


def lower(step: Step, make: Make) -> Output:
    """Make a job of every call, each before those that wait for it; return whose results are those of the whole.

    Raises UsageError: a call would wait for more than MAX_AFTER others.
    """
    return _lower(step, None, make)


def _lower(step: Step, before: Output | None, make: Make) -> Output:
    if isinstance(step, Signature):
        return ResultOf(make(step, _arguments(step, before), _waited(before)))
    if isinstance(step, Group):
        return [_lower(inner, before, make) for inner in step.steps]
    for inner in step.steps:
        before = _lower(inner, before, make)
    if before is None:
        raise UsageError("an empty chain: give it at least one call")
    return before


def _arguments(call: Signature[Any], before: Output | None) -> tuple[object, ...]:
    return call.args if before is None or call.immutable else (before, *call.args)


def _waited(before: Output | None) -> tuple[str, ...]:
    if before is None:
        return ()
    if isinstance(before, ResultOf):
        return (before.job,)
    found = tuple(job for each in before for job in _waited(each))
    if len(found) > MAX_AFTER:
        raise UsageError(f"a call can wait for {MAX_AFTER} jobs, not {len(found)}: group the results in steps")
    return found


def _steps(given: Sequence[Step | Iterable[Step]], what: str) -> tuple[Step, ...]:
    found: list[Step] = []
    for one in given:
        found += [one] if isinstance(one, _KINDS) or not isinstance(one, Iterable) else list(one)
    for one in found:
        if not isinstance(one, _KINDS):
            raise UsageError(f"a {what} is made of calls such as task.s(1), not {type(one).__name__}")
    if not found:
        raise UsageError(f"an empty {what}: give it at least one call")
    return tuple(found)


_KINDS: Final = (Signature, Chain, Group)
