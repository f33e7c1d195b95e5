"""Port: redis. One process's connection to a fleet: sign and enqueue jobs, run scripts, read what the store holds.

Called by task and app (enqueue), results and control. Must never send an unsigned job, believe what the store says
about a signature, or show the store's URL with its password.

A job's path goes on in node_agent/rq_store.py, which claims it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from redis.exceptions import (
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from runner import keyring, sealing, trust
from runner.digests import Digests
from runner.errors import DuplicateJobError, EnqueueError, StoreError
from runner.home import check_safe, locate
from runner.line import Line, packed
from runner.place import Place
from runner.refusals import refusal
from runner.scripts import loader, payload
from runner.scripts.rows import is_plain
from runner.scripts.rows import row as row_of
from runner.signing import MOST_SHARED, Signer
from runner.stencil import Draft
from runner.storelink import close_store, open_store
from runner.wire import codec, record
from runner.wire import spec as specs
from runner.wire.card import NodeCard
from runner.wire.cluster import keys_of
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec
from runner.wire.storeurl import shown_url

__all__ = ["Client", "Entry", "Reply", "connect", "disconnect", "disconnect_all", "shown_url"]

#: What a script replies, strings as bytes.
Reply: TypeAlias = "int | bytes | list[Reply] | None"
Arg: TypeAlias = "bytes | str | int"
Key: TypeAlias = "bytes | str | memoryview[int]"

#: How long RQ keeps ended jobs, in seconds (DESIGN §4).
RESULT_TTL_S: Final = 7 * 86_400
BATCH_JOBS: Final = 200
#: A blocking read stays below the socket's timeout.
_LONGEST_BLOCK_MS: Final = 5000
_CARDS_TTL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    id: str
    fields: Mapping[str, bytes]


class Client:
    """An open connection; safe to use from several threads. Every method raises StoreError if the store fails."""

    def __init__(self, redis_url: str, signer: Signer, fleet_public: str, publics: Sequence[str] = ()) -> None:
        """``publics``: keys whose signed jobs this client can check by itself, its own is always one of them."""
        self.keys = keys_of(redis_url)
        self.signer = signer
        self.publics = (signer.public, *publics)
        self.url = shown_url(redis_url)
        self.fleet_public = fleet_public
        self._redis = open_store(redis_url)
        self._line = Line(self._redis)
        self._head = codec.dump({"rq": self.keys.rq, "rf": self.keys.rf, "ttl": RESULT_TTL_S})[:-1]
        self._fleet_keys = (self.keys.seq(), self.keys.lanes(), self.keys.queues())
        self._cards: tuple[NodeCard, ...] = ()
        self._cards_until = 0.0
        self.digests = Digests()

    def enqueue(self, jobs: Sequence[JobSpec], repeats: Mapping[str, str] | None = None) -> list[int]:
        """Sign and enqueue jobs, each batch of BATCH_JOBS all or none; return their sequence numbers.

        ``repeats``: a job's id → the ended job that it repeats, which is done once.

        Raises:
            DuplicateJobError: a unique name is taken, or somebody repeated that job. EnqueueError: a job is too large.
            StoreError: nothing is known about the batch under way; the same jobs may be sent again, none is enqueued
            twice.
        """
        seqs: list[int] = []
        for start in range(0, len(jobs), BATCH_JOBS):
            seqs += self._enqueue(jobs[start : start + BATCH_JOBS], repeats or {})
        return seqs

    def enqueue_one(self, job: JobSpec | Draft, on_duplicate: str | None = None) -> str:
        """Enqueue a job and return its id; with "return", that of the holder if its unique name is taken.

        Raises EnqueueError (DuplicateJobError is one), StoreError.
        """
        try:
            if isinstance(job, Draft):
                self._enqueue_draft(job)
            else:
                self.enqueue([job])
        except DuplicateJobError as error:
            if on_duplicate != "return" or not error.holder:
                raise
            return error.holder
        return job.id

    def script(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Reply:
        """Run one of our scripts atomically. Raises StoreError."""
        script = loader.load(name)
        with self._asked():
            try:
                return cast("Reply", self._redis.evalsha(script.sha, len(keys), *keys, *args))
            except NoScriptError:
                return cast("Reply", self._redis.eval(script.text, len(keys), *keys, *args))

    def fields(self, key: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return those fields of a hash that exist."""
        with self._asked():
            found = cast("list[bytes | None]", self._redis.hmget(key, list(names)))
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}

    def many_fields(self, keys: Sequence[str], names: Sequence[str]) -> list[dict[str, bytes]]:
        """Return `fields` of several hashes in one round trip."""
        with self._asked(), self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, list(names))
            rows = cast("list[list[bytes | None]]", pipe.execute())
        return [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]

    def job_and_last(self, job_key: str, names: Sequence[str], stream: str) -> tuple[dict[str, bytes], Entry | None]:
        """Return fields of a hash and the newest entry of a stream, in one round trip."""
        with self._asked(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(job_key, list(names))
            pipe.xrevrange(stream, count=1)
            row, entries = cast("tuple[list[bytes | None], object]", pipe.execute())
        found = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        return found, next(iter(_entries(entries)), None)

    def table(self, key: str) -> dict[str, bytes]:
        """Return a whole hash."""
        with self._asked():
            found = cast("dict[bytes, bytes]", self._redis.hgetall(key))
        return {name.decode("utf-8", "replace"): value for name, value in found.items()}

    def hash_names(self, key: str) -> list[str]:
        """Return the names of a hash's fields."""
        with self._asked():
            found = cast("list[bytes]", self._redis.hkeys(key))
        return [name.decode("utf-8", "replace") for name in found]

    def newest_entries(self, key: str, count: int) -> list[Entry]:
        """Return up to ``count`` entries of a stream, the newest first."""
        with self._asked():
            return _entries(self._redis.xrevrange(key, count=count))

    def newest(self, key: str, count: int) -> list[str]:
        """Return the members of a sorted set, highest score first."""
        with self._asked():
            found = cast("list[bytes]", self._redis.zrevrange(key, 0, count - 1))
        return [member.decode("utf-8", "replace") for member in found]

    def scores(self, key: str) -> dict[str, float]:
        """Return a whole sorted set."""
        with self._asked():
            found = cast("list[tuple[bytes, float]]", self._redis.zrange(key, 0, -1, withscores=True))
        return {member.decode("utf-8", "replace"): float(score) for member, score in found}

    def score(self, key: str, member: str) -> float | None:
        """Return one member's score in a sorted set."""
        with self._asked():
            found = self._redis.zscore(key, member)
        return None if found is None else float(found)

    def now_ms(self) -> int:
        """Return the store's clock as Unix milliseconds."""
        with self._asked():
            seconds, micros = self._redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def read(self, after: Mapping[str, str], block_s: float, count: int = 100) -> list[tuple[str, Entry]]:
        """Return (stream, entry) for what follows the given ids, waiting up to ``block_s`` (bounded) for the first."""
        block_ms = min(_LONGEST_BLOCK_MS, max(1, math.ceil(block_s * 1000)))
        with self._asked():
            reply = self._redis.xread(cast("dict[Key, int | Key]", dict(after)), count, block_ms)
        streams = cast("list[tuple[bytes, object]]", reply or [])
        return [(name.decode("utf-8"), entry) for name, entries in streams for entry in _entries(entries)]

    def span(self, key: str, start: str, count: int) -> list[Entry]:
        """Return up to ``count`` entries of a stream from ``start`` (inclusive; "(ID" exclusive) on."""
        with self._asked():
            return _entries(self._redis.xrange(key, start, "+", count))

    def entries_added(self, key: str) -> int:
        """Return how many entries a stream has ever taken, by the store's own count; 0 if there is none."""
        with self._asked():
            try:
                facts = cast("Mapping[str, object]", self._redis.xinfo_stream(key))
            except ResponseError as error:
                if "no such key" in str(error):
                    return 0
                raise
        added = facts.get("entries-added", 0)
        return added if isinstance(added, int) else 0

    def cards(self, *, fresh: bool = False) -> tuple[NodeCard, ...]:
        """Return the published node cards that the fleet key signed and that are in date; at most 5 s old."""
        if fresh or time.monotonic() >= self._cards_until:
            now_ms = time.time_ns() // 1_000_000
            found = [
                trust.read_card(data, self.fleet_public, now_ms) for data in self.table(self.keys.cards()).values()
            ]
            self._cards = tuple(card for card in found if card is not None)
            self._cards_until = time.monotonic() + _CARDS_TTL_S
        return self._cards

    def close(self) -> None:
        """Close all connections; idempotent."""
        close_store(self._redis)

    def _enqueue(self, jobs: Sequence[JobSpec], repeats: Mapping[str, str]) -> list[int]:
        now_ms = time.time_ns() // 1_000_000
        rows = [row_of(job, now_ms) for job in jobs]
        for row in rows:
            if row["id"] in repeats:
                row["again"] = repeats[str(row["id"])]
        envelopes = [self._envelope(job) for job in jobs]
        data = [payload.pack(*pair) for pair in zip(envelopes, self._signed(envelopes), strict=True)]
        per_job = [
            key
            for job, row in zip(jobs, rows, strict=True)
            for key in (self.keys.job(job.id), self.keys.queue(str(row["lane"])), self.keys.active(job.tenant))
        ]
        # Each row by itself: the check of a document's depth is dear for a large one, and theirs is as good.
        doc = b'%b,"jobs":[%b]}' % (self._head, b",".join(map(codec.dump, rows)))
        name = "enqueue_plain" if all(map(is_plain, rows)) else "enqueue"
        return self._placed(name, [job.id for job in jobs], [*self._fleet_keys, *per_job], [doc, *data])

    def _enqueue_draft(self, job: Draft) -> None:
        envelope = self._noted(job.id, job.envelope)
        data = payload.pack(envelope, self.signer.sign(Domain.JOB, envelope))
        keys = [*self._fleet_keys, self.keys.job(job.id), self.keys.queue(job.lane), self.keys.active(job.tenant)]
        self._placed("enqueue_plain", [job.id], keys, [b'%b,"jobs":[%b]}' % (self._head, job.row), data])

    def _placed(self, name: str, ids: Sequence[str], keys: Sequence[str], args: Sequence[bytes]) -> list[int]:
        try:
            reply = self._put(name, keys, args)
        except StoreError as error:
            # Ids are fresh: a duplicate can only be our own batch, sent again after a lost answer.
            told = str(error.__cause__) if isinstance(error.__cause__, ResponseError) else ""
            if "DUPLICATE" in told:
                return [self._seq(job_id) for job_id in ids]
            if (found := refusal(told)) is not None:
                raise found from None
            raise
        return list(cast("list[int]", reply))

    def _put(self, name: str, keys: Sequence[str], args: Sequence[bytes]) -> Reply:
        """Run an enqueue's script on the short way; if that fails, once more as any other script, with its retries."""
        words = [b"EVALSHA", loader.load(name).sha.encode(), b"%d" % len(keys), *map(str.encode, keys), *args]
        with self._told():
            try:
                return cast("Reply", self._line.call(packed(words)))
            except (ConnectionError, TimeoutError, NoScriptError):
                # No answer says nothing about the jobs: the script itself finds those that are there already.
                pass
        return self.script(name, keys, args)

    def _envelope(self, job: JobSpec) -> bytes:
        if job.sealed is not None:
            job = sealing.seal(job, self.cards(), self.signer.key_id)
        try:
            envelope = record.dumps(self.digests.tied(job), bare=True)
        except WireError as error:
            raise EnqueueError(f"the job can't be written: {error}") from None
        return self._noted(job.id, envelope)

    def _noted(self, job_id: str, envelope: bytes) -> bytes:
        """Return what will be signed, if it is not too large."""
        if len(envelope) > specs.MAX_ENVELOPE_BYTES:
            most = f"the limit is {specs.MAX_ENVELOPE_BYTES}: pass paths instead of contents"
            raise EnqueueError(f"the job has {len(envelope)} bytes, {most}")
        # In the order of the jobs: one that waits for an earlier one of its batch is tied to it as well.
        self.digests.note(job_id, envelope)
        return envelope

    def _signed(self, envelopes: Sequence[bytes]) -> list[str]:
        """Sign a batch, few jobs under one signature: each verifies alone, and a node checks a signature once."""
        signed: list[str] = []
        for start in range(0, len(envelopes), MOST_SHARED):
            signed += self.signer.sign_all([(Domain.JOB, each) for each in envelopes[start : start + MOST_SHARED]])
        return signed

    def _seq(self, job_id: str) -> int:
        seq = self.fields(self.keys.job(job_id), ["rf_seq"]).get("rf_seq", b"")
        return int(seq) if seq.isdigit() else 0

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        self._line.rest()
        with self._told():
            yield

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RedisError as error:
            raise StoreError(_failure(self.url, error)) from error


def connect(place: Place) -> Client:
    """Return this process's client for a place; made and checked at the first call.

    Raises:
        ConfigError: no home, client.json or key; the message says what to run. UnsafeFileError.
    """
    # Without the lock while nothing changes: every enqueue asks.
    if _owner[0] == os.getpid() and (known := _clients.get(place)) is not None:
        return known
    with _lock:
        if _owner[0] != os.getpid():
            _clients.clear()
            _owner[0] = os.getpid()
        if place not in _clients:
            _clients[place] = _connected(place)
        return _clients[place]


def disconnect(place: Place) -> None:
    """Close this process's connection to a place, if it has one; the next call opens a new one."""
    with _lock:
        client = _clients.pop(place, None) if _owner[0] == os.getpid() else None
    if client is not None:
        client.close()


def disconnect_all() -> None:
    """Close every connection of this process."""
    for place in tuple(_clients):
        disconnect(place)


_clients: Final[dict[Place, Client]] = {}
_owner: Final[list[int]] = [os.getpid()]
_lock: Final = threading.Lock()


def _connected(place: Place) -> Client:
    home = locate(place.home)
    if home.path.exists():
        check_safe(home)
    config = keyring.load_client(home)
    signer = keyring.load_key(home.path / config.key_file)
    publics: tuple[str, ...] = ()
    if home.trust.exists():
        publics = tuple(key.public for key in trust.load(home.trust).keys if not key.revoked)
    url = place.redis_url or os.environ.get("RINGFENCE_REDIS") or config.redis_url
    return Client(url, signer, config.fleet_pub, publics)


def _entries(reply: object) -> list[Entry]:
    found = cast("list[tuple[bytes, dict[bytes, bytes] | None]]", reply or [])
    return [
        Entry(number.decode("ascii"), {name.decode("utf-8", "replace"): value for name, value in (body or {}).items()})
        for number, body in found
    ]


def _failure(url: str, error: RedisError) -> str:
    """Say what went wrong, and what to do about it."""
    text = f"{type(error).__name__}: {_short(error)}"
    if isinstance(error, NoPermissionError) or "ACL failure" in text or "NOPERM" in text:
        return f"the store's user for {url} may not do this: use one whose role may (docs/stores.md; {text})"
    if isinstance(error, OutOfMemoryError) or "OOM" in text:
        return f"the store at {url} is full and takes no writes: nothing was changed; raise its maxmemory ({text})"
    return f"the store at {url} failed ({text}); is it running?"


def _short(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return shown_url(text)[:200]
