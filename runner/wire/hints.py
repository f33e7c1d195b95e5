"""The dataclasses and enums that a function's annotations name: what its arguments, or its result, may be built of.

Called by the guest (arguments) and by handles of jobs (results). Must never name a class that the application's own
code does not name: the wire chooses among these, it never adds one.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterator, Mapping

from runner.wire.passing import Failure
from runner.wire.values import type_name

__all__ = ["Hinted"]


class Hinted(Mapping[str, type[object]]):
    """A registry of classes for ``values.decode``; the annotations are looked at when the first class is asked for.

    ``result``: those of the returned value alone, else those of the parameters. An annotation that can't be evaluated
    names no class: its value arrives as plain data.
    """

    __slots__ = ("_found", "_function", "_result")

    def __init__(self, function: Callable[..., object], *, result: bool = False) -> None:
        self._function = function
        self._result = result
        self._found: dict[str, type[object]] | None = None

    def __getitem__(self, name: str) -> type[object]:
        return self._classes()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes())

    def __len__(self) -> int:
        return len(self._classes())

    def _classes(self) -> dict[str, type[object]]:
        if self._found is None:
            found: dict[str, type[object]] = {type_name(Failure): Failure}
            for name, hint in _hints(self._function).items():
                if (name == "return") == self._result:
                    _collect(hint, found)
            self._found = found
        return self._found


def _hints(of: object) -> dict[str, object]:
    try:
        return typing.get_type_hints(of)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}


def _collect(hint: object, found: dict[str, type[object]]) -> None:
    """Add the classes that a hint names, those of a dataclass's own fields included."""
    for part in typing.get_args(hint):
        _collect(part, found)
    hint = typing.get_origin(hint) or hint
    if not isinstance(hint, type) or type_name(hint) in found:
        return
    if issubclass(hint, enum.Enum):
        found[type_name(hint)] = hint
    elif dataclasses.is_dataclass(hint):
        found[type_name(hint)] = hint
        for field_hint in _hints(hint).values():
            _collect(field_hint, found)
