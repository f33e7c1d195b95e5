"""Signatures: one key, one domain, exactly these bytes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import signing
from runner.signing import Signer, new_private
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
