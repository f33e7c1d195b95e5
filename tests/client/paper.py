"""A fleet on paper: a home with keys, and nodes that sign without running anything.

Called by the client's tests. Must never be used where a real agent can be: it writes the store as an agent's scripts
do, only as far as readers look.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import redis

from runner import keyring, signing, trust
from runner.app import App
from runner.home import Home
from runner.scripts import payload
from runner.signing import Signer
from runner.wire import codec, ids, record, spec
from runner.wire.card import CARD_TTL_S, NodeCard
from runner.wire.command import Command
from runner.wire.envelope import Domain
from runner.wire.keys import Keys
from runner.wire.receipt import KillDone, Outcome, Receipt
from runner.wire.spec import JobSpec
from runner.wire.states import RQ_STATUS, State
from runner.wire.times import iso
from runner.wire.view import NodeView
from tests.support import scratch
from tests.support.valkey import Valkey

KEYS = Keys()


def as_bytes(reply: object) -> bytes:
    """Return what a client without decoding replied; redis' types leave it open. Nothing counts as empty."""
    assert reply is None or isinstance(reply, bytes)
    return reply or b""


def entries(store: redis.Redis, key: str) -> list[dict[bytes, bytes]]:
    """Return the fields of a stream's entries; redis' types leave them open."""
    found: list[dict[bytes, bytes]] = [fields for _, fields in store.xrange(key)]  # type: ignore[misc, union-attr]  # redis
    return found


def now_ms() -> int:
    """Return Unix milliseconds."""
    return time.time_ns() // 1_000_000


class PaperNode:
    """A node of a fleet: a key, a card, and hands that write."""

    def __init__(self, home: Home, store: redis.Redis, name: str, card: NodeCard | None = None) -> None:
        self.name = name
        self.boot = "b00700000001"
        self.signer = Signer(signing.new_private())
        self._store = store
        fleet = keyring.load_key(home.key("fleet"))
        full = replace(
            card or NodeCard(name, "0" * 64, "A", 0),
            public=self.signer.public,
            not_after_ms=now_ms() + CARD_TTL_S * 1000,
        )
        store.hset(KEYS.cards(), name, trust.pack_card(fleet, full).decode())

    def join(self, *, busy: int = 0, lease_ms: int = 60_000, queues: tuple[str, ...] = ("*",)) -> None:
        """Appear among the live nodes."""
        view = NodeView(self.name, "host", 1, self.boot, "ready", "A", 2, busy, queues, {}, iso(now_ms()), "redis")
        self._store.hset(KEYS.nodes(), self.name, record.dumps(view).decode())
        self._store.zadd(KEYS.leases(), {f"{self.name}/{self.boot}": now_ms() + lease_ms})

    def claim(self, job_id: str, state: str = "running") -> None:
        """Hold a job."""
        job = KEYS.job(job_id)
        lane = self._store.hget(job, "origin")
        self._store.lrem(KEYS.queue(as_bytes(lane).decode()), 0, job_id)
        self._store.hset(
            job,
            mapping={
                "rf_state": state,
                "rf_claim": f"{self.name}/{self.boot}/0",
                "rf_attempt": "1",
                "status": RQ_STATUS[State(state)],
            },
        )

    def finish(self, job_id: str, state: str = "finished", value: object = None, **facts: object) -> Outcome:
        """End a job with a signed outcome and RQ's result entry."""
        data = codec.dump(value) if state == "finished" else None
        plain = {
            "job": job_id,
            "attempt": 1,
            "state": state,
            "node": self.name,
            "boot": self.boot,
            "ended_at_ms": now_ms(),
            "envelope_sha256": self._envelope_sha256(job_id),
            **facts,
        }
        if data is not None:
            plain["result_sha256"] = hashlib.sha256(data).hexdigest()
        outcome = record.decode(Outcome, plain)
        self.store_end(job_id, outcome, data)
        return outcome

    def _envelope_sha256(self, job_id: str) -> str | None:
        data = as_bytes(self._store.hget(KEYS.job(job_id), "data"))
        return hashlib.sha256(payload.parse(data).envelope).hexdigest() if data else None

    def store_end(self, job_id: str, outcome: Outcome, data: bytes | None) -> None:
        """Write an end as the turn script does."""
        body = record.dumps(outcome)
        entry: dict[str, str] = {"type": "1" if data is not None else "2"}
        if data is not None:
            entry["return_value"] = base64.b64encode(data).decode()
        facts = {
            "rf_state": outcome.state,
            "status": RQ_STATUS[State(outcome.state)],
            "rf_outcome": body.decode(),
            "rf_outcome_sig": self.signer.sign(Domain.OUTCOME, body),
        }
        with self._store.pipeline(transaction=True) as pipe:
            pipe.hset(KEYS.job(job_id), mapping=facts)  # type: ignore[arg-type]  # redis' field type is invariant
            pipe.expire(KEYS.job(job_id), 600)
            pipe.xadd(KEYS.results(job_id), entry)  # type: ignore[arg-type]  # as above
            pipe.expire(KEYS.results(job_id), 600)
            pipe.execute()

    def receipt(self, command: str, job_id: str, outcome: str = "killed", **facts: object) -> Receipt:
        """Return a receipt, not yet signed."""
        plain = {
            "job": job_id,
            "command": command,
            "outcome": outcome,
            "state": "killed",
            "requested_at": iso(now_ms()),
            "done_at": iso(now_ms()),
            "nonce": ids.new_nonce(),
            "node": self.name,
            "boot": self.boot,
            "attempt": 1,
            **facts,
        }
        return record.decode(Receipt, plain)

    def reply(self, receipt: Receipt, command: str | None = None) -> None:
        """Sign and send a receipt, to its own command unless another is named."""
        body, signature = signing.signed_receipt(self.signer, receipt)
        self.send(command or receipt.command, {"receipt": body, "sig": signature})

    def done(self, command: str, count: int) -> None:
        """Say the last word on a selector kill."""
        body = record.dumps(KillDone(command, self.name, self.boot, count))
        self.send(command, {"done": body, "sig": self.signer.sign(Domain.RECEIPT, body)})

    def send(self, command: str, fields: dict[str, bytes | str]) -> None:
        """Write one reply entry as it is."""
        self._store.xadd(KEYS.replies(command), fields)  # type: ignore[arg-type]  # redis' field type is invariant
        self._store.expire(KEYS.replies(command), 600)


class Fleet:
    """A home, a store, an app."""

    def __init__(self, path: Path, store: redis.Redis, url: str) -> None:
        self.home = Home(path / "home")
        keyring.init(self.home, url)
        self.store = store
        self.app = App(home=self.home.path)

    def node(self, name: str, card: NodeCard | None = None) -> PaperNode:
        """Return a new node with a card of this fleet."""
        return PaperNode(self.home, self.store, name, card)

    def envelope(self, job_id: str) -> tuple[JobSpec, payload.JobData]:
        """Return what was enqueued: the decoded job, and the bytes and signature it came from."""
        data = payload.parse(as_bytes(self.store.hget(KEYS.job(job_id), "data")))
        return spec.decode(data.envelope), data

    def commands(self, node: str | None) -> list[Command]:
        """Return the commands that a node's stream, or that of all, holds."""
        return [record.loads(Command, entry[b"command"]) for entry in entries(self.store, KEYS.control(node))]


@contextmanager
def on_paper(valkey: Valkey) -> Iterator[Fleet]:
    """Yield a home with keys, an app and this store."""
    with scratch.folder() as folder:
        store = valkey.client()
        made = Fleet(folder, store, valkey.url)
        yield made
        made.app.close()
        store.close()
