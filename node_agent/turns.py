"""What goes into a turn and what comes out of it: values only.

Called by rq_store (fills and reads them) and the dispatcher. Must never hold a connection, a clock or a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from runner.wire.states import State

__all__ = [
    "Claim",
    "Cutoff",
    "Dead",
    "Finish",
    "FinishReply",
    "FinishResult",
    "KillWord",
    "LeaseInfo",
    "Orphan",
    "Registration",
    "Start",
    "StartReply",
    "Text",
    "Turn",
    "TurnReply",
]


FinishResult = Literal["done", "stale", "killed", "poison"]


class Text(Protocol):
    """A text that is made when it is written: a signature over what goes out together."""

    def __str__(self) -> str:
        """Return it, always the same."""


@dataclass(frozen=True, slots=True)
class KillWord:
    """A stored kill: the received command bytes and their signature text; nothing is verified yet.

    ``kind``: ``tombstone`` names one job; ``cutoff`` hits every job of a selector up to sequence number ``seq``.
    An unreadable or unsigned tombstone comes with empty bytes: it is honoured all the same, killing is the safe side.
    """

    kind: Literal["tombstone", "cutoff"]
    command: bytes
    signature: str
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """One job that this agent start holds, and the fence under which it may write about it.

    ``attempt``: the number of this attempt (of the last one for a job that is not to run). ``slot``: None when the
    job takes no slot. ``execution``: RQ's id of this attempt, empty when there is none. ``data``: the stored payload
    as it arrived, for ``payload.parse``; empty when ``oversized``. ``odd`` names what a job of ours never carries
    (callbacks, webhooks, meta, a foreign origin, ...): such a job is refused as bad_hash. ``retries`` and ``once``
    are hints of the hash; the signed envelope decides. ``flow``: the limits that the claim was made under (limits.lua),
    to be compared with the envelope's.
    """

    job: str
    attempt: int
    lane: str
    slot: int | None = None
    execution: str = ""
    seq: int = 0
    data: bytes = b""
    oversized: bool = False
    odd: tuple[str, ...] = ()
    flow: str = ""


@dataclass(frozen=True, slots=True)
class Dead:
    """A job that a kill hit before this attempt started: state ``killing``, held by the caller, to be ended."""

    claim: Claim
    word: KillWord


@dataclass(frozen=True, slots=True)
class Orphan:
    """A started attempt of an agent start that is no more; held by the caller, who ends it or gives it a next attempt.

    ``word`` is set when a kill hits the job. ``once`` and ``retries`` are hints; the signed envelope decides.
    ``node``/``boot``: who ran it.
    """

    claim: Claim
    node: str
    boot: str
    once: bool
    retries: int
    word: KillWord | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an attempt, to be written once.

    ``kind``: ``end`` is final (``state`` is an end state; ``outcome``/``event`` with their signatures are stored as
    given); ``retry`` puts the job at the head of its lane for the next attempt, or aside for ``delay_ms`` (``event`` is
    job.retried);
    ``release`` gives back what was not started, uncounted (no event). ``started``: whether the job's own code may have
    run. ``return_value``: JSON bytes of a result, for RQ's readers; ``failure``: text of any other end.
    ``wall_s``: run time for the worker's statistics.
    """

    claim: Claim
    kind: Literal["end", "retry", "release"] = "end"
    state: State = State.FAILED
    reason: str | None = None
    started: bool = False
    outcome: bytes = b""
    outcome_signature: str | Text = ""
    event: bytes = b""
    event_signature: str | Text = ""
    return_value: bytes | None = None
    failure: str = ""
    wall_s: float = 0.0
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class FinishReply:
    """``done``: written, exactly once. ``stale``: the fence is gone (another attempt or end); nothing was written.

    ``killed`` (for a retry, or an end as lost): a kill hits the job, nothing was written; finish it as killed, with
    ``word``. ``poison`` (for a retry): the job has taken too many nodes with it, nothing was written; end it.
    """

    job: str
    attempt: int
    result: FinishResult
    word: KillWord | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """The mark that an attempt runs, with its signed job.started event; or killing, paused, running again."""

    claim: Claim
    state: State = State.RUNNING
    event: bytes = b""
    event_signature: str | Text = ""


@dataclass(frozen=True, slots=True)
class StartReply:
    """``done``: marked. ``stale``: the fence is gone, kill the attempt and write nothing. ``word``: a kill waits."""

    job: str
    attempt: int
    result: Literal["done", "stale"]
    word: KillWord | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One loop turn. ``free``: numbers of the slots to fill; ``lanes`` in order of priority.

    ``budget``: most jobs that are taken out of lanes, dead ones included. ``held``: every job that this agent start
    holds, those in ``finishes`` too; then what an earlier call handed out in a reply that got lost is found again.
    """

    finishes: tuple[Finish, ...] = ()
    starts: tuple[Start, ...] = ()
    free: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()
    budget: int = 64
    held: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TurnReply:
    """Answers in the order of the questions. ``lost``: this agent start has no lease, so nothing was claimed.

    ``counter``: the job counter (a cutoff above it is void). ``expired``: claims whose stored not_after has passed;
    the signed envelope decides. ``dropped``: ids in lanes without a waiting job. ``more``: lanes may hold more work.
    ``lanes``: every lane there is, when there are others than the caller knew; then nothing was claimed.
    """

    finishes: tuple[FinishReply, ...] = ()
    starts: tuple[StartReply, ...] = ()
    claims: tuple[Claim, ...] = ()
    dead: tuple[Dead, ...] = ()
    expired: tuple[Claim, ...] = ()
    dropped: int = 0
    lost: bool = False
    counter: int = 0
    more: bool = False
    orphans: tuple[Orphan, ...] = ()
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cutoff:
    """One selector kill of a table: ``table`` is empty for the controllers' table, else the tenant."""

    table: str
    field: str
    word: KillWord


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease as read: who, and the Redis time in milliseconds at which it lapses."""

    node: str
    boot: str
    score_ms: int


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer to a registration. ``refused_by`` names the host that holds the node's name (None: registered).

    ``older`` are earlier starts of the same node on this host, whose jobs ``Store.recover`` may take at once.
    """

    refused_by: str | None = None
    older: tuple[str, ...] = field(default_factory=tuple)
