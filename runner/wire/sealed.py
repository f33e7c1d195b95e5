"""Sealed values: arguments and variables of a job that only a node's broker opens, and their places.

Called by the client (finds the places, packs the plaintext), by the broker (unpacks it) and by the guest (puts the
values where they belong). Must never show a value in a repr, or take a plaintext apart without its binding.

In the signed job, ``{"$": "sealed"}`` stands in an argument's place and ``sealed`` maps each place to its ciphertext.
A place is a path into the job: ``args/0/token``, ``kwargs/key``, ``env/TOKEN``; ``~`` and ``/`` in a step are ``~0``
and ``~1`` as in RFC 6901. Tenant, job, place and signer lie inside the ciphertext, so that one that was moved is found
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, cast

from runner.wire import record
from runner.wire.codec import Json
from runner.wire.errors import RecordError, WireError

__all__ = [
    "ENV",
    "HOLE",
    "MAX_PLACE",
    "MAX_SEALED",
    "MAX_TEXT_BYTES",
    "MAX_VALUE_BYTES",
    "Binding",
    "Sealed",
    "fill",
    "pack",
    "place_of",
    "places",
    "unpack",
]

#: What stands in the place of a sealed value in the encoded arguments.
HOLE: Final[dict[str, Json]] = {"$": "sealed"}
ENV: Final = "env"
#: Values of one job.
MAX_SEALED: Final = 64
#: A value in the clear; its answer must fit one record of the broker.
MAX_VALUE_BYTES: Final = 32 * 1024
#: A ciphertext as base64, for all nodes that may open it; it must fit one record of the broker, too.
MAX_TEXT_BYTES: Final = 60 * 1024
MAX_PLACE: Final = 256
_HEAD_BYTES: Final = 4


class Sealed:
    """A value that travels sealed: ``task.delay(Sealed("…"))``. The task gets the plain text or bytes."""

    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        """Take a text or bytes of at most MAX_VALUE_BYTES. Raises TypeError, RecordError."""
        if not isinstance(value, str | bytes):
            raise TypeError(f"Sealed takes a text or bytes, not {type(value).__name__}")
        try:
            size = len(value.encode("utf-8") if isinstance(value, str) else value)
        except UnicodeEncodeError:
            raise RecordError("holds a lone surrogate: seal the bytes", path="Sealed") from None
        if size > MAX_VALUE_BYTES:
            raise RecordError(f"a sealed value has at most {MAX_VALUE_BYTES} bytes", path="Sealed")
        self._value = value

    def open(self) -> str | bytes:
        """Return the value, in the process that made this."""
        return self._value

    def __repr__(self) -> str:
        return "Sealed(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sealed value is not pickled: it travels as an argument of a job")


@dataclass(frozen=True, slots=True)
class Binding:
    """Whose a sealed value is, and where it stands. ``text``: it is a text, not bytes.

    ``signer``: the id of the key that signs the job. Clients choose job ids, so an id alone names nobody's job.
    """

    tenant: str
    job: str
    place: str
    signer: str
    text: bool


def place_of(*steps: str | int) -> str:
    """Return the place that the steps lead to."""
    return "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def places(args: Json, kwargs: Json) -> tuple[str, ...]:
    """Return where sealed values stand in encoded arguments, in their order."""
    return tuple(place_of(*steps) for steps in (*_holes(args, ("args",)), *_holes(kwargs, ("kwargs",))))


def fill(payload: Mapping[str, Json], place: str, value: Json) -> None:
    """Put an encoded value where a hole is. Raises RecordError: there is none."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in place.split("/")]
    at: Json = cast("Json", payload)
    try:
        for step in steps[:-1]:
            at = _step(at, step)
        found = _step(at, steps[-1])
    except (KeyError, IndexError):
        found = None
    if found != HOLE:
        raise RecordError("no sealed value stands there", path=place[:MAX_PLACE])
    if isinstance(at, list):
        at[int(steps[-1])] = value
    elif isinstance(at, dict):
        at[steps[-1]] = value


def pack(binding: Binding, value: bytes) -> bytes:
    """Return the plaintext: four bytes of length, the binding as JSON, the value."""
    head = record.dumps(binding)
    return len(head).to_bytes(_HEAD_BYTES, "big") + head + value


def unpack(plain: bytes) -> tuple[Binding, bytes]:
    """Return binding and value of a plaintext. Raises RecordError."""
    size = int.from_bytes(plain[:_HEAD_BYTES], "big")
    head = plain[_HEAD_BYTES : _HEAD_BYTES + size]
    if len(plain) < _HEAD_BYTES + size:
        raise RecordError("a sealed value without its binding", path="sealed")
    try:
        return record.loads(Binding, head), plain[_HEAD_BYTES + size :]
    except WireError:
        raise RecordError("a sealed value without its binding", path="sealed") from None


def _holes(value: Json, steps: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _holes(item, (*steps, index))
    elif isinstance(value, dict):
        if value == HOLE:
            yield steps
            return
        escaped = value.get("$") == "dict"
        for key, item in value.items():
            if escaped and key == "v" and isinstance(item, dict):
                # The caller's own dict, in which "$" is a key like every other.
                for name, inner in item.items():
                    yield from _holes(inner, (*steps, key, name))
            else:
                yield from _holes(item, (*steps, key))


def _step(at: Json, step: str) -> Json:
    if isinstance(at, list):
        if not step.isascii() or not step.isdigit():
            raise KeyError(step)
        return at[int(step)]
    if isinstance(at, dict):
        return at[step]
    raise KeyError(step)
