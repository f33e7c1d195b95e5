"""The asynchronous twins: a blocking call in a thread of the event loop's pool.

Called by app, task, job and flow. Must never load asyncio before a twin is used: every guest imports the modules that
have twins. Each call under way takes a thread of the pool (asyncio.to_thread); a cancelled one ends by itself, at most
when its own waiting time is over.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

__all__ = ["apart", "in_thread", "twin"]

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
    """Call a blocking function in a thread."""
    import asyncio  # costs a guest 20 ms for every task that merely names its app

    return asyncio.to_thread(function, *args, **kwargs)


async def apart(items: Iterator[T]) -> AsyncIterator[T]:
    """Step through a blocking iterator in a thread."""
    end = object()
    while (item := await in_thread(next, items, end)) is not end:
        yield cast("T", item)


def twin(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return the twin of a method: the same call without blocking the event loop."""

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(method, self, *args, **kwargs)

    functools.update_wrapper(call, method)
    call.__name__ = f"a{method.__name__}"
    call.__qualname__ = ".".join((*method.__qualname__.split(".")[:-1], call.__name__))
    call.__doc__ = f"`{method.__name__}` without blocking the event loop."
    return call
