"""Port: the only place that knows how jobs, workers, results and leases are written in Redis.

Called by the dispatcher (dispatch.py: turn), the heartbeat (renew, recover), control (cutoffs, sweep) and the agent's
start and stop. Each method is one script call or one read on the client given at construction, so each loop uses a
Store of its own connection (``Store.on``). Must never import rq's classes, load a pickle, or act on what it read:
callers verify signatures. Every method raises StoreAwayError when the store does not answer or answers with an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from node_agent import turn_codec
from node_agent.cutoffs import Cutoffs
from node_agent.errors import StoreAwayError
from node_agent.line import Line
from node_agent.output import Chunk
from node_agent.storelink import answered
from node_agent.turns import Claim, Cutoff, Dead, KillWord, Orphan, Registration, Turn, TurnReply
from runner.scripts import loader, payload
from runner.wire.keys import Keys

__all__ = ["Store"]

#: How long ends (job hash, result, log) are kept, in seconds.
TTL_S: Final = 7 * 86_400
#: Most payload bytes in one reply; one job may exceed it once.
REPLY_BYTES: Final = 8 * 1024 * 1024
#: As start.lua has it.
WAKE_TTL_S: Final = 60
#: Ids that a sweep looks at per lane and call.
WINDOW: Final = 512
#: Lanes that RQ's tools are shown of a worker: each is written for each slot, in one step.
SHOWN: Final = 256
#: Where jobs wait for a node: their lane, and RQ's registries beside it.
WAITING: Final = ("queued", "deferred", "scheduled")
#: Jobs that one recovery call takes over.
RECOVER_LIMIT: Final = 256
#: A lease that stood still for this many times lease + margin is over, even if Redis TIME went back meanwhile.
PATIENCE: Final = 3
_BOOT_CHARS: Final = 6
_ENCODE: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(slots=True)
class _Start:
    """What all stores of one agent start share: its workers as registered, and the kills it knows."""

    birth: dict[str, str] = field(default_factory=dict)
    slots: int = 0
    lanes: tuple[str, ...] = ()
    cutoffs: Cutoffs = field(default_factory=Cutoffs)
    #: How many lanes there are in the whole fleet, and whether the last turn brought new ones.
    known: int | None = None
    told: bool = False

    def seen(self) -> dict[str, int]:
        """The turn right after one that brought new lanes claims in any case: lanes may come faster than turns."""
        return {} if self.known is None or self.told else {"seen": self.known}


class Store:
    """The queue as one agent start sees it. ``client`` must give bytes (no decode_responses).

    ``ttl_s``: how long ends are kept. ``clock``: seconds of this host that never go back (suspend included).
    """

    def __init__(
        self,
        client: Redis,
        *,
        node: str,
        boot: str,
        keys: Keys | None = None,
        ttl_s: int = TTL_S,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._client = client
        self._line = Line(client)
        self._node = node
        self._boot = boot
        self._keys = keys or Keys()
        self._ttl_s = ttl_s
        self._clock = clock
        self._start = _Start()
        self._from: dict[str, int] = {}
        self._swept = True
        self._seen: dict[str, tuple[int, float]] = {}

    def on(self, client: Redis) -> Store:
        """Return the same store on another connection; both know the same cutoffs and the same workers."""
        other = Store(client, node=self._node, boot=self._boot, keys=self._keys, ttl_s=self._ttl_s, clock=self._clock)
        other._start = self._start
        return other

    @property
    def swept(self) -> bool:
        """Whether the last sweep looked at every waiting job of its lanes; else call it again."""
        return self._swept

    @property
    def others(self) -> int:
        """How many leases of other agent starts the last `recover` showed."""
        return len(self._seen)

    def worker_name(self, slot: int) -> str:
        """Return RQ's name of a slot: NODE.BOOT6.SLOT."""
        return f"{self._node}.{self._boot[:_BOOT_CHARS]}.{slot}"

    async def register(
        self,
        *,
        host_id: str,
        record: bytes,
        slots: int,
        lanes: Sequence[str],
        lease_ms: int,
        margin_ms: int,
        hostname: str,
        pid: int,
    ) -> Registration:
        """Take the node's name and a lease, and list the slots as RQ workers.

        Call it only after the host's leftovers of earlier starts are swept: their jobs may be taken over at once.
        ``host_id`` tells machines apart (/etc/machine-id, boot id); ``record``: canonical JSON of NodeView.
        """
        birth = {
            "pid": str(pid),
            "hostname": hostname,
            "ip_address": "unknown",
            "version": version("rq"),
            "python_version": sys.version,
            "state": "idle",
        }
        keys = self._keys
        reply = await self._run(
            "register",
            [keys.leases(), keys.clock(), keys.nodes(), keys.hosts(), keys.workers(), *self._workers(slots)],
            {
                "host": host_id,
                "lease": lease_ms,
                "margin": margin_ms,
                "record": record.decode("utf-8"),
                "birth": birth,
                "lanes": list(lanes[:SHOWN]),
            },
        )
        answer = [turn_codec.text(part) for part in cast("list[object]", reply)]
        if answer[0] == "refused":
            return Registration(refused_by=answer[1])
        self._start.birth, self._start.slots, self._start.lanes = birth, slots, tuple(lanes[:SHOWN])
        return Registration(older=tuple(answer[1:]))

    async def publish_card(self, card: bytes) -> None:
        """Show the node's card, signed by the fleet key, to those who check this node's signatures."""
        await answered(self._client.hset(self._keys.cards(), self._node, card))

    async def unregister(self) -> int:
        """Leave: workers, lease and record go. Returns how many jobs are still held; then the lease stays."""
        keys = self._keys
        held = keys.claims(self._node, self._boot)
        reply = await self._run(
            "unregister", [keys.leases(), keys.nodes(), held, keys.workers(), *self._workers(self._start.slots)], {}
        )
        return cast("int", reply)

    async def renew(self, record: bytes, lease_ms: int, lanes: Sequence[str] | None = None) -> bool:
        """Prolong the lease from now. False: it is lost (taken over or never there); kill everything, register anew.

        ``lanes``: every lane served now; needed only when that changed.
        """
        served = self._start.lanes if lanes is None else tuple(lanes[:SHOWN])
        keys = self._keys
        reply = await self._run(
            "lease",
            [keys.leases(), keys.clock(), keys.nodes(), keys.workers(), *self._workers(self._start.slots)],
            {
                "lease": lease_ms,
                "record": record.decode("utf-8"),
                "birth": self._start.birth,
                "lanes": list(served),
                "changed": int(served != self._start.lanes),
            },
        )
        self._start.lanes = served
        return cast("list[object]", reply)[0] == b"ok"

    async def turn(self, turn: Turn) -> TurnReply:
        """Finish, mark and claim in one step. Safe to send again when no answer came."""
        executions = [os.urandom(16).hex() for _ in turn.free]
        document, blobs = turn_codec.turn_document(turn, self.worker_name, executions)
        keys = self._keys
        reply = await self._run(
            "turn",
            [
                keys.seq(),
                keys.leases(),
                keys.claims(self._node, self._boot),
                keys.clock(),
                keys.cutoffs(),
                *(keys.queue(lane) for lane in turn.lanes),
            ],
            {"known": self._start.cutoffs.versions(), "bytes": REPLY_BYTES, **document, **self._start.seen()},
            blobs.values,
            self._line.call,
        )
        answer, tables = turn_codec.turn_reply(turn, reply)
        self._start.cutoffs.seen(answer.counter)
        self._start.told = bool(answer.lanes)
        if answer.lanes:
            self._start.known = len(answer.lanes)
        for name, _, *flat in tables:
            self._start.cutoffs.replace(turn_codec.text(name), turn_codec.table(flat))
        return answer

    async def log(self, claim: Claim, chunks: Sequence[Chunk]) -> bool:
        """Add output of an attempt, in order. False: this agent start does not hold it any more, nothing was added.

        Safe to send again when no answer came.
        """
        blobs = turn_codec.Blobs()
        rows = [[chunk.fd, chunk.offset, chunk.skipped, blobs.add(chunk.data)] for chunk in chunks]
        document: dict[str, object] = {
            "attempt": claim.attempt,
            "slot": "-" if claim.slot is None else str(claim.slot),
            "execution": claim.execution,
            "chunks": rows,
        }
        keys = [self._keys.job(claim.job), self._keys.log(claim.job)]
        return await self._run("log", keys, document, blobs.values) == 1

    def cutoff_for(self, job: str, seq: int, selectors: Iterable[str]) -> KillWord | None:
        """Return a known cutoff that hits a job, by selectors of its *signed* envelope; None if none does.

        The tables are those of the last turn that claimed and of ``read_cutoffs``: a claim is never older than they.
        """
        return self._start.cutoffs.find(job, seq, selectors)

    async def read_cutoffs(self, tenants: Iterable[str]) -> tuple[Cutoff, ...]:
        """Read the counter, the controllers' table and the tenants' tables anew (after a notice of a selector kill)."""
        names = ["", *tenants]
        pipe = self._client.pipeline(transaction=True)
        pipe.get(self._keys.seq())
        for name in names:
            pipe.hgetall(self._keys.cutoffs(name or None))
        counter, *tables = cast("list[object]", await answered(pipe.execute()))
        self._start.cutoffs.seen(int(cast("bytes", counter) or b"0"))
        for name, found in zip(names, tables, strict=True):
            table = {key.decode("utf-8", "replace"): value for key, value in cast("dict[bytes, bytes]", found).items()}
            self._start.cutoffs.replace(name, table)
        return self._start.cutoffs.all(names)

    async def sweep(
        self,
        lanes: Sequence[str] = (),
        jobs: Sequence[str] = (),
        limit: int = 64,
        serves: Sequence[str] | None = None,
    ) -> tuple[Dead, ...]:
        """Take waiting jobs that a kill hits, to end them: of the lanes, in ``jobs``, or removed by a kill earlier.

        ``serves``: the lanes whose jobs this node may sign for; None: all.
        One call looks at a window of each lane and the next goes on from there, until ``swept``.
        """
        keys = self._keys
        claims = keys.claims(self._node, self._boot)
        places = [
            (keys.queue(lane) if kind == "queued" else keys.registry(kind, lane), lane, kind)
            for lane in lanes
            for kind in WAITING
        ]
        reply = await self._run(
            "sweep",
            [keys.seq(), keys.leases(), claims, keys.clock(), keys.doomed(), *(place for place, _, _ in places)],
            {
                "bytes": REPLY_BYTES,
                "limit": limit,
                "window": WINDOW,
                "lanes": [[lane, self._from.get(place, 0), kind] for place, lane, kind in places],
                "jobs": list(jobs),
                **_served(serves),
            },
        )
        found, nexts, _ = cast("list[object]", reply)
        ends = zip(places, cast("list[object]", nexts), strict=False)
        self._from = {place[0]: cast("int", at) for place, at in ends if at}
        self._swept = not self._from
        return turn_codec.deads(found)

    async def recover(
        self, *, lease_ms: int, margin_ms: int, named: Sequence[str] = (), serves: Sequence[str] | None = None
    ) -> tuple[tuple[Orphan, ...], tuple[Dead, ...]]:
        """Take over what lapsed agent starts held; jobs that never started go back to their lanes by themselves.

        Call it every second or so: a lease counts as lapsed only after this process saw it unchanged for lease +
        margin by its own clock, so no jump of Redis TIME makes two owners. ``named`` (NODE/BOOT, from
        ``Registration.older``) needs no waiting, nor does the rest of a start that held more than one call takes (256).
        """
        now = self._clock()
        wait_s = (lease_ms + margin_ms) / 1000
        members: list[list[object]] = [[member, -1, 1] for member in named]
        for member, (score, since) in self._seen.items():
            if member not in named and (score <= 0 or now - since >= wait_s):
                members.append([member, score, int(now - since >= PATIENCE * wait_s)])
        keys = self._keys
        reply = await self._run(
            "recover",
            [keys.seq(), keys.leases(), keys.clock(), keys.claims(self._node, self._boot), keys.workers()],
            {"bytes": REPLY_BYTES, "limit": RECOVER_LIMIT, "margin": margin_ms, "members": members, **_served(serves)},
        )
        orphans, dead, _, leases, _ = cast("list[object]", reply)
        self._watch(turn_codec.leases(leases))
        return turn_codec.orphans(orphans), turn_codec.deads(dead)

    async def held(self) -> tuple[Claim, ...]:
        """Return the fences of every claim that the store keeps for this agent start (without payloads)."""
        found = await answered(self._client.hgetall(self._keys.claims(self._node, self._boot)))
        entries = cast("dict[bytes, bytes]", found).items()
        claims = (turn_codec.claim_of(job.decode("utf-8", "replace"), value) for job, value in entries)
        return tuple(claim for claim in claims if claim is not None)

    async def holds(self, job: str) -> bool:
        """Return whether the store keeps a claim of this agent start on the job."""
        return bool(await answered(self._client.hexists(self._keys.claims(self._node, self._boot), job)))

    async def state_of(self, job: str) -> tuple[str | None, int]:
        """Return the stored state (None: no such job) and number of the last attempt; hints, unsigned."""
        found = await answered(self._client.hmget(self._keys.job(job), ["rf_state", "rf_attempt"]))
        state, attempt = cast("list[bytes | None]", found)
        number = int(attempt) if attempt is not None and attempt.isdigit() else 0
        return (None if state is None else state.decode("utf-8", "replace")), number

    async def lanes(self) -> tuple[str, ...]:
        """Return every lane that is not forgotten, in order."""
        found = cast("set[bytes]", await answered(self._client.smembers(self._keys.lanes())))
        self._start.known = len(found)
        return tuple(sorted(name.decode("utf-8", "replace") for name in found))

    async def wait(self, lanes: Sequence[str], timeout_s: float = 1.0) -> str | None:
        """Wait until a lane gets work: its name, or None after ``timeout_s``. Blocks: use a connection of its own."""
        keys = [self._keys.wake(lane) for lane in lanes] or [self._keys.wake("")]
        found = cast("list[bytes] | None", await answered(self._client.blpop(keys, timeout=timeout_s)))
        return None if found is None else found[0].decode("utf-8", "replace").removeprefix(self._keys.wake(""))

    async def pass_on(self, lane: str) -> None:
        """Give a wake-up back that this agent can't use."""
        pipe = self._client.pipeline(transaction=True)
        pipe.lpush(self._keys.wake(lane), "1")
        pipe.expire(self._keys.wake(lane), WAKE_TTL_S)
        await answered(pipe.execute())

    def _workers(self, slots: int) -> list[str]:
        return [self._keys.worker(self.worker_name(slot)) for slot in range(slots)]

    def _watch(self, leases: dict[str, int]) -> None:
        """Remember since when each lease stands still, by this host's clock."""
        now = self._clock()
        own = f"{self._node}/{self._boot}"
        for member in self._seen.keys() - leases.keys():
            del self._seen[member]
        for member, score in leases.items():
            if member != own and self._seen.get(member, (None,))[0] != score:
                self._seen[member] = (score, now)

    async def _run(
        self,
        name: str,
        keys: Sequence[str],
        document: dict[str, object],
        blobs: Sequence[bytes] = (),
        call: Callable[[Sequence[bytes | str]], Awaitable[object]] | None = None,
    ) -> object:
        script = loader.load(name)
        head = {"rq": self._keys.rq, "rf": self._keys.rf, "node": self._node, "boot": self._boot, "ttl": self._ttl_s}
        text = _ENCODE({**head, "cap": payload.MAX_DATA_BYTES, **document})
        words: list[bytes | str] = [str(len(keys)), *keys, text, *blobs]
        send = call or self._send
        try:
            return await send(["EVALSHA", script.sha, *words])
        except StoreAwayError as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await send(["EVAL", script.text, *words])

    async def _send(self, words: Sequence[bytes | str]) -> object:
        return await answered(self._client.execute_command(*words))  # type: ignore[no-untyped-call]  # untyped in redis


def _served(lanes: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if lanes is None else {"serves": list(lanes)}
