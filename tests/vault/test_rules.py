"""The laws of the vault's policy: nothing without a rule, deny wins, what is asked only narrows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.vault.errors import RulesError
from broker.vault.rules import Ask, Rule, Rules, decide, parse

TEXT = """
version = 1
[[allow]]
secrets = ["OPENAI_*"]
tenants = ["acme"]
tasks = ["app:research_*"]
modes = ["proxy", "get"]
hosts = ["api.openai.com"]
ttl_s = 900
uses = 100
[[deny]]
secrets = ["*_ADMIN"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
"""
ASK = Ask("OPENAI_KEY", "proxy", "acme", "agents", task="app:research_x", host="api.openai.com")

names = st.sampled_from(["A", "B_ADMIN", "OPENAI_KEY"])
patterns = st.lists(st.sampled_from(["*", "A", "B_*", "OPENAI_KEY"]), min_size=1, max_size=2).map(tuple)
some = st.lists(st.sampled_from(["*", "x", "y"]), max_size=2).map(tuple)
rules = st.builds(
    Rule,
    effect=st.sampled_from(["allow", "deny"]),
    index=st.integers(1, 9),
    secrets=patterns,
    tenants=some,
    tasks=some,
    commands=some,
    queues=some,
    tags=st.lists(st.sampled_from(["t=x", "t=*"]), max_size=1).map(tuple),
    modes=st.lists(st.sampled_from(["proxy", "get", "file", "env"]), min_size=1, max_size=4).map(tuple),
    hosts=some,
    ttl_s=st.none() | st.floats(1, 1000),
    uses=st.none() | st.integers(1, 100),
    approve=st.booleans(),
    on_leak=st.sampled_from(["redact", "kill"]),
)
asks = st.builds(
    Ask,
    secret=names,
    mode=st.sampled_from(["proxy", "get", "file", "env"]),
    tenant=st.sampled_from("xyz"),
    queue=st.sampled_from("xyz"),
    task=st.none() | st.sampled_from("xyz"),
    command=st.sampled_from("xyz"),
    host=st.sampled_from("xyz"),
    tags=st.none() | st.fixed_dictionaries({"t": st.sampled_from("xy")}),
    ttl_s=st.none() | st.floats(1, 1000),
    uses=st.none() | st.integers(1, 100),
)


def test_the_example_reads() -> None:
    """A job that the rule names gets the rule's limits, and the decision names the rule."""
    found = decide(parse(TEXT), ASK)
    assert (found.allowed, found.rule, found.ttl_s, found.uses) == (True, "[[allow]] rule 1", 900, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "OPENAI_ADMIN"},
        {"secret": "AWS_KEY"},
        {"tenant": "evil"},
        {"task": "app:other"},
        {"task": None, "command": "sh"},
        {"mode": "env"},
        {"host": "evil.example"},
    ],
)
def test_all_of_it_must_fit(change: dict[str, object]) -> None:
    """A job that differs in one point gets nothing, and is told why."""
    found = decide(parse(TEXT), replace(ASK, **change))  # type: ignore[arg-type]  # each value fits its field
    assert not found.allowed
    assert found.message


def test_what_is_asked_narrows() -> None:
    """A job may ask for less than the rule gives, never for more."""
    assert decide(parse(TEXT), replace(ASK, ttl_s=5.0, uses=1)).ttl_s == 5.0
    assert decide(parse(TEXT), replace(ASK, ttl_s=5000.0, uses=1000)).uses == 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 2",
        "version = 1\nextra = 1",
        "version = 1\n[[allow]]\nsecrets = ['*']",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['shout']",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']\nuses = 0",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']\nttl_s = nan",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']\nttls = 5",
        "version = 1\n[[deny]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nuses = 5",
        "version = 1\n[[deny]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\non_leak = 'kill'",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']\non_leak = 'fail'",
        "version = 1\n[[allow]]\nsecrets = ['*']\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']\non_leak = true",
        "version = 1\nallow = 5",
        "version = 1\n[[allow]]\nsecrets = 'A'\ntenants = ['*']\ntasks = ['*']\nmodes = ['get']",
        "not toml [",
    ],
)
def test_what_is_not_understood_does_not_load(text: str) -> None:
    """An unknown key, a missing selector, a bad value: the whole file is refused."""
    with pytest.raises(RulesError):
        parse(text)


@given(asks)
def test_no_rule_nothing(ask: Ask) -> None:
    """Without a rule there is nothing to be had."""
    assert not decide(Rules(), ask).allowed


@given(st.lists(rules, max_size=5), rules, asks)
def test_a_deny_never_widens(known: list[Rule], more: Rule, ask: Ask) -> None:
    """One more deny rule takes away or changes nothing."""
    before = decide(Rules(tuple(known)), ask)
    ordered = sorted([*known, replace(more, effect="deny")], key=lambda rule: rule.effect != "deny")
    after = decide(Rules(tuple(ordered)), ask)
    assert before.allowed or not after.allowed
    if after.allowed:
        assert (after.ttl_s, after.uses, after.approve, after.on_leak) == (
            before.ttl_s,
            before.uses,
            before.approve,
            before.on_leak,
        )


@given(st.lists(rules, max_size=5), asks, st.floats(1, 1000), st.integers(1, 100))
def test_an_ask_only_narrows(known: list[Rule], ask: Ask, ttl_s: float, uses: int) -> None:
    """Limits that a job names never exceed those it would have got, and change nothing else."""
    plain = decide(Rules(tuple(known)), replace(ask, ttl_s=None, uses=None))
    asked = decide(Rules(tuple(known)), replace(ask, ttl_s=ttl_s, uses=uses))
    assert plain.allowed == asked.allowed
    if asked.allowed:
        assert asked.ttl_s is not None
        assert asked.uses is not None
        assert asked.ttl_s <= min(ttl_s, plain.ttl_s or ttl_s)
        assert asked.uses <= min(uses, plain.uses or uses)


def test_a_deny_wins_wherever_it_stands() -> None:
    """A deny rule that stands below an allow rule for the same secret holds."""
    text = TEXT.replace('["OPENAI_*"]', '["*"]')
    ask = replace(ASK, secret="OPENAI_ADMIN")
    assert text.index("[[deny]]") > text.index("[[allow]]")
    assert decide(parse(text[: text.index("[[deny]]")]), ask).allowed
    assert not decide(parse(text), ask).allowed
