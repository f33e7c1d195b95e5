"""Conditions of policy rules: total functions, and what can't be judged denies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.errors import PolicyError
from node_agent.policyconditions import AllOf, AnyOf, Compare, Unknown, holds, parse_all

OPS = ("eq", "ne", "gt", "lt", "gte", "lte", "in", "not_in", "contains")
plain = st.one_of(st.text(max_size=8), st.integers(-9, 9), st.floats(), st.booleans())
anything = st.recursive(
    st.one_of(st.none(), plain),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


def test_e2_every_op_says_yes_and_no() -> None:
    """Each op holds for a value that fits and not for one that does not."""
    cases = [
        ("eq", "a", "a", "b"),
        ("ne", "a", "b", "a"),
        ("gt", 3, 4, 3),
        ("lt", 3, 2, 3),
        ("gte", 3, 3, 2),
        ("lte", 3, 3, 4),
        ("in", ("a", "b"), "a", "c"),
        ("not_in", ("a", "b"), "c", "a"),
        ("contains", "b", "abc", "xyz"),
        ("contains", "b", ["a", "b"], ["a"]),
    ]
    for op, wanted, good, bad in cases:
        assert holds(Compare("args.x", op, wanted), {"args": {"x": good}}) is True, op  # type: ignore[arg-type]  # any op, any value
        assert holds(Compare("args.x", op, wanted), {"args": {"x": bad}}) is False, op  # type: ignore[arg-type]  # any op, any value


@pytest.mark.parametrize("op", OPS)
def test_e2_a_missing_attribute_is_unknown_for_every_op(op: str) -> None:
    """Also `ne` and `not_in` do not hold for what is not there."""
    value: object = ("a",) if op in ("in", "not_in") else 1
    found = holds(Compare("tags.team", op, value), {"tags": {}})  # type: ignore[arg-type]  # any op, any value
    assert isinstance(found, Unknown)
    assert "tags.team" in found.why


@pytest.mark.parametrize("op", OPS)
def test_e2_another_type_is_unknown_and_never_raises(op: str) -> None:
    """A text where a number is compared, a list where one value is meant, a boolean as a number: no answer."""
    value: object = (1, 2) if op in ("in", "not_in") else 1
    for odd in ("1", True, {"a": 1}, math.nan):
        found = holds(Compare("args.n", op, value), {"args": {"n": odd}})  # type: ignore[arg-type]  # any op, any value
        assert isinstance(found, Unknown), (op, odd)


def test_attack_41_a_long_list_is_not_looked_through() -> None:
    """What takes long to judge can't be judged."""
    facts = {"args": {"x": ["a"] * 1001}}
    assert isinstance(holds(Compare("args.x", "contains", "a"), facts), Unknown)


def test_e2_what_decides_alone_decides_whatever_stands_beside_it() -> None:
    """An unknown part changes nothing where another one decides, in either order."""
    yes, no = Compare("tenant", "eq", "main"), Compare("tenant", "eq", "other")
    unknown, facts = Compare("tags.x", "eq", 1), {"tenant": "main"}
    assert holds(AnyOf((unknown, yes)), facts) is holds(AnyOf((yes, unknown)), facts) is True
    assert holds(AllOf((unknown, no)), facts) is holds(AllOf((no, unknown)), facts) is False
    assert isinstance(holds(AnyOf((no, unknown)), facts), Unknown)
    assert isinstance(holds(AllOf((yes, unknown)), facts), Unknown)


@given(st.sampled_from(OPS), plain, st.dictionaries(st.text(max_size=5), anything, max_size=4))
def test_e2_conditions_are_total(op: str, value: object, args: dict[str, object]) -> None:
    """Whatever a job sends, a condition answers yes, no or unknown."""
    wanted = (value,) if op in ("in", "not_in") else value
    for name in ("args.a", "args.a.b", *(f"args.{key}" for key in args)):
        found = holds(Compare(name, op, wanted), {"args": args})  # type: ignore[arg-type]  # any op, any value
        assert found is True or found is False or isinstance(found, Unknown)


@pytest.mark.parametrize(
    "entries",
    [
        [{"attribute": "team", "op": "eq", "value": "a"}],
        [{"attribute": "tags", "op": "eq", "value": "a"}],
        [{"attribute": "tags..a", "op": "eq", "value": "a"}],
        [{"attribute": "tenant", "op": "is", "value": "a"}],
        [{"attribute": "tenant", "op": "in", "value": "main"}],
        [{"attribute": "args.n", "op": "gt", "value": "3"}],
        [{"attribute": "args.n", "op": "gt", "value": True}],
        [{"attribute": "args.n", "op": "eq", "value": math.nan}],
        [{"attribute": "args.n", "op": "eq"}],
        [{"any": []}],
        [{"any": [], "all": []}],
        "tenant",
        [{"attribute": "tenant", "op": "eq", "value": "a"}] * 65,
    ],
)
def test_a_condition_that_is_not_understood_does_not_load(entries: object) -> None:
    """A typo in a condition is an error of the file, never a rule that holds for nobody or everybody."""
    with pytest.raises(PolicyError):
        parse_all("when", entries)


def test_conditions_nest() -> None:
    """AND and OR within each other."""
    tree = parse_all(
        "when",
        [
            {"attribute": "tags.team.name", "op": "eq", "value": "acme"},
            {
                "any": [
                    {"attribute": "args.n", "op": "lt", "value": 3},
                    {"all": [{"attribute": "queue", "op": "in", "value": ["a", "b"]}]},
                ]
            },
        ],
    )
    facts: dict[str, object] = {"tags": {"team.name": "acme"}, "queue": "b", "args": {"n": 9}}
    assert holds(tree, facts) is True
    assert holds(tree, {**facts, "queue": "c"}) is False
