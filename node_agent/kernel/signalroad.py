"""Port: redis. Signals of jobs to jobs of other nodes: the way there and the answer back, over the nodes' bells.

Called by signals. Must never carry out what another node says its job may: that job's own signed words are looked up
here, and judged again by the node that holds the target (attack 3).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.cancelling import end_all
from node_agent.kernel.bell import Bell, Ring
from node_agent.kernel.caller import Caller
from node_agent.kernel.endwatch import fields_of
from node_agent.kernel.errors import CallError
from node_agent.kernel.seals import Seals
from node_agent.kernel.signalpost import Done, Sent
from node_agent.run import now_ms
from runner.wire import codec, ids
from runner.wire.calls import ErrorCode
from runner.wire.errors import CodecError, GrammarError
from runner.wire.keys import Keys
from runner.wire.letters import MAX_LETTER_BYTES
from runner.wire.signals import Answer, Signal
from runner.wire.spec import JobSpec
from runner.wire.states import END_STATES

__all__ = ["Road"]

log = logging.getLogger(__name__)

T = TypeVar("T", Signal, Answer)

#: How long the other node's answer is waited for, in seconds.
ANSWER_S: Final = 2.0
#: A signal older than this, or further ahead, is none any more, in milliseconds.
FRESH_MS: Final = 60_000
#: Signals that came lately: none is carried out twice. Over as many none is taken until some can't be repeated.
_MOST_KNOWN: Final = 16_384
#: Longest state and claim of a job, in bytes.
_MOST_FIELD: Final = 128
#: Most signals from other nodes under way at a time.
_MOST_TASKS: Final = 256


async def _nobody(sender: JobSpec, job: str, sent: Sent) -> Done:
    return Done("refused", "nobody here takes signals")


class Road:
    """One node's way to the jobs of other nodes. ``arrived``: judges and carries out what comes from there."""

    def __init__(self, redis: Redis, keys: Keys, node: str, bell: Bell, seals: Seals) -> None:
        self._redis, self._keys, self._node = redis, keys, node
        self._bell, self._seals = bell, seals
        self.arrived: Callable[[JobSpec, str, Sent], Awaitable[Done]] = _nobody
        #: By id, when it was sent.
        self._known: OrderedDict[str, int] = OrderedDict()
        self._since_ms = now_ms()
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        bell.on("signal", lambda ring: self._spawn(self._take(ring)))
        bell.on("answer", self._answered)

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return a stored job as a trusted key signed it. Raises CallError(UNAVAILABLE)."""
        return await self._seals.known(job, tenant)

    async def send(self, caller: Caller, job: str, sent: Sent) -> Done:
        """Hand a signal to the node that holds the job; return its answer. Raises CallError(UNAVAILABLE)."""
        node, why = await self._holder(job)
        if node is None:
            return Done("refused", why)
        word = Signal(
            id=ids.new_nonce(),
            tenant=caller.tenant,
            signal=sent.name,
            job=job,
            sender=caller.job,
            attempt=caller.run.attempt,
            node=self._node,
            at_ms=sent.at_ms,
            why=sent.why,
        )
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[word.id] = answer
        try:
            await self._bell.ring(node, "signal", *self._seals.seal(word))
            await asyncio.wait([answer], timeout=ANSWER_S)
        finally:
            del self._answers[word.id]
        if not answer.done():
            return Done("queued", f"node {node} has it and has not answered yet")
        found = answer.result()
        if (found.tenant, found.job, found.node) != (caller.tenant, job, node):
            return Done("queued", f"another node than {node} answered")
        return Done(found.outcome, found.reason)

    async def stop(self) -> None:
        """Answer nobody any more. Idempotent."""
        await end_all(self._tasks)

    async def _holder(self, job: str) -> tuple[str | None, str]:
        try:
            async with asyncio.timeout(ANSWER_S):
                state, claim = await fields_of(self._redis, self._keys, job, ("rf_state", "rf_claim"), _MOST_FIELD)
        except (RedisError, TimeoutError, OSError) as error:
            why = f"the store does not answer ({type(error).__name__}); ask again"
            raise CallError(ErrorCode.UNAVAILABLE, why) from None
        shown = (state or b"").decode("utf-8", "replace")
        node = (claim or b"").decode("utf-8", "replace").partition("/")[0]
        if shown in END_STATES:
            return None, f"the job has ended: {shown}"
        try:
            return ids.check_node(node), ""
        except GrammarError:
            return None, f"the job does not run ({shown or 'unknown'}): a kill before its start is an operator's"

    async def _take(self, ring: Ring) -> None:
        word = await self._read(Signal, ring)
        if word is None or not self._fresh(word):
            return
        self._known[word.id] = word.at_ms
        try:
            sender = await self.known(word.sender, word.tenant)
            speaks = sender is not None and await self._seals.speaks(word.node, sender)
        except CallError:
            sender, speaks = None, False
        if sender is None:
            done = Done("refused", "nobody this node trusts signed the sender")
        elif not speaks:
            done = Done("refused", f"node {word.node} may not serve the sender, so it can't speak for it")
        else:
            done = await self.arrived(sender, word.job, Sent(word.signal, f"job {sender.id}", word.at_ms, word.why))
        try:
            answer = Answer(word.id, word.tenant, word.job, done.outcome, self._node, done.reason)
            await self._bell.ring(word.node, "answer", *self._seals.seal(answer))
        except CallError as error:
            log.warning("a signal's answer is lost, the store is away", extra={"error": str(error)})

    def _fresh(self, word: Signal) -> bool:
        """Whether it is of now, of this start of the agent, and new: what is repeated is carried out once."""
        at_ms = now_ms()
        if abs(at_ms - word.at_ms) > FRESH_MS or word.at_ms < self._since_ms or word.id in self._known:
            return False
        while self._known and next(iter(self._known.values())) < at_ms - FRESH_MS:
            self._known.popitem(last=False)
        return len(self._known) < _MOST_KNOWN

    def _answered(self, ring: Ring) -> None:
        if self._answers:
            self._spawn(self._hear(ring))

    async def _hear(self, ring: Ring) -> None:
        answer = await self._read(Answer, ring)
        waiter = self._answers.get(answer.signal) if answer is not None else None
        if answer is not None and waiter is not None and not waiter.done():
            waiter.set_result(answer)

    async def _read(self, kind: type[T], ring: Ring) -> T | None:
        """Return what a node signed that may serve the tenant which the record names."""
        data, signature = ring.get("word", b""), ring.get("sig", b"").decode("ascii", "replace")
        try:
            claimed = codec.load(data, limit_bytes=MAX_LETTER_BYTES)
            tenant = claimed.get("tenant") if isinstance(claimed, dict) else None
            return await self._seals.read(kind, data, signature, str(tenant))
        except (CodecError, CallError):
            return None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if len(self._tasks) >= _MOST_TASKS:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
