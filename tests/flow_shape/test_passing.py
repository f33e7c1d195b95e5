"""Placeholders for results, whatever stands around them, and the classes that annotations name."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Generic, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.wire import passing, values
from runner.wire.errors import ValueTypeError
from runner.wire.hints import Hinted
from runner.wire.passing import Failure
from runner.wire.values import ResultOf, type_name
from tests.flow_shape.jobs import flow_jobs as jobs

JOBS = ("main-1", "main-2", "main-3")
RESULTS: dict[str, Any] = {
    "main-1": {"$": "result", "v": "main-2"},
    "main-2": [{"$": "sealed"}, {"deep": None}],
    "main-3": 7,
}
LEAVES = st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=3), st.sampled_from(JOBS).map(ResultOf), st.binary())
KEYS = st.one_of(st.sampled_from(["$", "v", "t", "result"]), st.text(max_size=2))
NESTED: st.SearchStrategy[object] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.builds(Failure, inner, inner),
    ),
    max_leaves=12,
)


def asked(value: object) -> set[str]:
    """Return the jobs that a value names, by looking at the value itself."""
    if isinstance(value, ResultOf):
        return {value.job}
    if isinstance(value, Failure):
        return asked([value.job, value.state])
    if isinstance(value, list):
        return {job for item in value for job in asked(item)}
    return {job for item in value.values() for job in asked(item)} if isinstance(value, dict) else set()


def expected(value: object) -> Any:  # noqa: ANN401 - plain JSON
    """Return the encoded value with results in place, built from the value itself."""
    if isinstance(value, ResultOf):
        return RESULTS[value.job]
    if isinstance(value, list):
        return [expected(item) for item in value]
    if isinstance(value, Failure):
        fields = {field.name: expected(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$": "dataclass", "t": type_name(Failure), "v": fields}
    if isinstance(value, dict):
        plain = {key: expected(item) for key, item in value.items()}
        return {"$": "dict", "v": plain} if "$" in value else plain
    return values.encode(value)


@settings(max_examples=30)
@given(NESTED)
def test_every_placeholder_is_found_and_filled_and_nothing_else(value: object) -> None:
    """Dicts of the caller that look like a placeholder, and results that do, are left as they are."""
    encoded = values.encode(value)
    assert passing.references([encoded]) == asked(value)
    assert passing.filled(encoded, RESULTS) == expected(value)


def test_a_placeholder_is_no_value() -> None:
    """Where no node filled it, it is refused instead of arriving as something else."""
    with pytest.raises(ValueTypeError, match="malformed tagged form"):
        values.decode(values.encode([ResultOf("main-1")]))
    with pytest.raises(KeyError):
        passing.filled(values.encode(ResultOf("main-9")), RESULTS)


class Shade(enum.IntEnum):
    """An enum inside an annotation."""

    DARK = 1


@dataclasses.dataclass
class Leaf:
    """Names itself and an enum."""

    shade: Shade
    below: list[Leaf] | None = None


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    """Generic, checks what it holds, and sets a field by itself."""

    held: T
    label: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        self.label = {1: "one", 2: "two"}[self.held]  # type: ignore[index]  # what does not fit is the test


def mixed(first: dict[str, list[Leaf | None]], *rest: jobs.Point, colour: type[jobs.Colour] | int = 1) -> jobs.Drawing:
    """Never called."""
    raise NotImplementedError


def broken(first: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821 - the annotation that can't be evaluated
    """Never called."""


def test_annotations_name_classes_at_any_depth() -> None:
    """Parameters and the returned value apart; Failure always, since a dependency may leave one."""
    parameters = {type_name(each) for each in (Leaf, Shade, jobs.Point, jobs.Colour, Failure)}
    assert set(Hinted(mixed)) == parameters
    assert set(Hinted(mixed, result=True)) == {type_name(e) for e in (jobs.Drawing, jobs.Point, jobs.Colour, Failure)}
    assert len(Hinted(mixed)) == len(parameters)
    leaf = Leaf(Shade.DARK, [Leaf(Shade.DARK)])
    assert values.decode(values.encode(leaf), Hinted(mixed)) == leaf


def test_an_annotation_that_can_not_be_evaluated_names_no_class() -> None:
    """The value arrives as plain data, and the call is made."""
    assert set(Hinted(broken)) == {type_name(Failure)}
    assert values.decode(values.encode(Leaf(Shade.DARK)), Hinted(broken)) == {"shade": 1, "below": None}


def boxed(box: Box[int]) -> None:
    """Never called."""


def test_a_class_sets_its_own_fields_and_may_refuse_what_does_not_fit() -> None:
    """Whatever it raises is one error that names the place."""
    assert values.decode(values.encode([Box(2)]), Hinted(boxed)) == [Box(2)]
    for fields in ({"held": 3}, {"held": 1, "label": "x"}, {}, {"other": 1}):
        forged = [{"$": "dataclass", "t": type_name(Box), "v": fields}]
        with pytest.raises(ValueTypeError, match=r"^value\[0\]: the fields do not fit Box"):
            values.decode(forged, Hinted(boxed))  # type: ignore[arg-type]  # plain JSON
