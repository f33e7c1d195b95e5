"""Port: redis. Commands from the store: read durably, checked, carried out, answered, acknowledged.

Called by the agent, one loop per boot on its own connection, so that nothing else can delay a kill. Must never act on a
command whose signature, audience or expiry fails, and never acknowledge one before its answers are sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.admission import Rules
from node_agent.cancelling import end_all
from node_agent.deciding import Decider
from node_agent.endings import order_of
from node_agent.errors import StoreAwayError
from node_agent.kernel.family import NOTICE
from node_agent.lanes import Lanes
from node_agent.mail import Mail
from node_agent.operating import Operator
from node_agent.pausing import Holder, Order, Pauser, still_all
from node_agent.records import Notary
from node_agent.rq_store import Store
from node_agent.run import KillOrder, Run, now_ms
from node_agent.sequences import Sequences
from node_agent.spread import spread
from node_agent.supervisor import Supervisor
from runner import signing
from runner.scripts import loader
from runner.wire import ids, record
from runner.wire.card import TrustedKey
from runner.wire.command import MAX_COMMAND_BYTES, OPERATES, Command
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.keys import Keys
from runner.wire.receipt import PauseReceipt
from runner.wire.states import END_STATES

__all__ = ["Control", "judge"]

log = logging.getLogger(__name__)

_BLOCK_MS: Final = 2000
_COUNT: Final = 32
#: Who may stop a job may also make it stand still, and let it go on.
_RIGHTS: Final = {
    "kill": {"kill"},
    "pause": {"kill", "operate"},
    "resume": {"kill", "operate"},
    "signal": {"kill", "operate"},
    "approve": {"operate"},
    "deny": {"operate"},
    **{op: {"operate"} for op in OPERATES},
}
BACKOFF_S: Final = (0.05, 2.0)
#: How often the streams of commands are looked after, in seconds, and how far ahead an id may lie, in milliseconds.
MEND_S: Final = 2.0
_AHEAD_MS: Final = 3_600_000
#: How long a command waits for a claim that the store shows but the turn's answer has not brought yet, in seconds.
_CLAIM_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Entry:
    stream: str
    id: str
    fields: dict[bytes, bytes]


class Control:
    """The control loop of one boot."""

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        store: Store,
        lanes: Lanes,
        supervisor: Supervisor,
        mail: Mail,
        notary: Notary,
        rules: Rules,
        sequences: Sequences,
        decider: Decider,
        operator: Operator,
    ) -> None:
        self._client = client
        self._keys = keys
        self._store = store
        self._lanes = lanes
        self._supervisor = supervisor
        self._mail = mail
        self._notary = notary
        self._rules = rules
        self._sequences = sequences
        self._pauser = Pauser(notary, mail)
        self._decider = decider
        self._operator = operator
        #: Carries out a signal for one attempt; without ``act`` it only says that this was done before.
        self.signalled: Callable[[Run, Command, bool], Awaitable[PauseReceipt]] = self._no_signals
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[tuple[str, str]] = set()
        self._again = True
        self._mender = client.register_script(loader.load("mend").text)
        self._mended_s = 0.0

    async def run(self) -> None:
        """Serve until cancelled: what was left unacknowledged, by an earlier boot too, first; then what comes."""
        wait_s = BACKOFF_S[0]
        while True:
            try:
                if self._again:
                    await self._join()
                    await self._operator.learn()
                    self._again = False
                    await self._serve_left()
                for entry in await self._read(dict.fromkeys(self._streams(), ">")):
                    self._serve(entry)
                await self._mend()
                wait_s = BACKOFF_S[0]
            except (RedisError, StoreAwayError) as error:
                log.warning("control waits, the store is away", extra={"error": str(error)})
                self._again = True
                await asyncio.sleep(spread(wait_s))
                wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _serve_left(self) -> None:
        """Serve every entry that was read and never acknowledged, and that is not under way: a grace may be long."""
        after = dict.fromkeys(self._streams(), "0")
        while entries := await self._read(after):
            for entry in entries:
                after[entry.stream] = entry.id
                self._serve(entry)

    async def close(self) -> None:
        """Give up what is under way; only when the boot is over. Idempotent."""
        await end_all(self._tasks)

    async def _join(self) -> None:
        for stream in self._streams():
            try:
                await self._client.xgroup_create(stream, self._notary.node, id="0", mkstream=True)
            except ResponseError as error:
                if "WRONGTYPE" in str(error):
                    # Else no kill would be heard on either stream; those that it held stand as tombstones and cutoffs.
                    await self._client.delete(stream)
                    await self._client.xgroup_create(stream, self._notary.node, id="0", mkstream=True)
                elif "BUSYGROUP" not in str(error):
                    raise

    async def _mend(self) -> None:
        """See to it that commands can still be added to both streams."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._mended_s + MEND_S:
            return
        self._mended_s = now_s
        words = json.dumps({"rq": self._keys.rq, "rf": self._keys.rf, "ahead": _AHEAD_MS})
        for stream in self._streams():
            if await self._mender(keys=[stream], args=[words]) != -1:
                log.warning("a stream of commands was spoilt, and made anew", extra={"stream": stream})
                self._again = True

    def _streams(self) -> tuple[str, str]:
        return self._keys.control(self._notary.node), self._keys.control()

    async def _read(self, after: dict[str, str]) -> list[_Entry]:
        node = self._notary.node
        found = await self._client.xreadgroup(
            node,
            node,
            dict(after),  # type: ignore[arg-type]  # redis' own key type is invariant
            count=_COUNT,
            block=_BLOCK_MS,
        )
        # redis-py's types name every protocol's form; with the default one it is a list of (stream, entries).
        rows = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes] | None]]]]", found or [])
        return [
            _Entry(stream.decode(), entry_id.decode(), fields or {})
            for stream, items in rows
            for entry_id, fields in items
        ]

    def _serve(self, entry: _Entry) -> None:
        if (entry.stream, entry.id) in self._under_way:
            return
        self._under_way.add((entry.stream, entry.id))
        task = asyncio.get_running_loop().create_task(self._carry_out(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, entry: _Entry) -> None:
        try:
            if entry.fields:
                await self._obey(entry.fields)
            await self._client.xack(entry.stream, self._notary.node, entry.id)
        except (RedisError, StoreAwayError) as error:
            log.warning("command not acknowledged, it comes again", extra={"entry": entry.id, "error": str(error)})
            await asyncio.sleep(BACKOFF_S[0])
            self._again = True
        finally:
            self._under_way.discard((entry.stream, entry.id))

    async def _obey(self, fields: dict[bytes, bytes]) -> None:
        payload, signature = fields.get(b"command", b""), fields.get(b"sig", b"").decode("ascii", "replace")
        job = fields.get(b"job", b"").decode("ascii", "replace")
        why = fields.get(b"why")
        named = why in {b"held", b"removed"}
        if why == NOTICE:
            if self._supervisor.family is not None:
                await self._supervisor.family.hear(job)
            return
        try:
            command = record.loads(Command, payload, limit_bytes=MAX_COMMAND_BYTES)
        except WireError as error:
            log.warning("unreadable command", extra={"error": str(error)})
            return
        key = judge(command, payload, signature, self._rules, now_ms(), expires=not named or command.op != "kill")
        # The signed word says what is to be done; where the entry stands must agree with it.
        if key is None or (command.op == "kill") == (why == b"pause"):
            log.warning("command refused", extra={"command": command.id, "job": job})
        elif command.op in OPERATES:
            await self._operator.carry_out(command, key)
        elif command.op in ("approve", "deny"):
            await self._decide(command, key)
        elif command.op != "kill":
            await self._hold(command, key)
        elif not named:
            await self._cut(command, key)
        elif command.selector.kind == "job" and command.selector.value == job and _covers(key, ids.tenant_of(job)):
            await self._kill(command, job, removed=why == b"removed")

    async def _decide(self, command: Command, key: TrustedKey) -> None:
        job = command.selector.value
        if _covers(key, ids.tenant_of(job)):
            await self._decider.decide(command, key.id, self._supervisor.find(job) or await self._arriving(job))

    async def _hold(self, command: Command, key: TrustedKey) -> None:
        """Pause, resume or signal what runs here and is hit; answer for each, and a selector with the count."""
        await self._supervisor.end_idle()
        op = command.op
        one = command.selector.value if command.selector.kind == "job" else None
        if one is not None:
            if not _covers(key, ids.tenant_of(one)):
                return
            run = self._supervisor.find(one) or await self._arriving(one)
            hit = [] if run is None else [run]
        else:
            hit = [run for run in self._supervisor.runs() if _aims_at(command, key, run)]
        known = self._sequences.take(key.id, command, now_ms())
        if known == "old":
            log.warning("order came after a later one", extra={"command": command.id})
            for job in [run.job_id for run in hit] or ([one] if one is not None else []):
                reason = "a later order of this key came first, or its clock is wrong: look, and order again"
                self._mail.paused(
                    self._notary.pause_receipt(job, command.id, op, "refused", reason=reason, by=command.by)
                )
        elif one is not None and not hit:
            state, attempt = await self._store.state_of(one)
            outcome = "already_ended" if state in END_STATES else "unknown" if state is None else "not_running"
            answer = self._notary.pause_receipt(
                one, command.id, op, outcome, state=state or "", attempt=attempt, by=command.by
            )
            self._mail.paused(answer)
        else:
            act = known == "new"
            for receipt in await asyncio.gather(*(self._held(run, command, key, act) for run in hit)):
                self._mail.paused(receipt)
        if one is None:
            self._mail.done(command.id, len(hit))

    async def _held(self, run: Run, command: Command, key: TrustedKey, act: bool) -> PauseReceipt:
        if command.op == "signal":
            return await self.signalled(run, command, act)
        op: Literal["pause", "resume"] = "pause" if command.op == "pause" else "resume"
        holder: Holder = "operator" if "operate" in key.may else "owner"
        return await self._pauser.carry_out(run, Order(op, holder, command.id, command.reason, command.by), act=act)

    async def _no_signals(self, run: Run, command: Command, act: bool) -> PauseReceipt:
        why = "this node takes no signals"
        return self._notary.pause_receipt(run.job_id, command.id, "signal", "refused", attempt=run.attempt, reason=why)

    async def _kill(self, command: Command, job: str, *, removed: bool) -> None:
        order = _order(command)
        await self._supervisor.end_idle()
        if removed:
            for dead in await self._store.sweep(jobs=[job], serves=await self._served()):
                self._supervisor.bury(dead)
            return
        run = self._supervisor.find(job) or await self._arriving(job)
        if run is None:
            state, attempt = await self._store.state_of(job)
            outcome = "already_ended" if state in END_STATES else "unknown"
            self._mail.receipt(self._notary.answer(job, order, outcome, state or "", attempt))
            return
        await self._end((run,), order)

    async def _cut(self, command: Command, key: TrustedKey) -> None:
        """Kill what runs here and is hit by the cutoff; take what waits and is hit; answer with the count."""
        await self._supervisor.end_idle()
        # Those below a killed job are known before its end lets its family kill them, too: each has its receipt here.
        hit = [
            run for run in self._supervisor.runs() if command.selector.kind == "job" and self._hits(run, command, key)
        ]
        await self._store.read_cutoffs({run.spec.tenant for run in self._supervisor.runs() if run.spec is not None})
        hit += [run for run in self._supervisor.runs() if run not in hit and self._hits(run, command, key)]
        ending = asyncio.gather(self._end(hit, _order(command)))
        # By job: one that was given back to its lane while it was hit is swept there again, and has one receipt.
        jobs = {run.job_id for run in hit}
        while True:
            served = await self._served()
            buried = await self._store.sweep(lanes=served, serves=served)
            for dead in buried:
                self._supervisor.bury(dead)
            # A sweep also takes what other kills took out of a lane: those are answered under their own orders.
            jobs.update(dead.claim.job for dead in buried if order_of(dead.word).command == command.id)
            if not buried and self._store.swept:
                break
        await ending
        self._mail.done(command.id, len(jobs))

    async def _served(self) -> tuple[str, ...]:
        """Every lane whose jobs this node may sign for, those that came up just now included."""
        return tuple(lane for lane in await self._store.lanes() if self._lanes.serves(lane))

    def _hits(self, run: Run, command: Command, key: TrustedKey) -> bool:
        if not _aims_at(command, key, run):
            return False
        if command.selector.kind == "job":
            # A job above this one was killed: nothing of it was enqueued after that (child.lua).
            return True
        return self._store.cutoff_for(run.job_id, run.seq, (command.selector.field,)) is not None

    async def _end(self, runs: Iterable[Run], order: KillOrder) -> None:
        """Kill and answer each; returns when every answer is on its way."""
        chosen = list(runs)
        if not order.grace_s or order.force:
            await still_all(chosen)
        for run in chosen:
            run.kill(order)
        for run in chosen:
            self._mail.receipt(self._notary.receipt(run, order, await run.answerable()))

    async def _arriving(self, job: str) -> Run | None:
        """A claim that the store shows for this boot may still be in a turn's answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLAIM_WAIT_S
        while loop.time() < deadline and await self._store.holds(job):
            await asyncio.sleep(0.005)
            run = self._supervisor.find(job)
            if run is not None:
                return run
        return None


def judge(
    command: Command, payload: bytes, signature: str, rules: Rules, at_ms: int, *, expires: bool
) -> TrustedKey | None:
    """Return the trusted key if the command may be carried out here, else None.

    A kill that names one job is carried out even if expired (``expires`` False): killing is the safe side.
    """
    key = rules.trust.get(signing.signer_of(signature))
    if key is None or key.revoked or not _RIGHTS[command.op].intersection(key.may):
        return None
    if command.audience not in {"*", rules.node} or (expires and at_ms > command.expires_at_ms):
        return None
    return key if signing.verify(key.public, Domain.COMMAND, payload, signature) else None


def _covers(key: TrustedKey, tenant: str) -> bool:
    return "*" in key.tenants or tenant in key.tenants


def _aims_at(command: Command, key: TrustedKey, run: Run) -> bool:
    """Return whether the selector hits the attempt, as its signed envelope says, and the key may reach its tenant."""
    if run.spec is None or command.selector.field not in run.selectors or not _covers(key, run.spec.tenant):
        return False
    return command.tenants is None or run.spec.tenant in command.tenants


def _order(command: Command) -> KillOrder:
    return KillOrder.of(command)
