"""Occurrences: derived by everybody in the same way from what a client signed, and from nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from node_agent.admission import CLOCK_SLACK_MS, Admitted, Denial, Enforcement, Offer, Rules, admit
from node_agent.policy import parse
from runner.scripts import payload
from runner.wire import record
from runner.wire import schedule as schedules
from runner.wire import spec as specs
from runner.wire.card import TrustedKey
from runner.wire.envelope import Domain
from runner.wire.errors import CodecError, RecordError, WireError
from runner.wire.flow import After
from runner.wire.grants import Grants
from runner.wire.schedule import Schedule
from tests.agent.build import envelope, job, signer
from tests.schedule.clock import schedule, signed

KEY = signer()
STRANGER = signer()
DUE_MS = 1_900_000_000_000
POLICY = parse('version = 1\n[[allow]]\ncommands = ["*"]\n')


def rules() -> Rules:
    """A node that trusts KEY for tenant main."""
    trusted = TrustedKey(KEY.key_id, KEY.public, ("enqueue",), ("main",))
    return Rules("n1", {KEY.key_id: trusted}, POLICY, Enforcement("A"), (), {})


def offer(what: Schedule, due_ms: int = DUE_MS, **changes: object) -> Offer:
    """The claim of an occurrence as an honest scheduler enqueues it; ``changes`` are a dishonest one's."""
    spec, stored = schedules.occurrence(what, due_ms), signed(KEY, what)
    base = Offer(spec.id, specs.lane_of(spec), 1, stored.record, stored.signature, occurrence=due_ms)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # tests name real fields


def judged(given: Offer, now_ms: int = DUE_MS, ledger: str = "new") -> Admitted | Denial:
    return admit(given, rules(), lambda nonce, attempt: ledger, now_ms)


def reason(given: Offer, now_ms: int = DUE_MS, ledger: str = "new") -> str:
    """The reason of the denial."""
    decision = judged(given, now_ms, ledger)
    assert isinstance(decision, Denial), decision
    return decision.reason


def test_an_occurrence_is_admitted_as_the_template_says() -> None:
    """The same job, but for id, nonce and times, which follow from name and due time."""
    what = schedule(expires_ms=5000)
    decision = judged(offer(what))
    assert isinstance(decision, Admitted)
    spec = decision.spec
    expected = dataclasses.replace(
        what.template, id=spec.id, nonce=spec.nonce, not_before_ms=DUE_MS, not_after_ms=DUE_MS + 5000
    )
    assert spec == expected
    assert spec == schedules.occurrence(schedules.decode(record.dumps(what)), DUE_MS)
    other = schedules.occurrence(what, DUE_MS + 1000)
    assert len({spec.id, other.id, what.template.id}) == len({spec.nonce, other.nonce, what.template.nonce}) == 3


def test_attack_04_a_time_that_is_not_the_rule_s_is_refused() -> None:
    """A scheduler, or whoever writes the store, can't make up a time: the rule is signed, and worked out again."""
    hourly = schedule(cron="0 * * * *", zone="Europe/Berlin", start_ms=DUE_MS - 10**9, end_ms=DUE_MS + 10**9)
    genuine = schedules.next_due(hourly, DUE_MS)
    assert genuine is not None
    assert isinstance(judged(offer(hourly, genuine), genuine), Admitted)
    for made_up in (genuine + 1, genuine + 60_000, DUE_MS, 0, genuine - 400 * 3_600_000, genuine + 400 * 3_600_000):
        assert reason(offer(hourly, made_up), made_up) == "bad_hash"


def test_attack_04_more_than_the_template_is_refused() -> None:
    """One byte of the signed schedule changed (a grant, a queue, a rule) is a bad signature on every node."""
    what = schedule()
    text = record.dumps(what)
    wider = dataclasses.replace(what.template, grants=Grants(memory_bytes=1 << 40))
    for changed in (
        text.replace(b'"agents"', b'"others"'),
        text.replace(b'"every_ms":1000', b'"every_ms":1001'),
        record.dumps(dataclasses.replace(what, template=wider)),
        record.dumps(dataclasses.replace(what, expires_ms=what.expires_ms + 1)),
    ):
        assert changed != text
        assert reason(offer(what, envelope=changed)) == "bad_signature"


def test_attack_04_another_job_s_place_is_refused() -> None:
    """Id and lane follow from the schedule: another id, another due time's id or another lane is a forgery."""
    what = schedule()
    assert reason(offer(what, job_id=schedules.occurrence_id("main", "tick", DUE_MS + 1000))) == "bad_signature"
    assert reason(offer(what, job_id=schedules.occurrence_id("main", "tock", DUE_MS))) == "bad_signature"
    assert reason(offer(what, job_id=what.template.id)) == "bad_signature"
    assert reason(offer(what, lane="others")) == "bad_signature"
    assert reason(offer(what, occurrence=DUE_MS + 1000)) == "bad_signature"


def test_attack_04_a_template_is_no_job() -> None:
    """Neither the schedule's text, nor the template signed as a job, nor a job's text as a schedule is let in."""
    what = schedule()
    stored = signed(KEY, what)
    template = what.template
    lane = specs.lane_of(template)
    assert reason(Offer(template.id, lane, 1, stored.record, stored.signature)) == "bad_signature"
    assert reason(Offer(template.id, lane, 1, *envelope(KEY, template))) == "bad_hash"
    text = record.dumps(what)
    assert reason(Offer(template.id, lane, 1, text, KEY.sign(Domain.JOB, text))) == "bad_hash"
    plain = job()
    data, signature = envelope(KEY, plain)
    assert reason(Offer(plain.id, "agents", 1, data, signature, occurrence=DUE_MS)) == "bad_signature"


def test_attack_04_only_a_trusted_client_s_schedule_counts() -> None:
    """A node's or scheduler's own key signs no schedule, and a key stays within its tenants."""
    what = schedule()
    theirs = signed(STRANGER, what)
    assert reason(offer(what, signature=theirs.signature)) == "unknown_key"
    assert reason(offer(schedule(tenant="acme"))) == "policy"


def test_an_occurrence_runs_in_its_time_alone() -> None:
    """Not before its due time, but for the clocks' slack, and not after it is void."""
    what = schedule(expires_ms=5000)
    assert isinstance(judged(offer(what), DUE_MS - CLOCK_SLACK_MS), Admitted)
    early = judged(offer(what), DUE_MS - CLOCK_SLACK_MS - 1)
    assert isinstance(early, Denial)
    assert (early.reason, "may not start before" in early.message) == ("bad_hash", True)
    assert reason(offer(what), DUE_MS + 5000 + CLOCK_SLACK_MS + 1) == "replayed"


def test_attack_24_an_occurrence_runs_once_on_a_node() -> None:
    """The ledger knows the nonce that follows from name and due time, also under a new signature of the schedule."""
    what = schedule()
    asked: list[str] = []

    def ended(nonce: str, attempt: int) -> str:
        asked.append(nonce)
        return "ended"

    again = schedule(expires_ms=1234)
    for each in (what, again):
        denied = admit(offer(each), rules(), ended, DUE_MS)
        assert isinstance(denied, Denial)
        assert denied.reason == "replayed"
    assert len(set(asked)) == 1


def test_a_job_that_is_put_off_is_not_started_early() -> None:
    """An ordinary job with a later time: a node that is handed it too early refuses it and says what is wrong."""
    spec = job(not_before_ms=DUE_MS)
    given = Offer(spec.id, "agents", 1, *envelope(KEY, spec))
    assert reason(given, DUE_MS - CLOCK_SLACK_MS - 1) == "bad_hash"
    assert isinstance(judged(given, DUE_MS), Admitted)


@pytest.mark.parametrize(
    "changes",
    [
        *({"every_ms": 999}, {"every_ms": 0}, {"every_ms": 367 * 86_400_000}, {"cron": "0 3 * * *", "every_ms": 1000}),
        *({"every_ms": None}, {"every_ms": 1000, "zone": "Europe/Berlin"}, {"cron": "61 * * * *"}, {"expires_ms": 0}),
        *({"cron": "0 3 * * *", "zone": "Mars/Olympus"}, {"end_ms": 1, "start_ms": 2}, {"start_ms": -1}),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(changes: dict[str, object]) -> None:
    """It can't be made, and so can't be read."""
    with pytest.raises(RecordError):
        schedule(**changes)  # type: ignore[arg-type]  # `changes` names neither name nor tenant


def test_a_schedule_takes_no_template_of_another() -> None:
    """Name and tenant of the template are the schedule's; it waits for no job."""
    what = schedule()
    for template in (
        dataclasses.replace(what.template, schedule="other"),
        dataclasses.replace(what.template, schedule=None),
        dataclasses.replace(what.template, after=After((job().id,))),
    ):
        with pytest.raises(WireError):
            dataclasses.replace(what, template=template)
    with pytest.raises(WireError):
        dataclasses.replace(what, tenant="acme")


def test_a_payload_carries_its_due_time() -> None:
    """It reads back as packed; anything but a Unix time is refused."""
    stored = signed(KEY, schedule())
    assert payload.parse(payload.pack(stored.record, stored.signature, DUE_MS)).occurrence == DUE_MS
    assert payload.parse(payload.pack(stored.record, stored.signature)).occurrence is None
    for bad in (-1, 2**48, True, "1", 1.5):
        with pytest.raises((RecordError, CodecError)):
            payload.parse(payload.pack(stored.record, stored.signature, bad))  # type: ignore[arg-type]  # forged
