"""Grants of mail and watching: what their texts mean, who needs a rule for them, and what crosses the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.policy import decide, parse
from runner import Grants
from runner.errors import UsageError
from runner.wire import record
from runner.wire.errors import GrammarError, WireError
from runner.wire.grants import Grants as WireGrants
from runner.wire.grants import MailGrant, check_watch, parse_mail
from runner.wire.letters import Letter, check_box, is_topic, reply_box
from runner.wire.signals import Answer, Signal, SignalName
from tests.agent import build

NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
TEXTS = st.text(max_size=40)


@given(NAMES, st.booleans(), st.sampled_from(("", ":send", ":receive")))
def test_a_box_reads_back_as_it_was_granted(name: str, topic: bool, way: str) -> None:
    """Every name of the grammar is a box, a topic by its head alone, with one way or both."""
    box = f"topic/{name}" if topic else name
    grant = parse_mail(box + way)
    assert (grant.name, grant.mode) == (box, way[1:] or "both")
    assert is_topic(grant.name) is topic
    signed = WireGrants(mail=(grant,))
    assert record.loads(WireGrants, record.dumps(signed)) == signed


@given(st.text(max_size=80))
def test_no_box_is_another_key_or_somebody_s_answers(text: str) -> None:
    """What is accepted holds no separator of the store's keys, and never names a box of answers."""
    try:
        box = check_box(text)
    except GrammarError:
        return
    assert ":" not in box
    assert not box.startswith("@")
    assert box.count("/") == is_topic(box)


def test_odd_grants_are_refused_where_they_are_written_and_where_they_arrive() -> None:
    """The client says what is meant; a node that gets such a record all the same refuses to read it."""
    for text in ("", "@", "a/b", "topic/", "topic/a/b", "a:both", "a:read", "a:send:receive", "ä", "a b"):
        with pytest.raises(UsageError):
            Grants(mail=(text,))
    for text in ("", "x", "tag:", "tag:a", "tenant:main", "secret:S", "all:", "job:", "group:\n"):
        with pytest.raises(UsageError):
            Grants(watch=(text,))
    with pytest.raises(UsageError):
        Grants(mail="desk")
    data = record.dumps(WireGrants(mail=(MailGrant("desk"),))).replace(b"desk", b"a:b/")
    with pytest.raises(WireError):
        record.loads(WireGrants, data)
    for selector in ("all", "tag:a=b", "queue:q", "group:g", "task:m:f", "node:n1", "job:x"):
        assert check_watch(selector) == selector
    with pytest.raises(GrammarError):
        reply_box("nobody")


def test_policy_has_to_name_what_a_job_may_write_to_and_watch() -> None:
    """Default deny; a pattern covers what it matches; a deny rule beats it."""
    job = build.job(grants=Grants(mail=("team-a", "topic/news"), watch=("tag:team=a",)).to_wire())
    allow = '[[allow]]\ncommands = ["*"]\n'
    rows = (
        (allow, False),
        (allow + 'mail = ["*"]\n', False),
        (allow + 'watch = ["tag:team=*"]\n', False),
        (allow + 'mail = ["team-*"]\nwatch = ["tag:team=*"]\n', False),
        (allow + 'mail = ["team-*", "topic/*"]\nwatch = ["tag:team=*"]\n', True),
        (allow + 'mail = ["*"]\nwatch = ["*"]\n', True),
        (allow + 'mail = ["*"]\nwatch = ["*"]\n[[deny]]\nmail = ["topic/*"]\n', False),
        (allow + 'mail = ["*"]\nwatch = ["*"]\n[[deny]]\nwatch = ["tag:team=a"]\n', False),
    )
    for text, allowed in rows:
        assert decide(parse(f"version = 1\n{text}"), job, "a" * 16).allowed is allowed, text


@given(TEXTS, TEXTS, st.integers(0, 2**53), st.sampled_from(SignalName), st.booleans())
def test_what_nodes_say_to_each_other_is_read_back_whole(
    a: str, b: str, at_ms: int, name: SignalName, flag: bool
) -> None:
    """Letters, signals and answers cross the wire as they are, and none of them is taken for another."""
    words = (
        Letter(a, "main", b, "main-01hzxw3v9b0000000000000000", 1, "n1", at_ms, at_ms, {"x": [a, None]}, flag, flag, b),
        Signal(a, "main", name, b, a, 1, "n1", at_ms, b),
        Answer(a, "main", b, "queued", "n1", a),
    )
    for word in words:
        data = record.dumps(word)
        assert record.loads(type(word), data) == word
        for other in words:
            if other is not word:
                with pytest.raises(WireError):
                    record.loads(type(other), data)
