"""Python values as plain JSON and back: arguments of tasks and their results.

Called by the client (arguments out, results in) and by the guest (arguments in, results out). Must never build an
object of a class that the wire names: a class is looked up only in the registry that the caller passes.

What JSON can't say travels tagged, as ``{"$": tag, "v": …}``:

    datetime    aware only; ISO 8601 with its offset (the zone's name is not kept)
    bytes       base64; bytearray arrives as bytes
    uuid        hyphenated text
    decimal     text, finite only
    enum        with "t" = module:qualname; arrives as its plain value unless the registry knows the class
    dataclass   with "t" = module:qualname; arrives as a dict unless the registry knows the class
    dict        a dict of the caller that has a key "$" itself
    result      no value: what a job that this one waits for returned; its node puts it there (wire/passing.py)
    sealed      no value: a hole for one that only a node's broker opens (wire/sealed.py)

Tuples arrive as lists, subclasses of str, int and float as the plain type; the order of a dict is not kept.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime as dt
import enum
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import ValueTypeError
from runner.wire.sealed import HOLE, Sealed

if TYPE_CHECKING:
    import decimal
    import uuid

    from _typeshed import DataclassInstance

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "MAX_DEPTH",
    "RESULT",
    "TAG",
    "Registry",
    "ResultOf",
    "decode",
    "dumps",
    "encode",
    "loads",
    "type_name",
]

#: Classes that decode may build, by ``module:qualname``.
Registry: TypeAlias = Mapping[str, type[object]]

TAG: Final = "$"
RESULT: Final = "result"
#: Deepest nesting of the encoded form; leaves room for the envelope around it (codec.MAX_DEPTH is 32).
MAX_DEPTH: Final = 28
#: Largest encoded value unless the caller names a limit, in bytes (8 MiB).
DEFAULT_LIMIT_BYTES: Final = codec.MAX_BYTES
_INT_BITS: Final = 63
_SHOWN_KEY: Final = 40
_NUMBER_BYTES: Final = 1
#: Types whose values are their own form, and the most that a walk would count for one.
_PLAIN: Final = (int, bool)
_PLAIN_BYTES: Final = 4
_INT_END: Final = 1 << _INT_BITS


@dataclasses.dataclass(frozen=True, slots=True)
class ResultOf:
    """Among a job's arguments: what the job of this id returned. The job that is given it waits for that one."""

    job: str


def encode(
    value: object, limit_bytes: int = DEFAULT_LIMIT_BYTES, path: str = "value", sealed: list[Sealed] | None = None
) -> Json:
    """Return ``value`` as plain JSON with tagged forms; ``path`` is how errors name the root.

    ``sealed``: takes the sealed values in their order; without it there is no place for any.

    Raises:
        ValueTypeError: a value has no form on the wire (naive datetime, NaN, set, cycle, lone surrogate, more than 64
            bits, key that is no text), is nested deeper than MAX_DEPTH or larger than ``limit_bytes``. The message
            names the path to it, never the value.
    """
    if value is None or (type(value) in _PLAIN and limit_bytes >= _PLAIN_BYTES and -_INT_END <= value < _INT_END):  # type: ignore[operator] # a number
        return value  # type: ignore[return-value] # what most tasks return, without the walk
    return _Encoder(limit_bytes, sealed).value(value, path, 0)


def dumps(value: object, limit_bytes: int = DEFAULT_LIMIT_BYTES, path: str = "value") -> bytes:
    """Return the canonical bytes of ``encode(value)``. Raises ValueTypeError, also when they exceed ``limit_bytes``."""
    data = codec.dump(encode(value, limit_bytes, path))
    if len(data) > limit_bytes:
        raise ValueTypeError(f"{len(data)} bytes as JSON, the limit is {limit_bytes}: pass a path instead", path=path)
    return data


def decode(value: Json, registry: Registry | None = None, path: str = "value") -> object:
    """Return the Python value of an encoded one; unknown tags are refused. Raises ValueTypeError."""
    # Not `or`: a lazy registry looks at its classes when asked how many there are.
    return _decode(value, {} if registry is None else registry, path, 0)


def loads(data: bytes, registry: Registry | None = None, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> object:
    """Parse strict JSON and decode it. Raises CodecError, ValueTypeError."""
    return decode(codec.load(data, limit_bytes=limit_bytes), registry)


def type_name(cls: type[object]) -> str:
    """Return the name a class travels under: ``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


class _Encoder:
    """One walk over one value: counts bytes (a lower bound, so nothing that fits is refused) and remembers its way."""

    def __init__(self, limit_bytes: int, sealed: list[Sealed] | None) -> None:
        self._limit_bytes = limit_bytes
        self._sealed = sealed
        self._bytes = 0
        self._open: set[int] = set()

    def value(self, value: object, path: str, depth: int) -> Json:
        if value is None or isinstance(value, bool):
            self._count(4, path)
            return value
        if isinstance(value, enum.Enum):
            return self._tagged(value, path, depth)
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, int | float):
            return self._number(value, path)
        if isinstance(value, list | tuple):
            return self._list(value, path, depth)
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        return self._tagged(value, path, depth)

    def _count(self, size: int, path: str) -> None:
        self._bytes += size
        if self._bytes > self._limit_bytes:
            raise ValueTypeError(f"larger than {self._limit_bytes} bytes up to here: pass a path instead", path=path)

    def _text(self, value: str, path: str) -> str:
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise ValueTypeError("holds a lone surrogate: decode the bytes with errors='replace'", path=path) from None
        self._count(size + 2, path)
        return str.__str__(value)

    def _number(self, value: int | float, path: str) -> Json:
        self._count(_NUMBER_BYTES, path)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueTypeError("NaN and Infinity have no JSON form: pass None", path=path)
            return float(value)
        if not -_INT_END <= value < _INT_END:
            raise ValueTypeError("an integer of more than 64 bits: pass it as text", path=path)
        return int(value)

    def _list(self, value: list[object] | tuple[object, ...], path: str, depth: int) -> Json:
        self._enter(value, path, depth)
        out = [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        self._open.discard(id(value))
        return out

    def _dict(self, value: dict[object, object], path: str, depth: int) -> Json:
        escaped = TAG in value
        self._enter(value, path, depth + escaped)
        out: dict[str, Json] = {}
        for key, item in value.items():
            if not isinstance(key, str) or isinstance(key, enum.Enum):
                raise ValueTypeError(f"a key is {type(key).__name__}, JSON keys are text: use str(key)", path=path)
            name = self._text(key, f"{path} (a key)")
            out[name] = self.value(item, _below(path, name), depth + 1 + escaped)
        self._open.discard(id(value))
        return {TAG: "dict", "v": out} if escaped else out

    def _enter(self, value: object, path: str, depth: int) -> None:
        """Open a container: brackets are counted, a way back to itself or too deep a way is refused."""
        if depth >= MAX_DEPTH:
            raise ValueTypeError(f"nested deeper than {MAX_DEPTH}", path=path)
        if id(value) in self._open:
            raise ValueTypeError("contains itself", path=path)
        self._open.add(id(value))
        self._count(2, path)

    def _tagged(self, value: object, path: str, depth: int) -> Json:
        if depth >= MAX_DEPTH:
            raise ValueTypeError(f"nested deeper than {MAX_DEPTH}", path=path)
        if isinstance(value, enum.Enum):
            plain = self.value(value.value, f"{path}.value", depth + 1)
            return {TAG: "enum", "t": type_name(type(value)), "v": plain}
        if isinstance(value, ResultOf):
            return {TAG: RESULT, "v": value.job}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, path, depth)
        if isinstance(value, Sealed):
            return self._hole(value, path)
        form = _scalar_form(value, path)
        if form is None:
            raise ValueTypeError(f"{type(value).__name__} has no form on the wire{_advice(value)}", path=path)
        self._count(len(form[1]), path)
        return {TAG: form[0], "v": form[1]}

    def _hole(self, value: Sealed, path: str) -> Json:
        if self._sealed is None:
            raise ValueTypeError("a Sealed value is for a job's arguments, its task gets the plain one", path=path)
        self._sealed.append(value)
        return dict(HOLE)

    def _dataclass(self, value: DataclassInstance, path: str, depth: int) -> Json:
        self._enter(value, path, depth + 1)
        # A field that its class sets by itself is set again where the object is built.
        names = [field.name for field in dataclasses.fields(value) if field.init]
        out: dict[str, Json] = {name: self.value(getattr(value, name), f"{path}.{name}", depth + 2) for name in names}
        self._open.discard(id(value))
        return {TAG: "dataclass", "t": type_name(type(value)), "v": out}


def _scalar_form(value: object, path: str) -> tuple[str, str] | None:
    if isinstance(value, dt.datetime):
        if value.utcoffset() is None:
            raise ValueTypeError("a datetime without zone: use datetime.now(timezone.utc)", path=path)
        return "datetime", value.isoformat()
    if isinstance(value, bytes | bytearray):
        return "bytes", base64.b64encode(value).decode("ascii")
    if _is(value, "uuid", "UUID"):
        return "uuid", str(value)
    if _is(value, "decimal", "Decimal"):
        if not cast("decimal.Decimal", value).is_finite():
            raise ValueTypeError("a Decimal that is no finite number", path=path)
        return "decimal", str(value)
    return None


def _is(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class that few programs use, without loading its module for all others."""
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name))


def _advice(value: object) -> str:
    if isinstance(value, set | frozenset):
        return ": pass sorted(value)"
    if hasattr(value, "__fspath__"):
        return ": pass str(path)"
    return ": pass numbers, text, lists, dicts, dataclasses, enums, bytes, UUID, Decimal or aware datetimes"


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if key.isidentifier() and len(key) <= _SHOWN_KEY else f"{path}[{key[:_SHOWN_KEY]!a}]"


def _decode(value: Json, registry: Registry, path: str, depth: int) -> object:
    if depth > codec.MAX_DEPTH:
        raise ValueTypeError(f"nested deeper than {codec.MAX_DEPTH}", path=path)
    if isinstance(value, list):
        return [_decode(item, registry, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TAG in value:
        return _decode_tagged(value, registry, path, depth)
    return _decode_dict(value, registry, path, depth)


def _decode_dict(value: dict[str, Json], registry: Registry, path: str, depth: int) -> dict[str, object]:
    return {key: _decode(item, registry, _below(path, key), depth + 1) for key, item in value.items()}


def _decode_tagged(value: dict[str, Json], registry: Registry, path: str, depth: int) -> object:
    tag, inner = value[TAG], value.get("v")
    if not isinstance(tag, str) or set(value) != _KEYS.get(tag, frozenset()):
        raise ValueTypeError("an unknown or malformed tagged form", path=path)
    if tag == "dict" and isinstance(inner, dict):
        return _decode_dict(inner, registry, path, depth + 1)
    if tag == "enum":
        return _decode_enum(value["t"], _decode(inner, registry, path, depth + 1), registry, path)
    if tag == "dataclass" and isinstance(inner, dict):
        return _decode_dataclass(value["t"], _decode_dict(inner, registry, path, depth + 1), registry, path)
    if tag in _SCALARS and isinstance(inner, str):
        try:
            return _SCALARS[tag](inner)
        except (ValueError, ArithmeticError, binascii.Error):
            pass
    raise ValueTypeError(f"no valid {tag}", path=path)


def _decode_enum(name: Json, plain: object, registry: Registry, path: str) -> object:
    cls = registry.get(name) if isinstance(name, str) else None
    if cls is None:
        return plain
    if not issubclass(cls, enum.Enum):
        raise ValueTypeError(f"{cls.__name__} is no enum", path=path)
    try:
        return cls(plain)
    except Exception:  # noqa: BLE001 - as for dataclasses
        raise ValueTypeError(f"no member of {cls.__name__}", path=path) from None


def _decode_dataclass(name: Json, fields: dict[str, object], registry: Registry, path: str) -> object:
    cls = registry.get(name) if isinstance(name, str) else None
    if cls is None:
        return fields
    if not dataclasses.is_dataclass(cls):
        raise ValueTypeError(f"{cls.__name__} is no dataclass", path=path)
    try:
        return cls(**fields)
    except Exception as error:  # noqa: BLE001 - a class of the application checks its fields as it likes
        raise ValueTypeError(f"the fields do not fit {cls.__name__}: {type(error).__name__}", path=path) from None


def _datetime(text: str) -> dt.datetime:
    found = dt.datetime.fromisoformat(text)
    if found.utcoffset() is None:
        raise ValueError("naive")
    return found


def _uuid(text: str) -> uuid.UUID:
    import uuid

    return uuid.UUID(text)


def _decimal(text: str) -> decimal.Decimal:
    import decimal

    found = decimal.Decimal(text)
    if not found.is_finite():
        raise ValueError("not finite")
    return found


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SCALARS: Final[dict[str, Callable[[str], object]]] = {
    "datetime": _datetime,
    "bytes": _bytes,
    "uuid": _uuid,
    "decimal": _decimal,
}
_KEYS: Final[dict[str, frozenset[str]]] = {
    **{tag: frozenset({TAG, "v"}) for tag in (*_SCALARS, "dict")},
    **{tag: frozenset({TAG, "t", "v"}) for tag in ("enum", "dataclass")},
}
