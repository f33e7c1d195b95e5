"""Records: every field is validated, nothing is guessed."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import record
from runner.wire.card import NodeCard, SignedCard, TrustedKey
from runner.wire.codec import Json
from runner.wire.command import Command, Selector
from runner.wire.errors import CodecError, RecordError, WireError
from runner.wire.event import Event
from runner.wire.receipt import KillDone, Outcome, Receipt
from runner.wire.view import JobView, NodeView
from tests.wire.test_codec import INTS, PLAIN, TEXT

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FLAT = st.one_of(TEXT, INTS, FLOATS, st.booleans())


class Colour(enum.StrEnum):
    """A closed set."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    """A nested record."""

    name: str
    on: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Every type of field there is."""

    text: str
    number: int
    ratio: float
    mode: Literal["a", "b"]
    colour: Colour
    inner: Inner
    flag: bool = False
    maybe: int | None = None
    either: str | int | None = None
    many: tuple[Inner, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    free: object = None


INNERS = st.builds(Inner, TEXT, st.booleans())
SAMPLES = st.builds(
    Sample,
    TEXT,
    INTS,
    FLOATS,
    st.sampled_from(["a", "b"]),
    st.sampled_from(Colour),
    INNERS,
    st.booleans(),
    st.none() | INTS,
    st.none() | TEXT | INTS,
    st.lists(INNERS, max_size=3).map(tuple),
    st.dictionaries(TEXT, INTS, max_size=3),
    PLAIN,
)


@given(SAMPLES)
def test_a_record_comes_back(sample: Sample) -> None:
    """Writing and reading gives an equal record, and the bytes are canonical."""
    data = record.dumps(sample)
    assert record.loads(Sample, data) == sample
    assert record.dumps(record.loads(Sample, data)) == data


@given(PLAIN)
def test_any_json_is_a_record_or_refused(value: Json) -> None:
    """No document makes the reader fail in another way than RecordError."""
    for cls in (Sample, Command, Receipt, Event, NodeCard):
        try:
            record.decode(cls, value)
        except WireError:
            continue


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"text": None}, "text"),
        ({"text": 1}, "text"),
        ({"number": True}, "number"),
        ({"number": 1.0}, "number"),
        ({"number": "1"}, "number"),
        ({"ratio": "1"}, "ratio"),
        ({"ratio": False}, "ratio"),
        ({"mode": "c"}, "mode"),
        ({"mode": None}, "mode"),
        ({"colour": "green"}, "colour"),
        ({"inner": {}}, "inner"),
        ({"inner": {"name": "x", "more": 1}}, "inner"),
        ({"inner": {"name": 1}}, "inner.name"),
        ({"inner": "x"}, "inner"),
        ({"flag": 1}, "flag"),
        ({"maybe": "x"}, "maybe"),
        ({"either": 1.5}, "either"),
        ({"many": {}}, "many"),
        ({"many": [{"name": "a"}, {"name": 2}]}, "many[1].name"),
        ({"table": []}, "table"),
        ({"table": {"a": "x"}}, "table.a"),
        ({"other": 1}, "Sample"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], path: str) -> None:
    """A wrong type, an unknown or a missing field is an error with the path to it."""
    good = record.encode(Sample("t", 1, 1.0, "a", Colour.RED, Inner("i")))
    with pytest.raises(RecordError) as caught:
        record.decode(Sample, {**good, **change})
    assert caught.value.path == path


def test_missing_fields_and_other_documents() -> None:
    """A field without default must be there, and a record is an object."""
    with pytest.raises(RecordError, match="required field"):
        record.decode(Inner, {})
    others: list[object] = [[], "x", None, 1]
    for value in others:
        with pytest.raises(RecordError, match="object"):
            record.decode(Inner, value)
    with pytest.raises(CodecError):
        record.loads(Inner, b'{"name":"a","name":"b"}')


def test_whole_numbers_fit_into_ratios() -> None:
    """JSON does not tell 1 from 1.0: a float field takes both and holds a float."""
    found = record.decode(Sample, {**record.encode(Sample("t", 1, 1.0, "a", Colour.RED, Inner("i"))), "ratio": 2})
    assert isinstance(found.ratio, float)


def test_fields_that_hold_none_are_left_out() -> None:
    """Two ways to write the same record would be two signatures."""
    assert "maybe" not in record.encode(Sample("t", 1, 1.0, "a", Colour.RED, Inner("i")))


NODE = "n1"
RECORDS: list[object] = [
    Receipt("main-x", "c", "killed", "killed", "t", "t", "n", survivors=None),
    KillDone("c", NODE, "b", 3),
    Outcome("main-x", 1, "failed", NODE, "b", 5, error={"type": "E", "message": "m"}),
    Command("c", "kill", Selector("tag", "a=b"), 1, 2, tenants=("main",), grace_s=1.5),
    NodeCard(NODE, "0" * 64, "A", 5, labels={"a": "b"}),
    SignedCard("{}", "s"),
    TrustedKey("i", "p", ("enqueue", "kill"), ("main",)),
    JobView("j", "t", "running", None, None, None, None, 1, "q", {}, None, None, None, result=[1, {"a": None}]),
    NodeView(NODE, "h", 1, "b", "ready", "A", 2, 1, ("*",), {"a": "b"}, "t", "r", {"landlock": "8"}),
]


@pytest.mark.parametrize("found", RECORDS, ids=lambda found: type(found).__name__)
def test_each_kind_of_record_comes_back(found: object) -> None:
    """All records that travel are made of supported field types."""
    assert record.loads(type(found), record.dumps(found)) == found


@given(st.dictionaries(TEXT, FLAT, max_size=4), TEXT)
def test_events_come_back(detail: dict[str, str | int | float | bool], job: str) -> None:
    """Details keep their values; a number stays a number and a truth value a truth value."""
    event = Event("job.ended", 5, job=job, detail=detail)
    assert record.loads(Event, record.dumps(event)) == event
    kinds = {key: type(value) for key, value in record.loads(Event, record.dumps(event)).detail.items()}
    assert kinds == {key: type(value) for key, value in detail.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"op": "resume"},
        {"grace_s": -1},
        {"grace_s": 1e9},
        {"reason": "x" * 1025},
        {"by": "x" * 257},
        {"selector": {"kind": "all", "value": "x"}},
        {"selector": {"kind": "job", "value": ""}},
        {"selector": {"kind": "job", "value": "x" * 513}},
        {"selector": {"kind": "user", "value": "x"}},
    ],
)
def test_a_command_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    """Unknown versions, operations, selectors and unbounded texts do not decode."""
    good = record.encode(Command("c", "kill", Selector("all"), 1, 2))
    assert record.decode(Command, json.loads(json.dumps(good))).selector == Selector("all")
    with pytest.raises(RecordError):
        record.decode(Command, {**good, **change})


@given(st.builds(Sample, TEXT, INTS, FLOATS, st.just("a"), st.just(Colour.RED), st.builds(Inner, TEXT, st.booleans())))
def test_what_is_empty_may_be_left_out(sample: Sample) -> None:
    """The bare form reads back as the same record, and lacks what is empty by default, and nothing else."""
    full, bare = record.encode(sample), json.loads(record.dumps(sample, bare=True))
    assert record.decode(Sample, bare) == sample
    assert set(full) - set(bare) == {"many", "table"}
    assert record.dumps(JobSpecDefaults(), bare=True) == b'{"name":"x"}'
    other = record.dumps(JobSpecDefaults(inner=Inner("d", on=True)), bare=True)
    assert other == b'{"inner":{"name":"d","on":true},"name":"x"}'


@dataclass(frozen=True, slots=True)
class JobSpecDefaults:
    """A record whose nested record has a default."""

    name: str = "x"
    inner: Inner = Inner("d")
    words: tuple[str, ...] = ()
