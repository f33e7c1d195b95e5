"""Frozen dataclasses to JSON objects and back; decoding validates every field or raises.

Called by each record type's users through ``encode`` and ``decode``. Must never guess: a missing field without default,
an unknown field, a bool where a number is meant, or another version is an error that names the path.

Supported field types: str, int, float, bool, None, Literal, StrEnum, tuple[T, ...], dict[str, T], unions with None,
nested records, and ``object`` for plain JSON that is checked elsewhere.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import TypeVar, cast

from runner.wire import codec
from runner.wire.errors import RecordError

__all__ = ["decode", "dumps", "encode", "loads"]

T = TypeVar("T")

#: Field names (with: is None the default?) and types by class; a class is looked at once.
_NAMES: dict[type[object], dict[str, bool]] = {}
_HINTS: dict[type[object], dict[str, object]] = {}


def encode(record: object) -> dict[str, object]:
    """Return the record as plain JSON values; tuples become lists.

    A field that holds None is left out if None is its default, so that it reads back as None; else it is null.
    """
    out: dict[str, object] = {}
    for name, none_is_default in _names(type(record)).items():
        value = getattr(record, name)
        if value is not None or not none_is_default:
            out[name] = _plain(value)
    return out


def dumps(record: object) -> bytes:
    """Return the record's canonical bytes."""
    return codec.dump(encode(record))


def loads(cls: type[T], data: bytes, *, limit_bytes: int = codec.MAX_BYTES) -> T:
    """Parse and validate one record.

    Raises:
        CodecError: the bytes are no strict JSON. RecordError: they are no valid ``cls``.
    """
    return decode(cls, codec.load(data, limit_bytes=limit_bytes))


def decode(cls: type[T], value: object, path: str = "") -> T:
    """Validate a JSON object as ``cls``; ``path`` names it in errors. Raises RecordError."""
    if not isinstance(value, dict):
        raise RecordError("an object is expected", path=path or cls.__name__)
    hints = _hints(cls)
    unknown = set(value) - set(hints)
    if unknown:
        raise RecordError(f"unknown field {sorted(unknown)[0]!r}", path=path or cls.__name__)
    found = {name: _field(hints[name], item, f"{path}.{name}" if path else name) for name, item in value.items()}
    try:
        return cls(**found)
    except TypeError:
        raise RecordError("a required field is missing", path=path or cls.__name__) from None


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _names(cls: type[object]) -> dict[str, bool]:
    if cls not in _NAMES:
        fields = dataclasses.fields(cast("typing.Any", cls))
        _NAMES[cls] = {field.name: field.default is None for field in fields}
    return _NAMES[cls]


def _hints(cls: type[object]) -> dict[str, object]:
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = {name: hints[name] for name in _names(cls)}
    return _HINTS[cls]


def _field(hint: object, value: object, path: str) -> object:
    if hint is object:
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(hint), value, path)
    if origin is typing.Literal:
        if any(
            value is option or (value == option and type(value) is type(option)) for option in typing.get_args(hint)
        ):
            return value
        raise RecordError(f"must be one of {typing.get_args(hint)}", path=path)
    if origin is tuple:
        return _sequence(typing.get_args(hint)[0], value, path)
    if origin is dict:
        return _mapping(typing.get_args(hint)[1], value, path)
    return _scalar(hint, value, path)


def _union(options: tuple[object, ...], value: object, path: str) -> object:
    if value is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        return _field(rest[0], value, path)
    for option in rest:
        try:
            return _field(option, value, path)
        except RecordError:
            continue
    raise RecordError("no allowed type fits", path=path)


def _sequence(item: object, value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise RecordError("a list is expected", path=path)
    return tuple(_field(item, entry, f"{path}[{index}]") for index, entry in enumerate(value))


def _mapping(item: object, value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RecordError("an object is expected", path=path)
    return {key: _field(item, entry, f"{path}.{key}") for key, entry in value.items()}


def _scalar(hint: object, value: object, path: str) -> object:
    if dataclasses.is_dataclass(hint):
        return decode(cast("type[object]", hint), value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise RecordError(f"no such {hint.__name__.lower()}", path=path) from None
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise RecordError(f"{getattr(hint, '__name__', hint)} is expected", path=path)
    return value
