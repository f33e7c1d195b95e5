"""Jobs that are like one built before: another way to write them, the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from runner import context, request, signing
from runner.digests import MOST_FRESH, Digests
from runner.errors import EnqueueError, InsideJobError
from runner.grants import Grants
from runner.request import JobOptions
from runner.scripts import rows
from runner.stencil import Draft
from runner.suspects import PlainSecretWarning
from runner.wire import codec, ids, record, spec
from runner.wire.envelope import Domain
from runner.wire.errors import ValueTypeError
from runner.wire.sealed import Sealed
from runner.wire.spec import JobSpec
from runner.wire.values import ResultOf
from tests.client.paper import KEYS, Fleet, entries

TASK = "sample:add"
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.datetimes().map(lambda moment: moment.isoformat())
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a%{$"\\é', max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
EVERYDAY = st.fixed_dictionaries(
    {},
    optional={
        "queue": NAMES,
        "tenant": NAMES,
        "node": NAMES,
        "retries": st.integers(0, 9),
        "timeout": st.floats(0.5, 1e6),
        "expires": st.floats(1, 1e6),
        "cwd": st.sampled_from(["/", "/a %d %b é", '/"\\']),
        "priority": st.integers(-1000, 1000),
        "min_level": st.sampled_from("ABF"),
        "at_most_once": st.booleans(),
        "trusted": st.booleans(),
        "fresh": st.booleans(),
    },
)


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """No job is like one of another test."""
    request._stencils.clear()
    yield
    request._stencils.clear()


def second(options: JobOptions, *args: object, **kwargs: object) -> JobSpec | Draft:
    """Return the second of two jobs that are made alike."""
    request.draft(options, task=TASK)
    return request.draft(options, task=TASK, args=args, kwargs=kwargs)


@settings(max_examples=60, deadline=None)
@given(EVERYDAY, st.lists(PLAIN, max_size=3), st.dictionaries(NAMES, PLAIN, max_size=3))
def test_a_draft_is_the_job_that_is_built(options: JobOptions, args: list[object], kwargs: dict[str, object]) -> None:
    """Envelope, row and lane are byte for byte those of the job that is built the long way."""
    made = second(options, *args, **kwargs)
    assert isinstance(made, Draft)
    job = spec.decode(made.envelope)
    built = request.build(options, task=TASK, args=args, kwargs=kwargs)
    life_ms = built.not_after_ms - built.not_before_ms
    assert job.not_after_ms - job.not_before_ms == life_ms
    start_ms, end_ms = job.not_before_ms, job.not_after_ms
    same = replace(built, id=job.id, nonce=job.nonce, not_before_ms=start_ms, not_after_ms=end_ms)
    assert record.dumps(same, bare=True) == made.envelope
    row = rows.row(job, job.not_before_ms)
    assert rows.is_plain(row)
    assert codec.dump(row) == made.row
    assert (made.id, made.tenant, made.lane) == (job.id, job.tenant, spec.lane_of(job))


@pytest.mark.parametrize(
    "options",
    [
        {"tags": {"a": "b"}},
        {"unique": "one"},
        {"countdown": 1.0},
        {"grants": Grants()},
        {"env": {"A": "b"}},
        {"after": "main-01m8nz26cyrcb2h2mm73g5wppq"},
        {"group": "g"},
        {"retry_on": ["exit"], "retries": 1},
    ],
    ids=str,
)
def test_what_is_more_than_everyday_is_built(options: JobOptions) -> None:
    """An option that a rule of the store, or a promise of its own, hangs on never takes the short way."""
    assert isinstance(second(options), JobSpec)


@pytest.mark.parametrize("value", [ResultOf("main-01m8nz26cyrcb2h2mm73g5wppq"), Sealed("x")], ids=["output", "sealed"])
def test_arguments_that_are_more_than_values_are_built(value: object) -> None:
    """A job that waits for another one, or holds what must be sealed, is built, whatever was built before it."""
    made = second(JobOptions(), [value])
    assert isinstance(made, JobSpec)
    assert made.after is not None or made.sealed is not None
    request._stencils.clear()
    request.draft({}, task=TASK, args=(value,))
    assert request._stencils == {}


def test_what_is_equal_but_not_alike_is_kept_apart() -> None:
    """1, 1.0 and True are equal and written in three ways: none of them is written as another."""
    for value in (1, True, 1.0):
        made = second(cast("JobOptions", {"priority": value}))
        assert isinstance(made, Draft)
        assert json.dumps(json.loads(made.envelope)["priority"]) == json.dumps(value)


def test_what_has_no_form_is_refused_as_ever(fleet: Fleet) -> None:
    """The error of a bad argument, and that of one too deep, is the same for the second call as for the first."""
    deep: list[object] = []
    for _ in range(40):
        deep = [deep]
    for _ in range(2):
        with pytest.raises(ValueTypeError, match=r"args\[0\]"):
            fleet.app.call(TASK, [object()])
        with pytest.raises((EnqueueError, ValueTypeError), match="deep"):
            fleet.app.call(TASK, [deep])
        with pytest.raises(EnqueueError, match="limit"):
            fleet.app.call(TASK, ["é" * 330_000 + "\n" * 200_000])
        fleet.app.call(TASK)


def test_a_secret_in_the_open_is_told_each_time() -> None:
    """The second call of a task warns as the first does, once."""
    for _ in range(2):
        with pytest.warns(PlainSecretWarning) as told:
            request.draft({}, task=TASK, kwargs={"password": "hunter2"})
        assert len(told) == 1


def test_likes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many kinds of calls a process makes, it remembers a bounded number."""
    monkeypatch.setattr(request, "_MOST_STENCILS", 3)
    for number in range(10):
        request.draft({"priority": number}, task=TASK)
        assert 1 <= len(request._stencils) <= 3


def test_the_second_job_lies_in_the_store_as_the_first(fleet: Fleet) -> None:
    """Both ways leave the same fields and places; RQ reads the second, and its signature is the client's."""
    first, other = fleet.app.call(TASK), fleet.app.call(TASK)
    one, two = (fleet.store.hgetall(KEYS.job(job.id)) for job in (first, other))
    apart = {b"created_at", b"enqueued_at", b"data", b"rf_seq", b"rf_not_after"}
    assert {k: v for k, v in one.items() if k not in apart} == {k: v for k, v in two.items() if k not in apart}
    assert one.keys() == two.keys()
    assert fleet.store.lrange(KEYS.queue("agents"), 0, -1) == [first.id.encode(), other.id.encode()]
    assert [json.loads(entry[b"event"])["job"] for entry in entries(fleet.store, KEYS.events("main"))] == [
        first.id,
        other.id,
    ]
    seen = RqJob.fetch(other.id, connection=fleet.store, serializer=JSONSerializer)
    assert seen.kwargs["envelope"].encode() == fleet.envelope(other.id)[1].envelope
    data = fleet.envelope(other.id)[1]
    assert signing.verify(fleet.app.client().signer.public, Domain.JOB, data.envelope, data.signature)
    assert other.status().state == "queued"


def test_a_draft_that_is_sent_twice_counts_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a draft gets lost: the call returns its job, and the store has it once."""
    client = fleet.app.client()
    fleet.app.call(TASK)
    honest = client._line.call

    def lose(command: bytes) -> object:
        honest(command)
        raise redis.exceptions.ConnectionError("lost")

    monkeypatch.setattr(client._line, "call", lose)
    job = fleet.app.call(TASK)
    assert fleet.store.lrange(KEYS.queue("agents"), 1, -1) == [job.id.encode()]
    assert client.digests.of(job.id) is not None


def test_an_event_is_json_whatever_a_command_is_called(fleet: Fleet) -> None:
    """The event that the script writes by hand holds any name as it is, in a batch of several kinds too."""
    words = ['we"ird\\ %d %s\n\té', "plain", "x" * 300, "plain"]
    jobs = [request.build({"queue": "q.1"}, argv=[word]) for word in words]
    fleet.app.client().enqueue(jobs)
    told = [json.loads(entry[b"event"]) for entry in entries(fleet.store, KEYS.events("main"))]
    assert [event.pop("at_ms") > 0 for event in told] == [True] * 4
    assert told == [
        {"type": "job.queued", "job": job.id, "attempt": 0, "detail": {"queue": "q.1", "task": word}}
        for job, word in zip(jobs, words, strict=True)
    ]


def test_what_an_enqueue_writes_gets_its_time_back(fleet: Fleet) -> None:
    """A list of events or of recent jobs that lost its time to live has it again after the next enqueue."""
    for key in (KEYS.events("main"), KEYS.active("main")):
        fleet.app.call(TASK)
        fleet.store.persist(key)
        fleet.app.call(TASK)
        assert fleet.store.ttl(key) > 7 * 86_400


def test_fresh_names_use_all_their_bits() -> None:
    """Each letter appears in each place of a fresh id's random part, and ids and nonces never repeat."""
    names = [ids.new_job_names("acme") for _ in range(1500)]
    assert all(ids.check_job_id(name).startswith("acme-") for name, _ in names)
    assert len({name for name, _ in names}) == len({nonce for _, nonce in names}) == 1500
    assert all(len({name[place] for name, _ in names}) == 32 for place in range(-16, 0))
    assert all(len(nonce) == 32 for _, nonce in names)


def test_no_hash_is_lost_on_the_way() -> None:
    """However many envelopes wait to be hashed, small or large, each is known when it is asked for."""
    digests = Digests()
    noted = {f"main-{number}": b"%d" % number * (2000 if number % 50 == 9 else 1) for number in range(200)}
    for job_id, envelope in noted.items():
        digests.note(job_id, envelope)
        assert len(digests._fresh) < MOST_FRESH
    assert {job_id: digests.of(job_id) for job_id in noted} == {
        job_id: hashlib.sha256(envelope).hexdigest() for job_id, envelope in noted.items()
    }
    digests.note("main-3", b"other")
    assert digests.of("main-3") is None


def test_a_fork_asks_again_whether_it_is_a_job_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found for one process holds for no other: a worker gets its mark after the fork."""
    context.refuse_inside("x")
    monkeypatch.setenv("RINGFENCE_FDS", "100")
    context.refuse_inside("x")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InsideJobError):
        context.refuse_inside("x")
