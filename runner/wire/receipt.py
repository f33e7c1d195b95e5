"""The receipt: a node's signed word that a job's processes are gone.

Called by the agent (makes and signs it) and the client (verifies it). Must never be built before the kernel gave the
proof, and never claims more than that proof: no proof = outcome ``unconfirmed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["MAX_RECEIPT_BYTES", "KillDone", "NodeReceipt", "Outcome", "PauseReceipt", "Receipt"]

MAX_RECEIPT_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a kill did. ``kill_ms``: from the kill to the proof; ``total_ms``: from ``requested_at`` to ``done_at``.

    ``survivors`` is 0 in a confirmed kill; None when nothing was proved. ``method`` names the kill
    (``cgroup.kill+pidfd``, ``pidfd``, ``none``). ``flight``: the head of the node's flight record, COUNT:HASH.
    ``signer`` is the key id, ``signature`` covers all other fields. Times are ISO 8601 UTC with milliseconds.
    """

    job: str
    command: str
    outcome: Literal["killed", "killed_before_start", "already_ended", "unknown", "unconfirmed"]
    state: str
    requested_at: str
    done_at: str
    nonce: str
    attempt: int = 0
    node: str = ""
    boot: str = ""
    processes: int = 0
    survivors: int | None = 0
    method: str = "none"
    level: str = ""
    kill_ms: float = 0.0
    total_ms: float = 0.0
    reason: str = ""
    by: str = ""
    forced: bool = False
    flight: str = ""
    signer: str = ""
    signature: str = ""


PauseOutcome = Literal[
    "paused",
    "resumed",
    "approved",
    "denied",
    "stored",
    "delivered",
    "queued",
    "applied",
    "not_running",
    "already_ended",
    "unknown",
    "refused",
    "unconfirmed",
]


@dataclass(frozen=True, slots=True)
class PauseReceipt:
    """What a pause, a resume or a signal did, or a decision on a secret that a job waits for.

    ``paused``: no process of the job runs; ``resumed``: they run again. ``approved``, ``denied``: the broker, or the
    node, has it. ``stored``: the decision is written down, and nobody waits for it at the moment.
    ``delivered``: a process of the job has the signal; ``queued``: it comes when the job unblocks it or goes on;
    ``applied``: it was enforced from outside.
    ``not_running``: the job has not started, so there is nothing to pause. ``refused``: the order came after a later
    one, or the key may not lift this pause. ``unconfirmed``: nobody answered, or a process could not be stopped yet.
    ``processes``: how many stand still; ``took_ms``: from the order's arrival until they did. ``method``:
    ``cgroup.freeze``, ``SIGSTOP`` or ``none``. Signed like a Receipt.
    """

    job: str
    command: str
    op: Literal["pause", "resume", "signal", "approve", "deny"]
    outcome: PauseOutcome
    state: str
    done_at: str
    nonce: str
    attempt: int = 0
    node: str = ""
    boot: str = ""
    processes: int = 0
    method: str = "none"
    level: str = ""
    took_ms: float = 0.0
    reason: str = ""
    by: str = ""
    signer: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class NodeReceipt:
    """What a drain, undrain, suspend or unsuspend did on one node.

    ``done``: it holds from now on: nothing more is claimed (``busy`` jobs still run; ``handed_back`` had not started
    and went back to their lanes), or is claimed again. A drain is answered a second time when nothing runs any more.
    ``refused``: the key may not order this, or a later order came first. ``unknown``: no such node. ``unconfirmed``:
    no answer came. ``state``: the node's, as `nodes` shows it. Signed like a Receipt.
    """

    command: str
    op: Literal["drain", "undrain", "suspend", "unsuspend"]
    outcome: Literal["done", "refused", "unknown", "unconfirmed"]
    state: str
    done_at: str
    nonce: str
    node: str = ""
    boot: str = ""
    busy: int = 0
    handed_back: int = 0
    reason: str = ""
    by: str = ""
    signer: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class KillDone:
    """A node's last word on a selector's command: it sent ``count`` receipts for ``command`` and has no more."""

    command: str
    node: str
    boot: str
    count: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended, signed by the node that proved it; stored beside RQ's own result.

    ``result_sha256`` binds the stored return value, ``envelope_sha256`` the signed job that it is the end of (None: the
    node did not get as far as to verify one). ``tail`` holds the last output lines of a failure (at most 2 KiB),
    ``calls`` its last calls.
    """

    job: str
    attempt: int
    state: str
    node: str
    boot: str
    ended_at_ms: int
    started_at_ms: int | None = None
    reason: str | None = None
    detail: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    step: str | None = None
    result_sha256: str | None = None
    envelope_sha256: str | None = None
    level: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    processes: int = 0
    output_bytes: int = 0
    tail: str = ""
    error: dict[str, str] | None = None
    calls: tuple[str, ...] = ()
