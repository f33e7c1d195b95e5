"""Port: redis. What a node writes besides turns: output, events, answers to commands; in order, on one connection.

Called by the supervisor and control. Must never block the loop, lose an entry while the agent lives, or hold more than
the captures' own bounds: while the store is away entries wait here and are sent again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.cancelling import end_all
from node_agent.errors import StoreAwayError
from node_agent.output import Chunk
from node_agent.records import Notary, Signed
from node_agent.rq_store import Store
from node_agent.run import KillOrder, Run
from node_agent.spread import spread
from node_agent.turns import Claim
from runner.wire import record
from runner.wire.envelope import Domain
from runner.wire.keys import Keys
from runner.wire.receipt import KillDone, NodeReceipt, PauseReceipt, Receipt

__all__ = ["Mail"]

log = logging.getLogger(__name__)

EVENTS_MAX: Final = 100_000
EVENTS_TTL_S: Final = 30 * 86_400
#: Of what a job itself can cause: its own stream holds little, and none is kept while the store is away for long.
JOB_EVENTS_MAX: Final = 1000
JOB_EVENTS_TTL_S: Final = 7 * 86_400
_MOST_WAITING: Final = 10_000
REPLY_TTL_S: Final = 3600
BACKOFF_S: Final = (0.05, 2.0)
_BATCH: Final = 256
#: As start.lua has them.
_UNFIT: Final = ("WRONGTYPE", "last possible ID", "equal or smaller than the target stream")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a stream."""

    key: str
    fields: dict[str, bytes | str | int]
    ttl_s: int
    maxlen: int | None = None


@dataclass(frozen=True, slots=True)
class _Output:
    """Output of one attempt."""

    claim: Claim
    chunks: tuple[Chunk, ...]


class Mail:
    """One ordered outbox. ``run`` sends; the other methods only queue. ``store`` must use the same connection."""

    def __init__(self, client: Redis, keys: Keys, store: Store, notary: Notary) -> None:
        self._client = client
        self._keys = keys
        self._store = store
        self._notary = notary
        self._out: list[_Entry | _Output] = []
        self._stirred = asyncio.Event()
        self._sent = 0
        self._queued = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def log(self, claim: Claim, chunks: Sequence[Chunk]) -> None:
        """Store output in order; returns when it is stored, or void; waits while the store is away."""
        self._put(_Output(claim, tuple(chunks)))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._queued, done))
        await done

    def emit(self, tenant: str | None, event: Signed) -> None:
        """Store a signed event soon: of a tenant's job, or (None) of the node."""
        fields: dict[str, bytes | str | int] = {"event": event.payload, "sig": event.signature}
        self._put(_Entry(self._keys.events(tenant), fields, EVENTS_TTL_S, EVENTS_MAX))

    def job_event(self, job: str, event: Signed) -> bool:
        """Store a signed event that ``job`` itself has caused soon; False if too much waits already."""
        if len(self._out) >= _MOST_WAITING:
            return False
        fields: dict[str, bytes | str | int] = {"event": event.payload, "sig": event.signature}
        self._put(_Entry(self._keys.job_events(job), fields, JOB_EVENTS_TTL_S, JOB_EVENTS_MAX))
        return True

    def receipt(self, receipt: Receipt) -> None:
        """Answer the receipt's own command; a local kill has none."""
        if receipt.command:
            payload = record.dumps(dataclasses.replace(receipt, signature=""))
            fields: dict[str, bytes | str | int] = {"receipt": payload, "sig": receipt.signature}
            self._put(_Entry(self._keys.replies(receipt.command), fields, REPLY_TTL_S))

    def paused(self, receipt: PauseReceipt) -> None:
        """Answer the command of a pause or resume; the node's own has none."""
        if receipt.command:
            payload = record.dumps(dataclasses.replace(receipt, signature=""))
            fields: dict[str, bytes | str | int] = {"paused": payload, "sig": receipt.signature}
            self._put(_Entry(self._keys.replies(receipt.command), fields, REPLY_TTL_S))

    def operated(self, receipt: NodeReceipt) -> None:
        """Answer an operator's order."""
        payload = record.dumps(dataclasses.replace(receipt, signature=""))
        fields: dict[str, bytes | str | int] = {"operated": payload, "sig": receipt.signature}
        self._put(_Entry(self._keys.replies(receipt.command), fields, REPLY_TTL_S))

    def done(self, command_id: str, count: int) -> None:
        """Say that this node has carried out a selector's command for ``count`` jobs."""
        notary = self._notary
        payload = record.dumps(KillDone(command_id, notary.node, notary.boot, count))
        fields: dict[str, bytes | str | int] = {"done": payload, "sig": notary.signer.sign(Domain.RECEIPT, payload)}
        self._put(_Entry(self._keys.replies(command_id), fields, REPLY_TTL_S))

    def answer(self, run: Run, order: KillOrder) -> None:
        """Send the receipt of ``order`` once the store has acknowledged the end (at once if the kill is unproved)."""
        task = asyncio.get_running_loop().create_task(self._answer(run, order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Send until cancelled."""
        wait_s = BACKOFF_S[0]
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._out:
                try:
                    sent = await self._send_next()
                except (RedisError, StoreAwayError) as error:
                    log.warning(
                        "entries wait, the store is away", extra={"error": str(error), "entries": len(self._out)}
                    )
                    await asyncio.sleep(spread(wait_s))
                    wait_s = min(2 * wait_s, BACKOFF_S[1])
                    continue
                wait_s = BACKOFF_S[0]
                del self._out[:sent]
                self._sent += sent
                self._release()

    async def close(self) -> None:
        """Give up what is under way; only when the boot is over. Idempotent."""
        await end_all(self._tasks)

    async def flush(self, timeout_s: float) -> None:
        """Wait until what is queued now was sent, at most ``timeout_s``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._queued, done))
        self._release()
        await asyncio.wait([done], timeout=timeout_s)

    async def _answer(self, run: Run, order: KillOrder) -> None:
        self.receipt(self._notary.receipt(run, order, await run.answerable()))

    async def _send_next(self) -> int:
        """Send the output at the head of the box, or the entries up to the next output; return how many were sent."""
        first = self._out[0]
        if isinstance(first, _Output):
            await self._store.log(first.claim, first.chunks)
            return 1
        batch: list[_Entry] = []
        for entry in self._out[:_BATCH]:
            if isinstance(entry, _Output):
                break
            batch.append(entry)
        refused = await self._add(batch)
        if refused:
            # One job's or tenant's key that can't take an entry must not hold up what is for all the others.
            await self._client.delete(*{entry.key for entry, _ in refused})
            for _, error in await self._add([entry for entry, _ in refused]):
                raise error
        return len(batch)

    async def _add(self, batch: Sequence[_Entry]) -> list[tuple[_Entry, ResponseError]]:
        """Add entries to their streams; return those whose key is no stream, or one without ids left."""
        pipe = self._client.pipeline(transaction=False)
        for entry in batch:
            pipe.xadd(entry.key, entry.fields, maxlen=entry.maxlen, approximate=entry.maxlen is not None)  # type: ignore[arg-type]  # redis' own field type is invariant
        for key, ttl_s in {entry.key: entry.ttl_s for entry in batch}.items():
            pipe.expire(key, ttl_s)
        answers = await pipe.execute(raise_on_error=False)
        refused = []
        for entry, answer in zip(batch, answers, strict=False):
            if isinstance(answer, ResponseError) and any(word in str(answer) for word in _UNFIT):
                refused.append((entry, answer))
            elif isinstance(answer, Exception):
                raise answer
        return refused

    def _put(self, entry: _Entry | _Output) -> None:
        self._out.append(entry)
        self._queued += 1
        self._stirred.set()

    def _release(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._sent:
            _, done = self._waiters.pop(0)
            if not done.done():
                done.set_result(None)
