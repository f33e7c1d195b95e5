"""How jobs ended and what they returned, believed only under a node's signature.

Called by job handles, app and command line. Must never return a value, or call a job ended, on the store's word alone:
the outcome is signed by a node whose card (signed by the fleet key) may serve the job, and the value must have the
outcome's hash (attacks 3, 20).

What a job needs of its node is read from the envelope if this client can check its signature (own key, or one of the
home's trust.toml); else from the lane's name, which is the store's word: a node then still has to be one of the fleet
that serves the tenant of the job's id.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from runner import lineage, signing, trust
from runner.client import Client, Entry
from runner.errors import (
    JobNotFoundError,
    ResultExpiredError,
    ResultTimeoutError,
    UnverifiedResultError,
    end_error,
)
from runner.scripts import payload
from runner.trust import serves
from runner.wire import codec, ids, values
from runner.wire import schedule as schedules
from runner.wire import spec as specs
from runner.wire.errors import WireError
from runner.wire.receipt import Outcome
from runner.wire.spec import JobSpec
from runner.wire.states import END_STATES, State

__all__ = [
    "FIELDS",
    "End",
    "Waiter",
    "checked_spec",
    "lane_for",
    "logs",
    "outcome_by_origin",
    "outcome_of",
    "serves",
    "shown_value",
    "value",
    "value_of",
    "wait",
]

#: The fields of a job hash that readers need.
FIELDS: Final = (
    *("rf_state", "rf_reason", "rf_outcome", "rf_outcome_sig", "rf_attempt", "rf_claim", "rf_task", "rf_tags"),
    *("status", "origin", "description", "created_at", "enqueued_at", "started_at", "ended_at", "rf_due", "rf_waits"),
    "rf_repeated",
)
#: A waiting call looks at the job itself at least this often, should a wake-up be lost.
_LOOK_S: Final = 1.0
_LOG_BATCH: Final = 200


@dataclass(frozen=True, slots=True)
class End:
    """A verified end: the outcome, and the JSON bytes of the value if there is one."""

    outcome: Outcome
    value: bytes | None


def value(
    client: Client,
    job_id: str,
    spec: JobSpec | None,
    timeout_s: float | None,
    types: Iterable[type[object]] = (),
    hints: Mapping[str, type[object]] | None = None,
) -> object:
    """Wait for the end and return the value. Raises as `Job.result` says."""
    return value_of(wait(client, job_id, spec, timeout_s), types, hints)


def value_of(end: End, types: Iterable[type[object]] = (), hints: Mapping[str, type[object]] | None = None) -> object:
    """Return the value of a finished job, built of ``types`` and ``hints``. Raises JobEndError for any other end."""
    if end.outcome.state != State.FINISHED:
        raise end_error(end.outcome)
    if end.value is None:
        return None
    named = {values.type_name(cls): cls for cls in types}
    if hints is not None and not named:
        return values.loads(end.value, hints)
    return values.loads(end.value, {**(hints or {}), **named})


def wait(client: Client, job_id: str, spec: JobSpec | None, timeout_s: float | None) -> End:
    """Wait for a verified end, whatever it is.

    Raises:
        ResultTimeoutError, JobNotFoundError, UnverifiedResultError, StoreError.
    """
    waiter = Waiter(client, job_id, spec, timeout_s)
    while (end := waiter.step(_LOOK_S)) is None:
        pass
    return end


class Waiter:
    """Waits for one job's end in steps, so that a caller may stop between two of them."""

    def __init__(self, client: Client, job_id: str, spec: JobSpec | None, timeout_s: float | None) -> None:
        self._client = client
        self._job_id = job_id
        self._spec = spec
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._stream = client.keys.results(job_id)

    @property
    def left_s(self) -> float | None:
        """Seconds until the time given is over, None if none was given."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def step(self, longest_s: float) -> End | None:
        """Look at the job, then wait up to ``longest_s`` for a sign of its end. Raises as `wait`."""
        client = self._client
        found, last = client.job_and_last(client.keys.job(self._job_id), FIELDS, self._stream)
        if "status" not in found:
            raise missing(client, self._job_id)
        if _text(found, "rf_state") in END_STATES:
            return self._end(found, last)
        left_s = longest_s
        if self._deadline is not None:
            left_s = min(left_s, self._deadline - time.monotonic())
            if left_s <= 0:
                state = _text(found, "rf_state") or _text(found, "status")
                then = f"why: `ringfence show {self._job_id}`" if state == State.PAUSED else "it goes on"
                raise ResultTimeoutError(f"job {self._job_id} is {state} after {self._timeout_s:g} s; {then}")
        client.read({self._stream: last.id if last else "0"}, left_s, 1)
        return None

    def _end(self, found: Mapping[str, bytes], last: Entry | None) -> End:
        outcome = outcome_of(self._client, self._job_id, self._spec, found)
        if outcome is None:
            raise UnverifiedResultError(
                f"the store shows job {self._job_id} as {_text(found, 'rf_state')}, but no node that may serve it"
                " signed that: see `ringfence nodes`, and `ringfence keys show` for the fleet key of this home"
            )
        digest = self._client.digests.of(self._job_id)
        if digest is not None and not trust.is_end_of(outcome, digest):
            raise UnverifiedResultError(
                f"the signed end of job {self._job_id} is that of another job under its id: somebody signed two; find "
                "out with which key, and enqueue this one anew"
            )
        if outcome.result_sha256 is None:
            return End(outcome, None)
        stored = _decoded(last.fields.get("return_value", b"")) if last else b""
        if not trust.is_value_of(outcome, stored):
            raise UnverifiedResultError(f"the stored value of job {self._job_id} is not the one that its node signed")
        return End(outcome, stored)


def outcome_of(client: Client, job_id: str, spec: JobSpec | None, found: Mapping[str, bytes]) -> Outcome | None:
    """Return the signed outcome among a job's fields, or None if no node's signature counts for this job."""
    return _signed_for(client, job_id, lane_for(client, job_id, spec, found), found) if "rf_outcome" in found else None


def outcome_by_origin(client: Client, job_id: str, found: Mapping[str, bytes]) -> Outcome | None:
    """Like `outcome_of`, for lists: the lane is the store's word and no envelope is read."""
    return _signed_for(client, job_id, _text(found, "origin"), found)


def shown_value(outcome: Outcome, last: Entry) -> object:
    """Return a finished job's value in its plain JSON form, or None if the stored one is not the signed one."""
    stored = _decoded(last.fields.get("return_value", b""))
    if not trust.is_value_of(outcome, stored):
        return None
    try:
        return codec.load(stored)
    except WireError:
        return None


def lane_for(client: Client, job_id: str, spec: JobSpec | None, found: Mapping[str, bytes]) -> str:
    """Return the lane whose requirements a node's card must meet; from a checked envelope if possible."""
    if spec is None:
        spec = checked_spec(client, job_id)
    return specs.lane_of(spec) if spec is not None else _text(found, "origin")


def logs(client: Client, job_id: str, follow: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (fd, bytes) of a job's output in order; (0, text) marks where the middle was not kept.

    With ``follow``, wait for more until the job has ended. Output is not signed: it is the job's own text.
    Raises JobNotFoundError, StoreError.
    """
    stream, ends = client.keys.log(job_id), client.keys.results(job_id)
    after, seen_end = "", "0"
    last = False
    while True:
        entries = client.span(stream, f"({after}" if after else "-", _LOG_BATCH)
        for entry in entries:
            after = entry.id
            if "end" in entry.fields:
                return
            yield _log_part(entry)
        if entries:
            continue
        if last:
            return
        # Once more after the end was seen: what the node wrote before it is then all there.
        last = _state_or_raise(client, job_id) in END_STATES or not follow
        if not last:
            for name, entry in client.read({stream: after or "0", ends: seen_end}, _LOOK_S, 1):
                seen_end = entry.id if name == ends else seen_end


def _state_or_raise(client: Client, job_id: str) -> str:
    found = client.fields(client.keys.job(job_id), ["rf_state", "status"])
    if not found:
        raise missing(client, job_id)
    return _text(found, "rf_state") or _text(found, "status")


def _log_part(entry: Entry) -> tuple[int, bytes]:
    number = _text(entry.fields, "f")
    if number in {"1", "2"}:
        return int(number), entry.fields.get("d", b"")
    skipped = _text(entry.fields, "skipped")
    return 0, f"[{skipped if skipped.isdigit() else 'some'} bytes of output were not kept]".encode("ascii")


def _signed_for(client: Client, job_id: str, lane: str, found: Mapping[str, bytes]) -> Outcome | None:
    data, signature = found.get("rf_outcome", b""), _text(found, "rf_outcome_sig")
    for fresh in (False, True) if signing.signer_of(signature) else ():
        outcome = trust.signed_outcome(client.cards(fresh=fresh), job_id, lane, data, signature)
        if outcome is not None:
            return outcome
    return None


def missing(client: Client, job_id: str) -> JobNotFoundError:
    """Return the error for a job that the store does not hold; the tenant's list remembers those that it held."""
    try:
        tenant = ids.tenant_of(job_id)
    except WireError:
        return JobNotFoundError(f"no job {job_id}: this is no job's id")
    if client.score(client.keys.active(tenant), job_id) is not None:
        return ResultExpiredError(f"job {job_id} has ended, and what was kept of it has expired (7 days after its end)")
    return JobNotFoundError(f"no job {job_id}: a wrong id, another tenant's, or it ended long ago")


def checked_spec(client: Client, job_id: str) -> JobSpec | None:
    """The job as it was signed, if the signer is one that this client knows."""
    data = client.fields(client.keys.job(job_id), ["data"]).get("data", b"")
    try:
        found = payload.parse(data)
        known = [key for key in client.publics if signing.key_id_of(key) == signing.signer_of(found.signature)]
        domain = schedules.domain_of(found.occurrence)
        if not any(signing.verify(key, domain, found.envelope, found.signature) for key in known):
            return None
        spec = lineage.job_of(found, client.fleet_public, time.time_ns() // 1_000_000)
    except WireError:
        return None
    return spec if spec.id == job_id else None


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return b""


def _text(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")
