"""Canonical JSON out, strict JSON in."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import CodecError

INTS = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
PLAIN: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_what_is_written_is_read_back(value: Json) -> None:
    """Reading the canonical form gives the value, and writing it again the same bytes."""
    data = codec.dump(value)
    assert codec.load(data) == value
    assert codec.dump(codec.load(data)) == data


@given(st.dictionaries(TEXT, INTS, max_size=6))
def test_the_form_does_not_depend_on_the_order_of_keys(value: dict[str, int]) -> None:
    """Two equal objects have the same bytes."""
    assert codec.dump(value) == codec.dump(dict(reversed(value.items())))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Whatever comes in, the reader answers with a value that the standard reader agrees to, or with a CodecError."""
    try:
        value = codec.load(data)
    except CodecError:
        return
    assert value == json.loads(data)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '[{"x":{"b":1,"b":1}}]',
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e999",
        "9223372036854775808",
        "-9223372036854775809",
        "1" * 5000,
        '"\\ud800"',
        '{"\\udfff":1}',
        "1 2",
        "[1]]",
        "",
        "\ufeff1",
        "[" * 33 + "]" * 33,
        "[" * 200_000,
        '{"a":' * 100_000,
    ],
)
def test_attack_26_ambiguous_documents_are_refused(text: str) -> None:
    """What two parsers could read differently, or what exhausts one, is no document."""
    with pytest.raises(CodecError):
        codec.load(text.encode("utf-8"))


def test_brackets_in_texts_are_no_depth() -> None:
    """Only real nesting counts, also after escaped quotes."""
    value: Json = ["[[[[" * 100, '\\"[[[{{{' * 50, {"{": "}"}]
    assert codec.load(codec.dump(value)) == value


def test_the_deepest_allowed_nesting_travels() -> None:
    """MAX_DEPTH levels are read and written, one more is not."""
    deep: Json = 1
    for _ in range(codec.MAX_DEPTH):
        deep = [deep]
    assert codec.load(codec.dump(deep)) == deep
    with pytest.raises(CodecError):
        codec.dump([deep])


@pytest.mark.parametrize("data", [b'"' * 400_000, b'\\"[' * 200_000, b'["' + b"\\" * 400_000, b'[["]' * 100_000])
def test_hostile_bytes_cost_linear_time(data: bytes) -> None:
    """The depth check never goes back over what it has read."""
    began = time.process_time()
    with pytest.raises(CodecError):
        codec.load(data)
    assert time.process_time() - began < 1.0


def test_the_size_is_bounded() -> None:
    """A document above the limit is refused before it is parsed."""
    with pytest.raises(CodecError, match="the limit is 10"):
        codec.load(b'"01234567890"', limit_bytes=10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1, 2}, object(), b"x", {"a": b"x"}])
def test_what_is_no_json_is_not_written(value: object) -> None:
    """Nothing but strict JSON leaves."""
    with pytest.raises(CodecError):
        codec.dump(value)
