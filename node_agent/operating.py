"""Port: redis. What an operator orders of this node: drain and undrain it, suspend and unsuspend a queue.

Called by control (orders) and the session (what stands at the start). Must never say that nothing more starts here
while a claim may still be on its way, and never forget over a restart that it is drained.

A drained node has the file ``drained`` in its home: it stays drained through restarts until it is undrained, whatever
the store says. Suspended queues stand in ``rf:suspended`` with the signed order; an entry that no key with the right
``operate`` signed counts for nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.cancelling import end_all
from node_agent.dispatch import Dispatcher
from node_agent.errors import StoreAwayError
from node_agent.lanes import Lanes
from node_agent.mail import Mail
from node_agent.records import Notary
from node_agent.run import Run, now_ms
from node_agent.runs import Runs
from node_agent.sequences import Sequences
from runner import signing
from runner.wire import ids, record
from runner.wire.card import TrustedKey
from runner.wire.command import MAX_COMMAND_BYTES, Command
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.keys import Keys
from runner.wire.receipt import NodeReceipt
from runner.wire.times import iso

__all__ = ["Operator"]

log = logging.getLogger(__name__)

#: How often a turn under way, and the end of the last job, are looked for, in seconds.
_LOOK_S: Final = 0.01
#: Who signed these bytes, if that key may order this here.
Judge = Callable[[Command, bytes, str], TrustedKey | None]


class Operator:
    """Carries out operators' orders for one boot. ``mark``: the file that says this node is drained."""

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        mark: Path,
        lanes: Lanes,
        dispatcher: Dispatcher,
        crew: Runs,
        notary: Notary,
        mail: Mail,
        sequences: Sequences,
        judge: Judge,
    ) -> None:
        self._client = client
        self._keys = keys
        self._mark = mark
        self._lanes = lanes
        self._dispatcher = dispatcher
        self._crew = crew
        self._notary = notary
        self._mail = mail
        self._sequences = sequences
        self._judge = judge
        self._watch: asyncio.Task[None] | None = None
        #: Nothing is claimed.
        self.draining = mark.exists()

    @property
    def state(self) -> str:
        """``draining`` while something runs, ``drained`` then, and empty when neither."""
        if not self.draining:
            return ""
        return "draining" if self._crew.runs() else "drained"

    async def learn(self) -> None:
        """Read which queues are suspended. Raises StoreAwayError."""
        try:
            # redis-py's stubs name the answer of both its clients.
            found = await cast("Awaitable[dict[bytes, bytes]]", self._client.hgetall(self._keys.suspended()))
        except RedisError as error:
            raise StoreAwayError(str(error)) from error
        names = {name.decode("utf-8", "replace"): word for name, word in found.items()}
        self._lanes.suspended = frozenset(name for name, word in names.items() if self._stands(name, word))

    async def carry_out(self, command: Command, key: TrustedKey) -> None:
        """Carry out a verified order and answer it. Raises StoreAwayError: then it comes again."""
        refusal = self._refusal(command, key)
        if refusal:
            self._answer(command, "refused", reason=refusal)
            return
        known = self._sequences.take(key.id, command, now_ms())
        if known == "old":
            why = "a later order of this key came first, or its clock is wrong: look, and order again"
            self._answer(command, "refused", reason=why)
        elif command.op in ("suspend", "unsuspend"):
            await self._learn_now()
            self._answer(command, "done")
        elif command.op == "undrain":
            self._undrain(command, act=known == "new")
        else:
            await self._drain(command, act=known == "new")

    async def close(self) -> None:
        """Look after no drain any more. Idempotent."""
        if self._watch is not None:
            await end_all((self._watch,))

    def _refusal(self, command: Command, key: TrustedKey) -> str:
        if "*" not in key.tenants:
            return "this key is for some tenants alone; it takes one with `operate` for all to stop what all share"
        if command.op in ("suspend", "unsuspend") and not {"*", command.selector.value} & set(key.queues):
            return f"this key may not operate queue {command.selector.value}"
        if command.op in ("drain", "undrain") and command.selector.value != self._notary.node:
            return f"this is node {self._notary.node}"
        return ""

    def _stands(self, queue: str, word: bytes) -> bool:
        signature, _, payload = word.partition(b" ")
        try:
            command = record.loads(Command, payload, limit_bytes=MAX_COMMAND_BYTES)
        except WireError:
            return False
        key = self._judge(command, payload, signature.decode("ascii", "replace"))
        named = command.op == "suspend" and command.selector.value == queue
        stands = key is not None and named and not self._refusal(command, key)
        if not stands:
            log.warning("a queue is suspended by nobody who may, this is ignored", extra={"queue": queue})
        return stands

    async def _learn_now(self) -> None:
        before = self._lanes.suspended
        await self.learn()
        await self._settled()
        if before - self._lanes.suspended:
            self._dispatcher.wake()

    async def _settled(self) -> None:
        """Wait until no turn is under way that was sent before: what it claimed is known then."""
        while self._dispatcher.turning:
            await asyncio.sleep(_LOOK_S)

    async def _drain(self, command: Command, *, act: bool) -> None:
        back: list[Run] = []
        if act:
            try:
                self._mark.write_text(f"{command.id} {command.by}\n")
            except OSError as error:
                why = f"this node can't write {self._mark} ({error.strerror}), and would forget it: free its disk"
                self._answer(command, "refused", reason=why)
                return
            self.draining = True
            await self._settled()
            back = [run for run in self._crew.runs() if run.started_at_ms is None and not run.stopping]
            for run in back:
                run.stop("drain")
            if back:
                await asyncio.wait([run.acknowledged for run in back])
            self._tell(EventType.NODE_DRAINING, command)
        if not self.draining:
            self._answer(command, "refused", reason="it was undrained since")
            return
        self._answer(command, "done", handed_back=len(back))
        await self.close()
        self._watch = asyncio.get_running_loop().create_task(self._until_drained(command))

    def _undrain(self, command: Command, *, act: bool) -> None:
        if act:
            self._mark.unlink(missing_ok=True)
            if self._watch is not None:
                self._watch.cancel()
            if self.draining:
                self.draining = False
                self._tell(EventType.NODE_UNDRAINED, command)
                self._dispatcher.wake()
        self._answer(command, "done")

    async def _until_drained(self, command: Command) -> None:
        """Answer again when nothing runs any more; with ``force``, see to it that this comes."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + command.grace_s if command.force else float("inf")
        while runs := self._crew.runs():
            if loop.time() >= due_s:
                self._end(runs, command.checkpoint_s)
            await asyncio.sleep(_LOOK_S)
        self._tell(EventType.NODE_DRAINED, command)
        self._answer(command, "done")

    def _end(self, runs: Sequence[Run], checkpoint_s: float) -> None:
        for run in runs:
            if not run.stopping:
                run.give_up("drain", checkpoint_s)

    def _tell(self, kind: EventType, command: Command) -> None:
        detail: dict[str, str | int | float | bool] = {"by": command.by, "reason": command.reason}
        self._mail.emit(None, self._notary.event(kind, detail=detail))

    def _answer(
        self, command: Command, outcome: Literal["done", "refused"], *, handed_back: int = 0, reason: str = ""
    ) -> None:
        notary = self._notary
        receipt = NodeReceipt(
            command=command.id,
            op=cast("Literal['drain', 'undrain', 'suspend', 'unsuspend']", command.op),
            outcome=outcome,
            state=self.state or "ready",
            done_at=iso(now_ms()),
            nonce=ids.new_nonce(),
            node=notary.node,
            boot=notary.boot,
            busy=len(self._crew.runs()),
            handed_back=handed_back,
            reason=reason or command.reason,
            by=command.by,
        )
        _, signature = signing.signed_receipt(notary.signer, receipt)
        self._mail.operated(dataclasses.replace(receipt, signer=notary.signer.key_id, signature=signature))
