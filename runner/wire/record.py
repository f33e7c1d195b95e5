"""Frozen dataclasses to JSON objects and back; decoding validates every field or raises.

Called by each record type's users through ``encode`` and ``decode``. Must never guess: a missing field without default,
an unknown field, a bool where a number is meant, or another version is an error that names the path.

Supported field types: str, int, float, bool, None, Literal, StrEnum, tuple[T, ...], dict[str, T], unions with None,
nested records, and ``object`` for plain JSON that is checked elsewhere.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import types
import typing
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

from runner.wire import codec
from runner.wire.errors import RecordError

__all__ = ["decode", "dumps", "encode", "loads"]

T = TypeVar("T")
#: Validates one value; its errors name the path from here on.
Reader: TypeAlias = Callable[[object], object]

#: Field names (with: is None the default?) and readers by class; a class is looked at once.
_NAMES: dict[type[object], dict[str, bool]] = {}
_READERS: dict[type[object], dict[str, Reader]] = {}
_SHAPES: dict[type[object], _Shape] = {}
_ATOMS: Final = frozenset({str, int, float, bool, type(None)})


class _Shape(NamedTuple):
    """How a class is written: its fields in canonical order, and what gives their values in one call.

    ``nullable``: left out if None. ``nested``: may hold what is not plain JSON yet. ``empty``: what those hold that
    hold nothing by default.
    """

    names: tuple[str, ...]
    values: Callable[[object], tuple[object, ...]]
    nullable: tuple[str, ...]
    nested: tuple[str, ...]
    empty: tuple[tuple[str, object], ...]


def encode(record: object) -> dict[str, object]:
    """Return the record as plain JSON values; tuples become lists.

    A field that holds None is left out if None is its default, so that it reads back as None; else it is null.
    """
    out: dict[str, object] = {}
    for name, none_is_default in _names(type(record)).items():
        value = getattr(record, name)
        if value is not None or not none_is_default:
            out[name] = value if type(value) in _ATOMS else _plain(value)
    return out


def dumps(record: object, *, bare: bool = False) -> bytes:
    """Return the record's canonical bytes.

    ``bare``: without what is empty by default ((), {}, a nested record of nothing but its defaults), so that it reads
    back as the same record.
    """
    shape = _SHAPES.get(type(record)) or _look_at_shape(type(record))
    # All values in one call: a node writes three records a job, and the way over ``encode`` costs twice as much.
    out = dict(zip(shape.names, shape.values(record), strict=True))
    for name, empty in shape.empty if bare else ():
        # Mostly it is the default itself; to compare two records costs more than to write one.
        if out[name] is empty or out[name] == empty:
            del out[name]
    for name in shape.nullable:
        if out[name] is None:
            del out[name]
    for name in shape.nested:
        if name in out:
            out[name] = _plain(out[name])
    return codec.dump(out)


def loads(cls: type[T], data: bytes, *, limit_bytes: int = codec.MAX_BYTES) -> T:
    """Parse and validate one record.

    Raises:
        CodecError: the bytes are no strict JSON. RecordError: they are no valid ``cls``.
    """
    return decode(cls, codec.load(data, limit_bytes=limit_bytes))


def decode(cls: type[T], value: object, path: str = "") -> T:
    """Validate a JSON object as ``cls``; ``path`` names it in errors. Raises RecordError."""
    try:
        return cast("T", _record(cls, value))
    except _Unfit as error:
        raise RecordError(error.message, path=error.below(path) or cls.__name__) from None


class _Unfit(Exception):
    """A value does not fit; the path to it is put together on the way out, so that what fits costs no text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self._steps: list[str] = []

    def at(self, step: str) -> _Unfit:
        """Lead one step further from the root: ``.name`` or ``[index]``."""
        self._steps.append(step)
        return self

    def below(self, path: str) -> str:
        return (path + "".join(reversed(self._steps))).removeprefix("" if path else ".")


def _record(cls: type[object], value: object) -> object:
    if not isinstance(value, dict):
        raise _Unfit("an object is expected")
    readers = _READERS.get(cls) or _look_at(cls)
    found = {}
    for name, item in value.items():
        reader = readers.get(name)
        if reader is None:
            raise _Unfit(f"unknown field {min(set(value) - set(readers))!r}")
        try:
            found[name] = reader(item)
        except _Unfit as error:
            raise error.at(f".{name}") from None
    try:
        return cls(**found)
    except TypeError:
        raise _Unfit("a required field is missing") from None


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [item if type(item) in _ATOMS else _plain(item) for item in value]
    if isinstance(value, dict):
        return {key: item if type(item) in _ATOMS else _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode(value)
    return value


def _names(cls: type[object]) -> dict[str, bool]:
    if cls not in _NAMES:
        fields = dataclasses.fields(cast("typing.Any", cls))
        _NAMES[cls] = {field.name: field.default is None for field in fields}
    return _NAMES[cls]


def _look_at_shape(cls: type[object]) -> _Shape:
    hints, nulls = typing.get_type_hints(cls), _names(cls)
    names = tuple(sorted(nulls))
    values = operator.attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)
    nested = tuple(name for name in names if not _is_flat(hints[name]))
    nullable = tuple(name for name in names if nulls[name])
    return _SHAPES.setdefault(cls, _Shape(names, values, nullable, nested, tuple(_empty_fields(cls))))


def _is_flat(hint: object) -> bool:
    """Whether whatever has this type is written as it is: atoms, texts of a closed set, tables and lists of them."""
    if hint in _ATOMS or typing.get_origin(hint) is typing.Literal:
        return True
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return True
    inner = [each for each in typing.get_args(hint) if each is not ...]
    return bool(inner) and all(map(_is_flat, inner))


def _empty_fields(cls: type[object]) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(cast("typing.Any", cls)):
        if field.default_factory is dict:
            yield field.name, {}
        elif field.default == () or dataclasses.is_dataclass(field.default):
            yield field.name, field.default


def _look_at(cls: type[object]) -> dict[str, Reader]:
    hints = typing.get_type_hints(cls)
    _READERS[cls] = {name: _reader(hints[name]) for name in _names(cls)}
    return _READERS[cls]


def _reader(hint: object) -> Reader:
    """Return what reads a field of this type."""
    if hint is object:
        return lambda value: value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(hint))
    if origin is typing.Literal:
        return _literal(typing.get_args(hint))
    if origin is tuple:
        return _sequence(_reader(typing.get_args(hint)[0]))
    if origin is dict:
        return _mapping(_reader(typing.get_args(hint)[1]))
    return _scalar(hint)


def _union(options: tuple[object, ...]) -> Reader:
    optional = type(None) in options
    readers = [_reader(option) for option in options if option is not type(None)]
    only = readers[0] if len(readers) == 1 else None

    def read(value: object) -> object:
        if value is None and optional:
            return None
        if only is not None:
            return only(value)
        for reader in readers:
            try:
                return reader(value)
            except (_Unfit, RecordError):
                continue
        raise _Unfit("no allowed type fits")

    return read


def _literal(options: tuple[object, ...]) -> Reader:
    def read(value: object) -> object:
        if any(value is option or (value == option and type(value) is type(option)) for option in options):
            return value
        raise _Unfit(f"must be one of {options}")

    return read


def _sequence(reader: Reader) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, list):
            raise _Unfit("a list is expected")
        found = []
        for index, item in enumerate(value):
            try:
                found.append(reader(item))
            except _Unfit as error:
                raise error.at(f"[{index}]") from None
        return tuple(found)

    return read


def _mapping(reader: Reader) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, dict):
            raise _Unfit("an object is expected")
        found = {}
        for key, item in value.items():
            try:
                found[key] = reader(item)
            except _Unfit as error:
                raise error.at(f".{key}") from None
        return found

    return read


def _scalar(hint: object) -> Reader:
    if dataclasses.is_dataclass(hint):
        cls = cast("type[object]", hint)
        return lambda value: _record(cls, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    name = getattr(hint, "__name__", hint)

    def read(value: object) -> object:
        if type(value) is hint:
            return value
        if hint is float and type(value) is int:
            return float(value)
        raise _Unfit(f"{name} is expected")

    return read


def _member(kind: type[enum.Enum]) -> Reader:
    def read(value: object) -> object:
        try:
            return kind(value)
        except ValueError:
            raise _Unfit(f"no such {kind.__name__.lower()}") from None

    return read
