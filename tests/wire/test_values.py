"""Python values as JSON: what travels comes back, what does not is named."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import codec, values
from runner.wire.errors import ValueTypeError


class Colour(enum.StrEnum):
    """An enum of text."""

    RED = "red"


class Size(enum.IntEnum):
    """An enum of numbers."""

    BIG = 3


@dataclass
class Point:
    """A record."""

    x: int
    tags: list[str]
    colour: Colour = Colour.RED


REGISTRY = {values.type_name(cls): cls for cls in (Colour, Size, Point)}
TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
OFFSETS = st.integers(-86_399, 86_399).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.binary(max_size=20)
    | st.uuids()
    | DECIMALS
    | st.datetimes(timezones=OFFSETS).map(lambda found: found.replace(fold=0))
    | st.sampled_from([Colour.RED, Size.BIG])
)
ANY = st.recursive(
    SCALARS | st.builds(Point, st.integers(0, 9), st.lists(TEXT, max_size=2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("$"), inner, max_size=3),
    max_leaves=12,
)


@given(ANY)
def test_values_come_back(value: object) -> None:
    """Whatever has a form on the wire is equal, and of the same type, after the way there and back."""
    back = values.loads(values.dumps(value), REGISTRY)
    assert back == value
    assert shape(back) == shape(value)


@given(ANY)
def test_without_a_registry_no_class_is_built(value: object) -> None:
    """A reader that names no classes gets plain values only."""
    assert_plain(values.loads(values.dumps(value)))


@given(
    st.recursive(
        st.none() | st.booleans() | TEXT | st.integers(0, 9),
        lambda i: (
            st.lists(i)
            | st.dictionaries(
                st.sampled_from(["$", "v", "t", "x"]),
                i | st.sampled_from(["datetime", "dict", "enum", "dataclass", "bytes"]),
            )
        ),
        max_leaves=15,
    )
)
def test_any_json_is_decoded_or_refused(value: codec.Json) -> None:
    """Hostile tags end in a value or in ValueTypeError, never in another error."""
    try:
        values.decode(value, REGISTRY)
    except ValueTypeError:
        return


def shape(value: object) -> object:
    """Types and exact forms of everything inside; the order of a dict does not count."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value), repr(value)


def assert_plain(value: object) -> None:
    """Fail for anything that only a registry could have built."""
    if isinstance(value, dict):
        assert type(value) is dict
        for item in value.values():
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert not isinstance(value, enum.Enum | Point)


def cycle() -> list[object]:
    """A list that holds itself."""
    found: list[object] = [1]
    found.append({"again": found})
    return found


def nested(levels: int) -> object:
    """Lists in lists."""
    found: object = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "path", "word"),
    [
        ({"a": [1, {"b": float("nan")}]}, "args.a[1].b", "NaN"),
        ([float("inf")], "args[0]", "Infinity"),
        (cycle(), "args[1].again", "contains itself"),
        ({"name": "\ud800"}, "args.name", "surrogate"),
        ({"a": {"\udc00": 1}}, "args.a (a key)", "surrogate"),
        ([dt.datetime(2030, 1, 1)], "args[0]", "without zone"),
        ({"k v": {1, 2}}, "args['k v']", "sorted"),
        ([Path("/x")], "args[0]", "str(path)"),
        ([2**63], "args[0]", "64 bits"),
        ([{1: 2}], "args[0]", "text"),
        ([{Colour.RED: 2}], "args[0]", "text"),
        ([decimal.Decimal("NaN")], "args[0]", "finite"),
        (Point(1, ["a", "\ud800"]), "args.tags[1]", "surrogate"),
        (nested(values.MAX_DEPTH + 1), "args" + "[0]" * values.MAX_DEPTH, "nested deeper"),
        ([object()], "args[0]", "no form"),
        (print, "args", "no form"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: object, path: str, word: str) -> None:
    """The error names the way to the value and what to do."""
    with pytest.raises(ValueTypeError) as caught:
        values.encode(value, path="args")
    assert caught.value.path == path
    assert word in str(caught.value)


def test_errors_do_not_show_the_value() -> None:
    """A value that can't travel may be a secret: the message does not hold it."""
    with pytest.raises(ValueTypeError) as caught:
        values.encode({"token": {"hunter2"}, "x": 1}, path="args")
    assert "hunter2" not in str(caught.value)


def test_size_is_bounded_and_the_place_is_named() -> None:
    """What is too large is refused where the limit is crossed, before all of it is written."""
    with pytest.raises(ValueTypeError, match=r"args\[1\]\.blob: larger than 1000 bytes"):
        values.encode([1, {"blob": "x" * 2000}], 1000, "args")
    with pytest.raises(ValueTypeError, match="the limit is 1000"):
        values.dumps(['"' * 900], 1000)


@given(ANY)
def test_what_fits_is_never_refused(value: object) -> None:
    """The running count is a lower bound of the real size."""
    size = len(values.dumps(value))
    assert values.dumps(value, size)


def test_the_deepest_value_fits_into_an_envelope() -> None:
    """Arguments of the greatest depth still leave room for the envelope around them."""
    deep = values.encode(nested(values.MAX_DEPTH))
    assert codec.load(codec.dump({"args": [deep]}))


def test_shared_values_are_no_cycle() -> None:
    """The same list twice side by side travels."""
    shared = [1]
    assert values.loads(values.dumps([shared, shared])) == [[1], [1]]


def test_tuples_and_subclasses_arrive_as_plain_types() -> None:
    """What JSON does not tell apart arrives as the plain type."""

    class Text(str):
        __slots__ = ()

    back = values.loads(values.dumps((1, (Text("a"), bytearray(b"b")))))
    assert back == [1, ["a", b"b"]]
    assert type(back[1][0]) is str


def test_a_caller_s_own_dollar_is_no_tag() -> None:
    """A dict with the key "$" comes back as it was, however it looks."""
    for value in ({"$": "datetime", "v": "x"}, {"$": {"$": "bytes"}}, {"$": None}, {"$": "dict", "v": {}}):
        assert values.loads(values.dumps(value)) == value


def test_a_registry_builds_its_own_kinds_only() -> None:
    """A tag of one kind never builds a class of the other, and bad fields are refused."""
    name = values.type_name(Point)
    for value in (
        {"$": "enum", "t": name, "v": 1},
        {"$": "dataclass", "t": values.type_name(Colour), "v": {}},
        {"$": "dataclass", "t": name, "v": {"y": 1}},
        {"$": "enum", "t": values.type_name(Colour), "v": "blue"},
        {"$": "dataclass", "v": {}},
        {"$": "uuid", "v": "x"},
        {"$": "uuid", "v": 1},
        {"$": "bytes", "v": "%%"},
        {"$": "datetime", "v": "2030-01-01T00:00:00"},
        {"$": "decimal", "v": "NaN"},
        {"$": "nothing", "v": 1},
        {"$": ["x"], "v": 1},
        {"$": "uuid", "v": str(uuid.UUID(int=0)), "w": 1},
    ):
        with pytest.raises(ValueTypeError):
            values.decode(value, REGISTRY)  # type: ignore[arg-type]  # each is JSON
