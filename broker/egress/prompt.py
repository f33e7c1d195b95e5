"""What one task waits for and goes on with at once, where a future would have it wait for the loop's next turn.

Used by streams.py and keys.py: a request waits for its client, the broker and its host, and each turn of the loop that
is saved is a system call and its way there and back. Must never have a task run within another one.

Source: asyncio's own protocol between tasks and futures (`asyncio.isfuture`), which other classes may follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Generic, TypeVar

__all__ = ["Prompt"]

T = TypeVar("T")


class Prompt(Generic[T]):
    """Awaited by one task, once; told its result or its error by a callback of the loop."""

    __slots__ = ("_act", "_asyncio_future_blocking", "_context", "_error", "_loop", "_result", "done")

    _result: T

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._act: Callable[[Prompt[T]], object] | None = None
        self._context: Context | None = None
        self._error: BaseException | None = None
        self.done = False

    def tell(self, result: T) -> None:
        """Have the task go on with a result. Whoever is told already hears no more."""
        if self.done:
            return
        self._result = result
        self.done = True
        if asyncio.current_task(self._loop) is not None:
            self._wake_later()
        elif self._act is not None:
            if self._context is None:
                self._act(self)
            else:
                self._context.run(self._act, self)

    def fail(self, error: BaseException) -> None:
        """Have the task go on with an error, in the loop's next turn: whoever closes something closes it all first."""
        if not self.done:
            self._error = error
            self.done = True
            self._wake_later()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that it belongs to: asked by the task."""
        return self._loop

    def add_done_callback(self, act: Callable[[Prompt[T]], object], *, context: Context | None = None) -> None:
        """Note what wakes the task: given by the task, which waits from here on."""
        self._act, self._context = act, context

    def cancel(self, msg: object = None) -> bool:
        """Have the task go on with its cancellation, in the loop's next turn: called by the task, or by another one."""
        if self.done:
            return False
        self._error = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self.done = True
        self._wake_later()
        return True

    def result(self) -> T:
        """Return what was told, or raise it."""
        if self._error is not None:
            raise self._error
        return self._result

    def __await__(self) -> Generator[Prompt[T], None, T]:
        if not self.done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def _wake_later(self) -> None:
        if self._act is not None:
            self._loop.call_soon(self._act, self, context=self._context)
