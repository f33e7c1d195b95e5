"""What a node signs together: one signature for a turn's records, and each still verifies alone."""

from __future__ import annotations

from node_agent.records import PAGE_RECORDS, Notary
from runner import signing
from runner.wire.envelope import Domain
from runner.wire.event import EventType
from tests.agent import build

JOB = "main-01arz3ndektsv4rrffq69g5fav"


def notary() -> Notary:
    """One boot of a node with a fresh key."""
    return Notary(build.signer(), "n1", "b00t01234567", "B")


def test_records_of_a_turn_share_a_signature() -> None:
    """They are signed when the first text is asked for; each text stays the same and verifies its own record alone."""
    one = notary()
    noted = [one.turn_event(EventType.JOB_STARTED, job=JOB, attempt=number, detail={}) for number in range(3)]
    texts = [str(each.signature) for each in noted]
    assert len({text.split(".")[1] for text in texts}) == 1
    assert [str(each.signature) for each in noted] == texts
    for number, each in enumerate(noted):
        for other, text in enumerate(texts):
            verified = signing.verify(one.signer.public, Domain.EVENT, each.payload, text)
            assert verified == (number == other)


def test_what_comes_after_a_signature_gets_another() -> None:
    """A page that was signed, or is full, takes nothing more."""
    one = notary()
    first = one.turn_event(EventType.JOB_STARTED, job=JOB, attempt=1, detail={})
    alone = str(first.signature)
    assert alone.count(".") == 1
    rest = [
        one.turn_event(EventType.JOB_STARTED, job=JOB, attempt=number, detail={}) for number in range(PAGE_RECORDS + 1)
    ]
    shared = [str(each.signature).split(".")[1] for each in rest]
    assert alone.split(".")[1] not in shared
    assert len(set(shared[:PAGE_RECORDS])) == 1
    assert shared[PAGE_RECORDS] not in shared[:PAGE_RECORDS]
