"""Port: redis, runner.signing, runner.trust. What the jobs that a job waited for have come to, by their nodes' word.

Called by the supervisor, once such a job is admitted and before it is staged. Must never let a job run on the store's
word that another one finished, and never pass a value on that its node did not sign (attacks 3, 4, 20): the other job's
own envelope says, under a client's signature, who may speak of it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.admission import Denial
from node_agent.errors import StoreAwayError
from runner import lineage, signing, trust
from runner.scripts import payload
from runner.wire import codec, passing
from runner.wire import schedule as schedules
from runner.wire import spec as specs
from runner.wire.card import NodeCard, TrustedKey
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.flow import After
from runner.wire.keys import Keys
from runner.wire.passing import Failure
from runner.wire.receipt import Outcome
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason, State

__all__ = ["Dependencies", "Ended"]

#: Jobs looked at in one round trip.
BATCH: Final = 32
CARDS_TTL_S: Final = 5.0
_FIELDS: Final = ("rf_outcome", "rf_outcome_sig")
#: As many values as these stand in JSON, or fewer.
_SIGNS: Final = (b"[", b"{", b",")
_ANEW: Final = "somebody signed two under one id; find out with which key, and enqueue both anew"


class _Unmet(Exception):
    """A job that was waited for does not allow this one to run; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One job as the store shows it."""

    data: bytes
    outcome: bytes
    signature: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end as its node signed it, and the JSON bytes of its result; None: it returned none."""

    outcome: Outcome
    value: bytes | None


class Dependencies:
    """Looks at other jobs for one boot. ``trusted``: whose jobs this node takes, by label.

    ``fleet``: the key that signs the fleet's cards; None = this home has none, and no job can be shown to have ended.
    """

    def __init__(self, client: Redis, keys: Keys, trusted: Mapping[str, TrustedKey], fleet: str | None) -> None:
        self._client = client
        self._keys = keys
        self._trusted = trusted
        self._fleet = fleet
        self._cards: tuple[NodeCard, ...] = ()
        self._cards_until = 0.0

    async def settle(self, spec: JobSpec) -> JobSpec | Denial:
        """Return the job with the results that its arguments ask for, or why it must not run. Raises StoreAwayError."""
        if spec.after is None:
            return spec
        try:
            ends = await self._ends(spec.after, spec.tenant)
            wanted = passing.references((*cast("tuple[Json, ...]", spec.args), cast("Json", spec.kwargs)))
            return await self._with_results(spec, wanted, ends) if wanted else spec
        except _Unmet as error:
            return Denial(RefuseReason.DEPENDENCY_FAILED, str(error), spec)
        except RedisError as error:
            raise StoreAwayError(f"the store failed ({type(error).__name__})") from error

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return a stored job as it was signed, if a key did that whose jobs this node takes. Raises StoreAwayError."""
        try:
            (found,) = await self._read([job])
        except RedisError as error:
            raise StoreAwayError(f"the store failed ({type(error).__name__})") from error
        spec = self._signed_spec(found.data)[0] if found is not None else None
        return spec if spec is not None and (spec.id, spec.tenant) == (job, tenant) else None

    async def end_of(self, job: str, tenant: str, meant: str = "") -> Ended | str:
        """Return how a job ended, or why nobody's word on that counts; ``meant``: as in `_verified`.

        Raises StoreAwayError.
        """
        if self._fleet is None:
            return "this node's home has no keys/fleet.pub to check how other jobs ended: copy it there"
        try:
            (found,) = await self._read([job])
            outcome = await self._verified(job, meant, tenant, found)
            value = await self._result(job, outcome) if outcome.result_sha256 is not None else None
            return Ended(outcome, value)
        except _Unmet as error:
            return str(error)
        except RedisError as error:
            raise StoreAwayError(f"the store failed ({type(error).__name__})") from error

    async def _ends(self, after: After, tenant: str) -> dict[str, Outcome]:
        if self._fleet is None:
            raise _Unmet("this node's home has no keys/fleet.pub to check how other jobs ended: copy it there")
        ends: dict[str, Outcome] = {}
        for start in range(0, len(after.jobs), BATCH):
            jobs = after.jobs[start : start + BATCH]
            meant = after.envelopes[start : start + BATCH] or ("",) * len(jobs)
            for job, digest, found in zip(jobs, meant, await self._read(jobs), strict=True):
                outcome = await self._verified(job, digest, tenant, found)
                if outcome.state != State.FINISHED and after.failed != "run":
                    why = f" ({outcome.reason})" if outcome.reason else ""
                    raise _Unmet(
                        f"job {job}, which this one waited for, ended {outcome.state}{why};"
                        ' on_failure="run" lets it run all the same'
                    )
                ends[job] = outcome
                # Each costs two signatures: the loop belongs to others in between (attack 41).
                await asyncio.sleep(0)
        return ends

    async def _verified(self, job: str, meant: str, tenant: str, found: _Found | None) -> Outcome:
        """Return how a job ended, as a node signed it that may serve the job.

        ``meant``: the hash of the envelope that was waited for; empty if the client did not know it.
        """
        if found is None:
            raise _Unmet(f"the store knows no job {job} any more, which this one waited for: enqueue both again")
        spec, digest = self._signed_spec(found.data)
        if spec is None or spec.id != job or spec.tenant != tenant:
            raise _Unmet(f"job {job}, which this one waited for, is not signed by a key of this node's trust.toml")
        if meant not in ("", digest):
            raise _Unmet(f"under the id of job {job} lies another job than the one that this one waited for: {_ANEW}")
        lane = specs.lane_of(spec)
        for fresh in (False, True):
            cards = await self.fleet_cards(fresh=fresh)
            outcome = trust.signed_outcome(cards, job, lane, found.outcome, found.signature)
            if outcome is not None:
                if not trust.is_end_of(outcome, digest):
                    raise _Unmet(f"the signed end of job {job} is that of another job under its id: {_ANEW}")
                return outcome
        raise _Unmet(f"no node that may serve job {job}, which this one waited for, has signed its end")

    def _signed_spec(self, data: bytes) -> tuple[JobSpec | None, str]:
        """Return the stored job if a key signed it that may, and the hash of its envelope."""
        try:
            offer = payload.parse(data)
            key = self._trusted.get(signing.signer_of(offer.signature))
            if key is None or key.revoked or "enqueue" not in key.may:
                return None, ""
            domain = schedules.domain_of(offer.occurrence)
            if not signing.verify(key.public, domain, offer.envelope, offer.signature):
                return None, ""
            spec = lineage.job_of(offer, self._fleet, time.time_ns() // 1_000_000)
        except WireError:
            return None, ""
        fits = "*" in key.tenants or spec.tenant in key.tenants
        return (spec if fits else None), offer.sha256

    async def _with_results(self, spec: JobSpec, wanted: frozenset[str], ends: Mapping[str, Outcome]) -> JobSpec:
        """Put each result, or what stands for it, where the signed arguments ask for it."""
        values: dict[str, Json] = {}
        left, values_left = passing.MAX_PASSED_BYTES, passing.MAX_PASSED_VALUES
        for job in sorted(wanted):
            outcome = ends.get(job)
            if outcome is None:
                raise _Unmet(f"the arguments ask for the result of {job}, for which this job does not wait")
            if outcome.state != State.FINISHED:
                told = Failure(job, outcome.state, outcome.reason, outcome.detail)
                values[job] = passing.failure_form(told)
                continue
            data = await self._result(job, outcome)
            left -= len(data)
            values_left -= sum(map(data.count, _SIGNS))
            if left < 0 or values_left < 0:
                raise _Unmet(
                    f"the results that this job is passed have more than {passing.MAX_PASSED_BYTES} bytes or"
                    f" {passing.MAX_PASSED_VALUES} values: return paths instead of contents"
                )
            values[job] = codec.load(data)
        args = tuple(passing.filled(cast("Json", arg), values) for arg in spec.args)
        kwargs = cast("dict[str, object]", passing.filled(cast("Json", spec.kwargs), values))
        try:
            codec.dump([list(args), kwargs, 0])
            return replace(spec, args=args, kwargs=kwargs)
        except WireError as error:
            raise _Unmet(f"a result can't stand where the arguments ask for it: {error}") from None

    async def _result(self, job: str, outcome: Outcome) -> bytes:
        try:
            found = await _answer(self._client.xrevrange(self._keys.results(job), count=1))
        except ResponseError as error:
            if not _is_misused(error):
                raise
            found = []
        entries = cast("list[tuple[bytes, dict[bytes, bytes] | None]]", found)
        fields = entries[0][1] if entries else None
        try:
            data = base64.b64decode((fields or {}).get(b"return_value", b""), validate=True)
        except (ValueError, binascii.Error):
            data = b""
        if not trust.is_value_of(outcome, data):
            raise _Unmet(f"the stored result of job {job} is not the one that its node signed")
        return data

    async def _read(self, jobs: Sequence[str]) -> list[_Found | None]:
        """Read jobs; one whose payload is over the cap counts as unknown, and the payload is not fetched."""
        keys = [self._keys.job(job) for job in jobs]
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hstrlen(key, "data")
        sizes = cast("list[object]", await _answer(pipe.execute(raise_on_error=False)))
        for key, size in zip(keys, sizes, strict=True):
            small = isinstance(size, int) and 0 < size <= payload.MAX_DATA_BYTES
            pipe.hmget(key, [*_FIELDS, *(["data"] if small else [])])
        rows = cast("list[list[bytes | None] | Exception]", await _answer(pipe.execute(raise_on_error=False)))
        return [_found(row) for row in rows]

    async def fleet_cards(self, *, fresh: bool) -> tuple[NodeCard, ...]:
        """Return the valid cards of the fleet; ``fresh``: not older than this call. Raises RedisError."""
        if fresh or time.monotonic() >= self._cards_until:
            found = cast("dict[bytes, bytes]", await _answer(self._client.hgetall(self._keys.cards())))
            now_ms = time.time_ns() // 1_000_000
            cards = [trust.read_card(data, self._fleet or "", now_ms) for data in found.values()]
            self._cards = tuple(card for card in cards if card is not None)
            self._cards_until = time.monotonic() + CARDS_TTL_S
        return self._cards


def _found(row: Sequence[bytes | None] | Exception) -> _Found | None:
    """Return a job as it stands in the store; a key of another type holds none. Raises RedisError: it can't be read."""
    if isinstance(row, Exception):
        if _is_misused(row):
            return None
        raise row
    outcome, signature, *rest = row
    data = rest[0] if rest else None
    if data is None:
        return None
    return _Found(data, outcome or b"", (signature or b"").decode("utf-8", "replace"))


def _is_misused(error: Exception) -> bool:
    """Whether a key has another type than it should: nothing is there, and no waiting for the store changes that."""
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


async def _answer(call: Awaitable[object] | object) -> object:
    """Redis' types leave it open whether a call is awaited."""
    return await call if isinstance(call, Awaitable) else call
