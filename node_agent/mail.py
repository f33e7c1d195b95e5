"""Port: redis. What a node writes besides turns: output, events, answers to commands; in order, on one connection.

Called by the supervisor and control. Must never block the loop, lose an entry while the agent lives, or hold more than
the captures' own bounds: while the store is away entries wait here and are sent again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.output import Chunk
from node_agent.records import Notary, Signed
from node_agent.run import KillOrder, Proof, Run
from runner.wire import record
from runner.wire.envelope import Domain
from runner.wire.keys import Keys
from runner.wire.receipt import KillDone, Receipt

__all__ = ["Mail"]

log = logging.getLogger(__name__)

EVENTS_MAX: Final = 100_000
EVENTS_TTL_S: Final = 30 * 86_400
REPLY_TTL_S: Final = 3600
BACKOFF_S: Final = (0.05, 2.0)
_BATCH: Final = 256

Entry = tuple[str, dict[str, bytes | str | int], int, int | None]


class Mail:
    """One ordered outbox. ``run`` sends; the other methods only queue."""

    def __init__(self, client: Redis, keys: Keys, notary: Notary, *, log_ttl_s: int) -> None:
        self._client = client
        self._keys = keys
        self._notary = notary
        self._log_ttl_s = log_ttl_s
        self._out: list[Entry] = []
        self._stirred = asyncio.Event()
        self._sent = 0
        self._queued = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def log(self, job_id: str, chunks: Sequence[Chunk]) -> None:
        """Store output in order; returns when it is stored, waits while the store is away."""
        key = self._keys.log(job_id)
        for chunk in chunks:
            fields: dict[str, bytes | str | int] = {"f": chunk.fd, "o": chunk.offset, "d": chunk.data}
            if chunk.skipped:
                fields["skipped"] = chunk.skipped
            self._put((key, fields, self._log_ttl_s, None))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._queued, done))
        await done

    def emit(self, tenant: str | None, event: Signed) -> None:
        """Store a signed event soon: of a tenant's job, or (None) of the node."""
        fields: dict[str, bytes | str | int] = {"event": event.payload, "sig": event.signature}
        self._put((self._keys.events(tenant), fields, EVENTS_TTL_S, EVENTS_MAX))

    def receipt(self, receipt: Receipt) -> None:
        """Answer the receipt's own command; a local kill has none."""
        if receipt.command:
            payload = record.dumps(dataclasses.replace(receipt, signature=""))
            fields: dict[str, bytes | str | int] = {"receipt": payload, "sig": receipt.signature}
            self._put((self._keys.replies(receipt.command), fields, REPLY_TTL_S, None))

    def done(self, command_id: str, count: int) -> None:
        """Say that this node has carried out a selector's command for ``count`` jobs."""
        notary = self._notary
        payload = record.dumps(KillDone(command_id, notary.node, notary.boot, count))
        fields: dict[str, bytes | str | int] = {"done": payload, "sig": notary.signer.sign(Domain.RECEIPT, payload)}
        self._put((self._keys.replies(command_id), fields, REPLY_TTL_S, None))

    def answer(self, run: Run, order: KillOrder, proof: Proof) -> None:
        """Send the receipt of ``order`` once the store has acknowledged the end (at once if the kill is unproved)."""
        task = asyncio.get_running_loop().create_task(self._answer(run, order, proof))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Send until cancelled."""
        wait_s = BACKOFF_S[0]
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            while self._out:
                batch = self._out[:_BATCH]
                try:
                    await self._send(batch)
                except RedisError as error:
                    log.warning(
                        "entries wait, the store is away", extra={"error": str(error), "entries": len(self._out)}
                    )
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, BACKOFF_S[1])
                    continue
                wait_s = BACKOFF_S[0]
                del self._out[: len(batch)]
                self._sent += len(batch)
                self._release()

    async def flush(self, timeout_s: float) -> None:
        """Wait until what is queued now was sent, at most ``timeout_s``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._queued, done))
        self._release()
        await asyncio.wait([done], timeout=timeout_s)

    async def _answer(self, run: Run, order: KillOrder, proof: Proof) -> None:
        if proof.verdict is None or proof.verdict.proved:
            await run.acknowledged
        self.receipt(self._notary.receipt(run, order, proof))

    async def _send(self, batch: Sequence[Entry]) -> None:
        pipe = self._client.pipeline(transaction=False)
        lives: dict[str, int] = {}
        for key, fields, ttl_s, maxlen in batch:
            pipe.xadd(key, fields, maxlen=maxlen, approximate=maxlen is not None)  # type: ignore[arg-type]  # redis' own field type is invariant
            lives[key] = ttl_s
        for key, ttl_s in lives.items():
            pipe.expire(key, ttl_s)
        await pipe.execute()

    def _put(self, entry: Entry) -> None:
        self._out.append(entry)
        self._queued += 1
        self._stirred.set()

    def _release(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._sent:
            _, done = self._waiters.pop(0)
            if not done.done():
                done.set_result(None)
