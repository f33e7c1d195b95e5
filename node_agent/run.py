"""One claimed job on this node: its orders, its sandbox and its end. State only, no flow.

Called by the supervisor (drives it), control and the local socket (order kills and wait). Must never resolve ``proved``
before the kernel's proof.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from node_agent.containment.freezing import Still
from node_agent.containment.plan import Verdict
from node_agent.kernel.ring import Ring
from node_agent.lifecycle import Cause, Ending
from node_agent.walltime import WallTime
from runner.wire.command import Command
from runner.wire.spec import JobSpec
from runner.wire.states import State

#: A kill that takes longer than this shows as ``killing``, in seconds; most are over before.
SHOW_S = 0.02
#: What a kill is called that is a signal.
_CAUSES: Final[dict[str, Cause]] = {"POLICY": "policy", "TRUST": "trust"}

__all__ = ["Helper", "KillOrder", "Proof", "Run", "Tree", "now_ms"]


@dataclass(frozen=True, slots=True)
class KillOrder:
    """One kill as it reached this node. ``command`` is empty for a local kill. ``requested_at_ms``: Unix time.

    ``cause``: policy and trust are kills, too, under names of their own.
    """

    command: str
    requested_at_ms: int
    grace_s: float = 0.0
    force: bool = False
    reason: str = ""
    by: str = ""
    cause: Cause = "kill"

    @classmethod
    def of(cls, command: Command) -> KillOrder:
        """Return the order in an operator's command."""
        cause = _CAUSES.get(command.signal or "", "kill")
        reason = f"{command.signal}: {command.reason}".rstrip(": ") if command.signal else command.reason
        return cls(command.id, command.issued_at_ms, command.grace_s, command.force, reason, command.by, cause)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a kill can be answered with, once nothing of the job is left (or ``verdict.proved`` is False)."""

    ending: Ending
    verdict: Verdict | None
    done_at_ms: int

    @property
    def real(self) -> bool:
        """Whether nothing of the job is left (also because nothing of it ever ran)."""
        return self.verdict is None or self.verdict.proved


class Helper(Protocol):
    """What runs for an attempt outside its sandbox and must not outlive it."""

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done once the kernel has shown that nothing of it is left."""

    def kill(self) -> None:
        """Kill every process of it."""

    async def freeze(self, frozen: bool) -> None:
        """Let no process of it run, or let them go on."""


class Tree(Protocol):
    """The part of an Attempt that a kill needs."""

    def terminate(self) -> None:
        """Ask the first process to end (SIGTERM)."""

    def tell(self, number: int) -> None:
        """Send SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 to the first process."""

    def kill(self) -> None:
        """Kill every process of the attempt."""

    def sockets(self) -> int:
        """Count the sockets that its processes hold open."""

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used so far, as far as they can be seen."""

    async def freeze(self, frozen: bool, timeout_s: float = ...) -> Still:
        """Let no process of the attempt run, or let them go on."""


@dataclass(slots=True, eq=False)
class Run:
    """One attempt from its claim to the acknowledged finish."""

    job_id: str
    attempt: int
    slot: int | None
    seq: int
    spec: JobSpec | None = None
    #: Of the verified envelope, in hex.
    envelope_sha256: str | None = None
    selectors: tuple[str, ...] = ()
    #: The id of the key that signed the job, once it is admitted.
    signer: str = ""
    started_at_ms: int | None = None
    cause: Cause = ""
    era: int = 0
    proof: Proof | None = None
    orders: list[KillOrder] = field(default_factory=list)
    forced: bool = False
    tree: Tree | None = None
    proved: asyncio.Future[Proof] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    acknowledged: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Called with each kill before it acts.
    on_order: Callable[[KillOrder], None] | None = None
    #: The last calls of the attempt, once it has made one.
    ring: Ring | None = None
    #: Called when a kill is under way for longer than SHOW_S.
    on_kill: Callable[[], None] | None = None
    marked: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Who holds the job paused (see pausing.py), and what keeps two such orders apart.
    holders: set[str] = field(default_factory=set)
    holding: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The exit code that the job asked to end with (`leave`).
    exit_code: int | None = None
    #: What else runs for the attempt outside its sandbox and dies with it: its tool calls.
    helpers: set[Helper] = field(default_factory=set)
    wall: WallTime | None = None
    #: In how many milliseconds a parked job comes back without a decision (kernel/parking.py); how many attempts
    #: operators' words allowed beside those that were signed; whether one that it waited for never came.
    parked_ms: int = 0
    parks: int = 0
    undecided: bool = False
    #: Shows a state of the running attempt in the store.
    show: Callable[[State], None] | None = None
    _grace: asyncio.TimerHandle | None = None

    @property
    def stopping(self) -> bool:
        """Whether anything asked this attempt to end."""
        return bool(self.cause)

    def kill(self, order: KillOrder) -> None:
        """Take a kill order: at once before the start, gracefully or hard after it. Never raises."""
        if self.on_order is not None:
            self.on_order(order)
        self.orders.append(order)
        if not self.cause:
            self.cause = order.cause
        if self.tree is None:
            return
        if self.on_kill is not None:
            asyncio.get_running_loop().call_later(SHOW_S, self.on_kill)
        # A paused job can't react to SIGTERM, and was paused so that it does not act: it dies where it stands.
        if order.grace_s > 0 and not order.force and not self.holders:
            self.tree.terminate()
            if self._grace is None:
                self._grace = asyncio.get_running_loop().call_later(order.grace_s, self._hard)
            return
        self._hard()

    def stop(self, cause: Cause) -> None:
        """End the attempt hard for the node's own reason; a kill that was ordered before keeps its name."""
        if self.cause in ("", "exit"):
            self.cause = cause
        if self.tree is not None:
            self._hard()

    def leave(self, code: int) -> None:
        """End the attempt as if its first process had exited with ``code``: the job asked for it."""
        if not self.cause:
            self.cause, self.exit_code = "exit", code
        self._hard()

    def give_up(self, cause: Cause, grace_s: float) -> None:
        """End the attempt for the node's own reason: SIGTERM first if there is a grace, hard after it."""
        if self.cause or self.tree is None or grace_s <= 0 or self.holders:
            self.stop(cause)
            return
        self.cause = cause
        self.tree.terminate()
        self._grace = asyncio.get_running_loop().call_later(grace_s, self._hard)

    def begun(self, tree: Tree) -> None:
        """The sandbox stands; orders that came earlier act now."""
        self.tree = tree
        if self.cause:
            self._hard()

    async def still(self, frozen: bool) -> None:
        """Let nothing that runs for the attempt elsewhere run, or let it go on."""
        for helper in tuple(self.helpers):
            await helper.freeze(frozen)

    async def unhelped(self) -> None:
        """Kill what runs for the attempt elsewhere, and wait until none of it is left."""
        while self.helpers:
            for helper in self.helpers:
                helper.kill()
            await asyncio.wait([helper.gone for helper in self.helpers])
            self.helpers = {helper for helper in self.helpers if not helper.gone.done()}

    def settle(self, proof: Proof) -> None:
        """Tell all that nothing of the job is left; a later proof replaces one that was none or was overruled."""
        self.proof = proof
        if self._grace is not None:
            self._grace.cancel()
        if not self.proved.done():
            self.proved.set_result(proof)

    async def answerable(self) -> Proof:
        """Wait until a kill can be answered over the store: the end is acknowledged there, or there is no proof."""
        proof = await asyncio.shield(self.proved)
        if proof.real:
            await asyncio.shield(self.acknowledged)
        return self.proof or proof

    def _hard(self) -> None:
        self.forced = True
        if self.tree is not None:
            self.tree.kill()
        for helper in self.helpers:
            helper.kill()


def now_ms() -> int:
    """Return Unix milliseconds, for people and signatures; never for durations."""
    return time.time_ns() // 1_000_000
