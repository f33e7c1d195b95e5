"""JobSpec: what was asked, its lane and its selectors."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import ids, record, spec
from runner.wire.errors import WireError
from runner.wire.flow import After, Backoff, Concurrency, Rate, RetryRule, Unique
from runner.wire.grants import Grants, NetGrant, PathGrant, SecretGrant
from runner.wire.spec import JobSpec, Limits
from tests.wire.test_codec import PLAIN, TEXT

NAME = st.text(string.ascii_lowercase, min_size=1, max_size=5)
GRANTS = st.builds(
    Grants,
    paths=st.lists(st.builds(PathGrant, NAME.map("/{}".format), st.sampled_from(["read", "write"]), st.booleans())).map(
        tuple
    ),
    net=st.lists(st.builds(NetGrant, NAME, st.integers(1, 65535)), max_size=2).map(tuple),
    secrets=st.lists(st.builds(SecretGrant, NAME), max_size=2).map(tuple),
    memory_bytes=st.none() | st.integers(1, 2**40),
    cpus=st.none() | st.floats(0.1, 64),
)
COMMON = {
    "id": st.just("main-" + ids.ulid(1, b"0" * 10)),
    "tenant": st.just("main"),
    "queue": NAME,
    "nonce": TEXT,
    "not_before_ms": st.integers(0, 10),
    "not_after_ms": st.integers(11, 99),
    "env": st.dictionaries(NAME, TEXT.filter(lambda text: "\0" not in text), max_size=2),
    "labels": st.dictionaries(NAME, NAME, max_size=2),
    "tags": st.dictionaries(NAME, TEXT.filter(lambda text: "\0" not in text), max_size=2),
    "node": st.none() | NAME,
    "grants": GRANTS,
    "limits": st.builds(Limits, st.none() | st.floats(1, 1e6)),
    "retry": st.builds(RetryRule, st.integers(0, 9)),
    "group": st.none() | NAME,
}
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9)
SPECS = st.builds(JobSpec, **COMMON, argv=st.lists(WORDS, min_size=1, max_size=3).map(tuple)) | st.builds(
    JobSpec,
    **COMMON,
    task=st.just("mod:f"),
    args=st.lists(PLAIN, max_size=2).map(tuple),
    kwargs=st.dictionaries(NAME, PLAIN),
)
GOOD = JobSpec("main-" + ids.ulid(), "main", "agents", "n", 1, 2, argv=("x",))


@given(SPECS)
def test_a_job_comes_back(job: JobSpec) -> None:
    """The signed bytes say exactly what was asked, and say it in one way only."""
    data = record.dumps(job)
    assert spec.decode(data) == job
    assert record.dumps(spec.decode(data)) == data


@given(SPECS)
def test_a_lane_is_queue_and_sorted_needs(job: JobSpec) -> None:
    """Equal requirements give equal lanes, whatever the order; no requirement gives the queue itself."""
    turned = replace(job, labels=dict(reversed(job.labels.items())))
    assert spec.lane_of(turned) == spec.lane_of(job)
    queue, _, needs = spec.lane_of(job).partition("@")
    assert queue == job.queue
    assert set(needs.split(",")) - {""} == {f"{key}={value}" for key, value in job.labels.items()} | (
        {f"node={job.node}"} if job.node else set()
    ) | ({"broker"} if job.needs_broker else set())


@given(SPECS)
def test_attack_22_selectors_follow_from_the_signed_job(job: JobSpec) -> None:
    """all, tenant and queue always hit; each tag, secret and group adds one."""
    found = spec.selectors_of(job, "n9")
    assert {"all", "tenant:main", f"queue:{job.queue}", "node:n9"} <= set(found)
    assert {name for name in found if name.startswith("tag:")} == {f"tag:{k}={v}" for k, v in job.tags.items()}
    assert len(spec.selectors_of(job)) == len(found) - 1


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"tenant": "other"},
        {"id": "main-x"},
        {"queue": "a@b"},
        {"queue": "a:b"},
        {"node": "n_1"},
        {"argv": ()},
        {"argv": ("",)},
        {"argv": ("a\0b",)},
        {"argv": None},
        {"task": "mod:f"},
        {"argv": None, "task": "f"},
        {"argv": None, "task": "os.system"},
        {"argv": None, "task": "a:b:c"},
        {"argv": None, "task": "a:<lambda>"},
        {"min_level": "G"},
        {"min_level": ""},
        {"profile": "reuse=0"},
        {"profile": "any"},
        {"after": After(("other-01arz3ndektsv4rrffq69g5fav",))},
        {"after": After((GOOD.id,))},
        {"schedule": "a b"},
        {"priority": 1001},
        {"not_after_ms": 1},
        {"labels": {"a": ""}},
        {"labels": {"a": "x,node=n2"}},
        {"labels": {"a b": "x"}},
        {"tags": {"a=b": "x"}},
        {"tags": {"a": "x" * 257}},
        {"tags": {"a": "\0"}},
        {"env": {"A=B": "x"}},
        {"env": {"A": "\0"}},
        {"cwd": "work"},
    ],
)
def test_a_job_out_of_grammar_does_not_exist(change: dict[str, object]) -> None:
    """It can be neither built nor decoded."""
    with pytest.raises(WireError):
        replace(GOOD, **change)  # type: ignore[arg-type]  # wrong on purpose
    plain = record.encode(GOOD)
    for name, value in change.items():
        plain[name] = record.encode(value) if isinstance(value, After) else value
    with pytest.raises(WireError):
        record.decode(
            JobSpec, {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RetryRule, {"count": -1}),
        (RetryRule, {"count": 1001}),
        (Backoff, {"delay_s": -1.0}),
        (Backoff, {"delay_s": 1.0, "factor": 0.5}),
        (Backoff, {"delay_s": 1.0, "jitter": 1.5}),
        (After, {"jobs": []}),
        (After, {"jobs": ["a b"]}),
        (RetryRule, {"retry_on": ["A b"]}),
        (Unique, {"key": ""}),
        (Unique, {"key": "a b"}),
        (Unique, {"key": "a", "until": "ttl"}),
        (Unique, {"key": "a", "until": "never"}),
        (Rate, {"key": "a", "count": 0, "period_s": 1.0}),
        (Rate, {"key": "a", "count": 1, "period_s": 0.0}),
        (Concurrency, {"key": "a", "count": 0}),
    ],
)
def test_a_flow_rule_out_of_bounds_does_not_exist(kind: type[object], fields: dict[str, object]) -> None:
    """Counts, spans and keys are checked when they are read."""
    with pytest.raises(WireError):
        record.decode(kind, fields)


def test_a_job_is_bounded() -> None:
    """More than MAX_ENVELOPE_BYTES is not even parsed."""
    with pytest.raises(WireError, match="the limit is"):
        spec.decode(b" " * (spec.MAX_ENVELOPE_BYTES + 1))
