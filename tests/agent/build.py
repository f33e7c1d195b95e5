"""Small builders shared by the node agent's tests."""

from __future__ import annotations

import dataclasses

from runner import signing
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.envelope import Domain
from runner.wire.spec import JobSpec

__all__ = ["FAR_MS", "envelope", "job", "signer"]

FAR_MS = 4_000_000_000_000


def signer() -> Signer:
    """A fresh key."""
    return Signer(signing.new_private())


def job(**changes: object) -> JobSpec:
    """A small command job of tenant main; ``changes`` replace fields."""
    base = JobSpec(
        id=ids.new_job_id("main"),
        tenant="main",
        queue="agents",
        nonce=ids.new_nonce(),
        not_before_ms=0,
        not_after_ms=FAR_MS,
        argv=("sh", "-c", "true"),
    )
    if "task" in changes:
        changes.setdefault("argv", None)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # tests name real fields


def envelope(key: Signer, spec: JobSpec) -> tuple[bytes, str]:
    """The signed bytes of a job."""
    payload = record.dumps(spec)
    return payload, key.sign(Domain.JOB, payload)
