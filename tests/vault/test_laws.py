"""The broker's leases under any order of openings, uses, reloads, approvals, deaths and restarts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from broker.vault import approval, service
from broker.vault.errors import VaultUsageError
from broker.vault.leases import Leases
from broker.vault.rules import Ask, Rule, Rules, decide
from tests.vault import test_rules

NAMES = ("A", "B")
ATTEMPTS = ("main-1.1", "main-2.1", "main-2.2")
FEW = settings(max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))

allows = st.builds(
    Rule,
    effect=st.just("allow"),
    index=st.integers(1, 9),
    secrets=st.sampled_from((("A",), ("B",), ("*",))),
    tenants=st.just(("*",)),
    tasks=st.just(("*",)),
    modes=st.sampled_from((("get",), ("get", "env"), ("env",))),
    ttl_s=st.sampled_from((None, 5.0, 20.0)),
    uses=st.sampled_from((None, 1, 3)),
    approve=st.sampled_from((False, False, True)),
)
denies = st.builds(
    Rule, effect=st.just("deny"), index=st.integers(1, 9), secrets=st.just(("B",)), tenants=st.just(("*",)),
    tasks=st.just(("*",)),
)  # fmt: skip # several to a line
policies = st.builds(
    lambda denied, allowed: Rules((*denied, *allowed)), st.lists(denies, max_size=1), st.lists(allows, max_size=3)
)


def ask_of(name: str) -> Ask:
    """Return what every attempt asks for."""
    return Ask(name, "get", "main", "agents", task="app:task")


class Broker(RuleBasedStateMachine):
    """Leases, the record that a restart reads, and what the laws need to know of the past."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.policy = Rules()
        self.lines: list[dict[str, object]] = []
        self.leases = Leases(self.policy)
        self.live: set[str] = set()
        self.opened_s: dict[str, float] = {}
        self.released: Counter[tuple[str, str]] = Counter()
        #: The most uses and the latest end that any rules have given since an attempt's first lease.
        self.most: dict[tuple[str, str], float] = {}
        self.latest_s: dict[tuple[str, str], float] = {}
        self.told: dict[tuple[str, str], bool] = {}
        self.asked: set[tuple[str, str]] = set()
        self.gone: set[tuple[str, str]] = set()

    def write(self, event: str, **fields: object) -> None:
        """The record."""
        self.lines.append({"event": event, **fields})

    @rule(policy=policies)
    def reload(self, policy: Rules) -> None:
        """New rules come into force."""
        self.policy = policy
        ended = self.leases.reload(policy)
        for attempt in self.live:
            for name in NAMES:
                if not decide(policy, ask_of(name)).allowed:
                    self.gone.add((attempt, name))
            self._note(attempt)
        assert set(ended) <= self.gone

    @rule(attempt=st.sampled_from(ATTEMPTS), names=st.sets(st.sampled_from(NAMES), min_size=1))
    def open(self, attempt: str, names: set[str]) -> None:
        """An agent opens a lease, or tries to."""
        self._open(attempt, tuple(sorted(names)))

    def _open(self, attempt: str, names: tuple[str, ...]) -> None:
        if attempt in self.live:
            with pytest.raises(VaultUsageError):
                self.leases.open(attempt, attempt, [], NAMES, self.now_s)
            return
        opened = self.leases.open(attempt, attempt, [ask_of(name) for name in names], NAMES, self.now_s)
        allowed = all(decide(self.policy, ask_of(name)).allowed for name in names)
        assert (opened.lease is not None) == allowed
        if opened.lease is None:
            return
        self.write("lease.opened", attempt=attempt, since_s=opened.lease.since_s)
        self.live.add(attempt)
        self.opened_s.setdefault(attempt, self.now_s)
        for name in NAMES:
            self.gone.discard((attempt, name))
            if name not in names:
                self.gone.add((attempt, name))
            self.asked.discard((attempt, name))
            if decide(self.policy, ask_of(name)).approve:
                self.asked.add((attempt, name))
        self._note(attempt)

    def _note(self, attempt: str) -> None:
        for name in NAMES:
            decision = decide(self.policy, ask_of(name))
            if decision.allowed:
                key = (attempt, name)
                uses = math.inf if decision.uses is None else decision.uses
                end_s = self.opened_s[attempt] + (decision.ttl_s or math.inf)
                self.most[key] = max(self.most.get(key, 0), uses)
                self.latest_s[key] = max(self.latest_s.get(key, 0.0), end_s)

    @precondition(lambda self: self.live)
    @rule(attempt=st.sampled_from(ATTEMPTS), name=st.sampled_from(NAMES))
    def take(self, attempt: str, name: str) -> None:
        """A job asks for a value; whenever it gets one, every law holds."""
        lease, key = self.leases.get(attempt), (attempt, name)
        assert (lease is not None) == (attempt in self.live), "a lease that ended, or none that should be there"
        if lease is None:
            return
        granted, code = lease.take(name, self.now_s)
        assert (granted is None) == bool(code)
        if granted is None:
            return
        self.write("secret.released", attempt=attempt, name=name)
        self.released[key] += 1
        assert decide(self.policy, ask_of(name)).allowed, "released against the rules in force"
        assert key not in self.gone, "a reload gave back what one took away"
        assert self.released[key] <= self.most[key], "more uses than any rule ever gave"
        assert self.now_s < self.latest_s[key], "later than any rule ever allowed"
        assert key not in self.asked or self.told.get(key) is True, "nobody said yes"

    @precondition(lambda self: self.live)
    @rule(attempt=st.sampled_from(ATTEMPTS), name=st.sampled_from(NAMES), op=st.sampled_from(("approve", "deny")))
    def decide(self, attempt: str, name: str, op: str) -> None:
        """A person decides on what waits."""
        if not self.leases.waits(attempt, name, self.now_s):
            return
        order = {"op": op, "attempt": attempt, "name": name}
        approval.decide(self.leases, self.write, order, self.now_s, origin="test")
        self.told[attempt, name] = op == "approve"

    @rule(seconds=st.sampled_from((0.5, 4.0, 16.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds

    @rule(attempt=st.sampled_from(ATTEMPTS), why=st.sampled_from(("done", "exit")))
    def end(self, attempt: str, why: str) -> None:
        """An attempt is over, or its process died: what it had counts if its agent opens the lease again."""
        if attempt not in self.live:
            return
        self.leases.close(attempt, over=why == "done")
        self.write("lease.ended", attempt=attempt, why=why)
        self.live.discard(attempt)
        if why == "done":
            self.opened_s.pop(attempt)
            for known in (self.released, self.most, self.latest_s, self.told):
                for name in NAMES:
                    known.pop((attempt, name), None)

    @rule()
    def restart(self) -> None:
        """The broker dies; the next one knows the record alone, and agents open their leases again."""
        kept = {attempt: tuple(lease.grants) for attempt in self.live if (lease := self.leases.get(attempt))}
        lines = tuple(self.lines)
        self.leases = Leases(self.policy, service.releases(lines), approval.decisions(lines), service.beginnings(lines))
        self.live.clear()
        for attempt, names in kept.items():
            if names:
                self._open(attempt, names)


TestBroker = Broker.TestCase
TestBroker.settings = FEW


def lived(rule: Rule, *, between_s: float = 0.0) -> Broker:
    """Return a broker that released A once and was started anew."""
    broker = Broker()
    broker.reload(policy=Rules((rule,)))
    broker.open(attempt="main-1.1", names={"A"})
    broker.decide(attempt="main-1.1", name="A", op="approve")
    broker.take(attempt="main-1.1", name="A")
    broker.wait(seconds=between_s)
    broker.restart()
    return broker


PLAIN = Rule("allow", 1, ("*",), ("*",), ("*",), modes=("get",))


@pytest.mark.parametrize(
    ("forgets", "changes", "law"),
    [
        ("releases", {"uses": 1}, "more uses"),
        ("beginnings", {"ttl_s": 5.0}, "later than"),
        ("decisions", {"approve": True}, "nobody said"),
    ],
)
def test_the_machine_can_fail(
    monkeypatch: pytest.MonkeyPatch, forgets: str, changes: dict[str, object], law: str
) -> None:
    """Counter-check: a part of the record forgotten, or an approval that nobody gave, is found out."""
    rule_ = replace(PLAIN, **changes)  # type: ignore[arg-type] # names of its fields
    good = lived(rule_, between_s=6.0)
    released = good.released["main-1.1", "A"]
    good.take(attempt="main-1.1", name="A")
    assert good.released["main-1.1", "A"] == released + (forgets == "decisions")
    if forgets == "decisions":
        monkeypatch.setattr(approval, "decisions", lambda lines: {("main-2.1", "A"): True})
    else:
        monkeypatch.setattr(service, forgets, lambda lines: {})
    bad = lived(rule_, between_s=6.0)
    bad.open(attempt="main-2.1", names={"A"})
    with pytest.raises(AssertionError, match=law):
        bad.take(attempt="main-2.1" if forgets == "decisions" else "main-1.1", name="A")


@settings(max_examples=60)
@given(
    st.lists(test_rules.rules, max_size=4), st.lists(test_rules.rules, max_size=4), test_rules.asks, st.integers(0, 3)
)
def test_a_reload_never_widens(before: list[Rule], after: list[Rule], ask: Ask, taken: int) -> None:
    """Whatever the new rules say, a live lease has at most the secrets, uses and time that it had."""
    ask = replace(ask, mode="get")
    leases = Leases(Rules(tuple(before)))
    lease = leases.open("main-1.1", "main-1", [ask], {ask.secret}, 0.0).lease
    if lease is None:
        return
    for _ in range(taken):
        lease.take(ask.secret, 0.0)
    had = replace(lease.grants[ask.secret])
    leases.reload(Rules(tuple(after)))
    now = lease.grants.get(ask.secret)
    assert (now is not None) == decide(Rules(tuple(after)), ask).allowed
    if now is not None:
        assert (now.until_s, now.pending, now.ask) == (had.until_s, had.pending, had.ask)
        assert (math.inf if now.uses_left is None else now.uses_left) <= (
            math.inf if had.uses_left is None else had.uses_left
        )
