"""Jobs that must not run: forged, foreign, revoked, replayed, misplaced (acceptance 6)."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from runner import keyring
from runner.client import Client
from runner.home import Home
from runner.request import JobOptions, build
from runner.signing import Signer, new_private
from runner.wire import record
from runner.wire.envelope import Domain
from runner.wire.spec import JobSpec
from tests.support.fleet import Fleet, running


class Forger(Client):
    """A client that signs one job and sends another."""

    def _envelope(self, job: JobSpec) -> bytes:
        return record.dumps(dataclasses.replace(job, argv=("sh", "-c", f"echo forged > {(job.argv or ('',))[-1]}")))

    def _signed(self, envelopes: Sequence[bytes]) -> list[str]:
        return [self.signer.sign(Domain.JOB, each.replace(b"echo forged", b"echo ran")) for each in envelopes]


def client_of(fleet: Fleet, signer: Signer | None = None, kind: type[Client] = Client) -> Client:
    """Return a client of the fleet's store with another key or another nature."""
    home = Home(fleet.home)
    config = keyring.load_client(home)
    key = signer or keyring.load_key(fleet.home / config.key_file)
    return kind(config.redis_url, key, config.fleet_pub)


def job_that_marks(fleet: Fleet, **changes: object) -> tuple[JobSpec, Path]:
    """Return a signed-to-be job that leaves a file, and that file."""
    mark = fleet.work / secrets.token_hex(4)
    spec = build(JobOptions(), argv=["sh", "-c", f"echo ran > {mark}"])
    return dataclasses.replace(spec, **changes), mark  # type: ignore[arg-type]  # fields by name


def refusal(fleet: Fleet, spec: JobSpec) -> str:
    """Return the reason of a refused job once it ended."""
    fleet.wait_state(spec.id, "refused", "failed", "finished", "expired")
    view = fleet.json("show", spec.id)[0]
    assert view["state"] == "refused", view
    return str(view["reason"])


def test_a_tampered_envelope_is_refused(fleet: Fleet) -> None:
    """One changed word of a signed job: bad_signature, and nothing ran."""
    spec, mark = job_that_marks(fleet)
    client = client_of(fleet, kind=Forger)
    client.enqueue([spec])
    client.close()
    assert refusal(fleet, spec) == "bad_signature"
    assert not mark.exists()


def test_an_unknown_key_is_refused(fleet: Fleet) -> None:
    """A well-signed job of a key that no trust file names: unknown_key."""
    spec, mark = job_that_marks(fleet)
    client = client_of(fleet, Signer(new_private()))
    client.enqueue([spec])
    client.close()
    assert refusal(fleet, spec) == "unknown_key"
    assert not mark.exists()


def test_a_replayed_job_is_refused(fleet: Fleet) -> None:
    """The same signed bytes again, after the store forgot the first run: the node that ran it refuses."""
    spec = build(JobOptions(node="node-1"), argv=["true"])
    client = client_of(fleet)
    client.enqueue([spec])
    fleet.wait_state(spec.id, "finished")
    keys = client.keys
    with redis.Redis.from_url(keyring.load_client(Home(fleet.home)).redis_url) as store:
        store.delete(keys.job(spec.id), keys.results(spec.id), keys.log(spec.id))
    client.enqueue([spec])
    client.close()
    assert refusal(fleet, spec) == "replayed"


@pytest.fixture(scope="module")
def other_keys() -> Iterator[tuple[Fleet, dict[str, Signer]]]:
    """A fleet that knows a revoked key, one that may only kill, and one for another tenant."""
    names = ("revoked", "killer", "guest")
    signers = {name: Signer(new_private()) for name in names}

    def prepare(home: Home) -> None:
        keyring.init(home)
        keyring.trust(home, signers["revoked"].public, ("enqueue",))
        keyring.revoke(home, signers["revoked"].key_id)
        keyring.trust(home, signers["killer"].public, ("kill",))
        keyring.trust(home, signers["guest"].public, ("enqueue",), ("guest",))

    with running("--slots", "1", prepare=prepare) as fleet:
        yield fleet, signers


@pytest.mark.parametrize("name", ["revoked", "killer", "guest"])
def test_a_key_without_the_right_is_refused(other_keys: tuple[Fleet, dict[str, Signer]], name: str) -> None:
    """Revoked, without the right to enqueue, or of another tenant: nothing runs."""
    fleet, signers = other_keys
    spec, mark = job_that_marks(fleet)
    client = client_of(fleet, signers[name])
    client.enqueue([spec])
    client.close()
    assert refusal(fleet, spec) in {"unknown_key", "policy"}
    assert not mark.exists()
