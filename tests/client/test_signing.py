"""Signatures: one key, one domain, exactly these bytes."""

from __future__ import annotations

import base64
import hashlib
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import signing
from runner.signing import MOST_SHARED, Signer, new_private
from runner.wire.envelope import Domain, signing_bytes

ONE, TWO = Signer(new_private()), Signer(new_private())
DOMAINS = st.sampled_from(list(Domain))


@given(st.binary(max_size=200), DOMAINS)
def test_a_signature_is_its_signer_s(payload: bytes, domain: Domain) -> None:
    """It verifies under the signer's key, and under no other."""
    signature = ONE.sign(domain, payload)
    assert signing.verify(ONE.public, domain, payload, signature)
    assert not signing.verify(TWO.public, domain, payload, signature)
    assert signing.signer_of(signature) == ONE.key_id


@given(st.binary(max_size=50), st.binary(max_size=50), DOMAINS, DOMAINS)
def test_attack_26_no_other_bytes_and_no_other_domain(one: bytes, two: bytes, mine: Domain, other: Domain) -> None:
    """The same signature never counts for other bytes or another kind of record."""
    signature = ONE.sign(mine, one)
    assert signing.verify(ONE.public, other, two, signature) == (one == two and mine == other)
    assert (signing_bytes(mine, one) == signing_bytes(other, two)) == (one == two and mine == other)


@given(st.text(max_size=120), st.text(max_size=70))
def test_any_text_is_refused_without_an_error(signature: str, public: str) -> None:
    """Hostile signatures and keys are just not valid."""
    assert not signing.verify(public, Domain.JOB, b"x", signature)
    assert not signing.verify(ONE.public, Domain.JOB, b"x", signature)
    assert signing.signer_of(signature) == "" or len(signing.signer_of(signature)) == 16


def test_attack_29_the_label_is_no_proof() -> None:
    """A signature that carries another key's label is refused, in both directions."""
    signature = ONE.sign(Domain.JOB, b"x")
    moved = signature.replace(ONE.key_id, TWO.key_id)
    assert not signing.verify(TWO.public, Domain.JOB, b"x", moved)
    assert not signing.verify(ONE.public, Domain.JOB, b"x", moved)


def test_a_private_key_does_not_leak() -> None:
    """It shows its id only, and can't be pickled."""
    private = new_private()
    signer = Signer(private)
    assert private.hex() not in repr(signer)
    with pytest.raises(TypeError):
        pickle.dumps(signer)
    with pytest.raises(ValueError, match="32 bytes"):
        Signer(b"short")


def test_a_task_module_loads_nothing_heavy() -> None:
    """Importing what an application's task file imports loads no queue, key or settings library."""
    code = (
        "import sys; from runner import App, Grants, Secret, current_job\n"
        "app = App(redis_url='unix:///x')\n"
        "@app.task(grants=Grants(memory='1G'))\ndef f() -> None: ...\n"
        "print(*sorted({n.partition('.')[0] for n in sys.modules} "
        "& {'redis', 'rq', 'pydantic', 'pydantic_settings', 'nacl', 'typer', 'rich', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in ([], ["asyncio"])


@given(st.lists(st.tuples(DOMAINS, st.binary(max_size=50)), min_size=1, max_size=MOST_SHARED))
def test_a_shared_signature_holds_for_each_record_alone(records: list[tuple[Domain, bytes]]) -> None:
    """Every record of a batch verifies by its own text, under the signer's key alone, and no other record by it."""
    texts = ONE.sign_all(records)
    for number, (domain, payload) in enumerate(records):
        assert signing.verify(ONE.public, domain, payload, texts[number])
        assert not signing.verify(TWO.public, domain, payload, texts[number])
        assert not signing.verify(ONE.public, domain, payload + b"x", texts[number])
        assert signing.signer_of(texts[number]) == ONE.key_id
        other, foreign = records[number - 1]
        assert signing.verify(ONE.public, other, foreign, texts[number]) == (records[number - 1] == records[number])


def test_attack_26_no_inner_node_and_no_root_is_a_record() -> None:
    """Nothing that lies inside the tree of a shared signature verifies as a record of its own."""
    records = [(Domain.JOB, bytes([number])) for number in range(4)]
    key_id, shared, _, way = ONE.sign_all(records)[0].split(".")
    beside = base64.urlsafe_b64decode(way + "==")
    leaves = [hashlib.sha256(b"\0" + signing_bytes(*each)).digest() for each in records]
    left = hashlib.sha256(b"\1" + leaves[0] + leaves[1]).digest()
    root = hashlib.sha256(b"\1" + left + beside[32:]).digest()
    upper = base64.urlsafe_b64encode(beside[32:]).decode().rstrip("=")
    assert signing.verify(ONE.public, Domain.SHARED, root, f"{key_id}.{shared}")
    for domain in set(Domain) - {Domain.SHARED}:
        assert not signing.verify(ONE.public, domain, root, f"{key_id}.{shared}")
        for inside in (leaves[0] + leaves[1], b"\1" + leaves[0] + leaves[1], left):
            assert not signing.verify(ONE.public, domain, inside, f"{key_id}.{shared}.0.{upper}")


def test_a_way_to_the_root_has_one_form() -> None:
    """Another number, a cut or longer way, and a way beside a whole signature are refused."""
    records = [(Domain.EVENT, bytes([number])) for number in range(5)]
    for number, text in enumerate(ONE.sign_all(records)):
        head, shared, _, way = text.split(".")
        for other in {*range(16)} - {number}:
            assert not signing.verify(ONE.public, *records[number], f"{head}.{shared}.{other}.{way}")
        for wrong in (way[:43], way[:86], way + way[:43], way[1:] + "A", ""):
            assert not signing.verify(ONE.public, *records[number], f"{head}.{shared}.{number}.{wrong}")
    whole = ONE.sign(*records[0])
    assert not signing.verify(ONE.public, *records[0], f"{whole}.0.{'A' * 43}")
    with pytest.raises(ValueError, match="at most 16"):
        ONE.sign_all([(Domain.EVENT, b"")] * (MOST_SHARED + 1))
