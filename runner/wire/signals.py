"""Signals: their names, what they do, and how a node hands one to another node.

Called by the kernel (sends and carries them out), the guest, the command line and Command. Must never let a process of
the job decide about one that is enforced: those act from outside, whatever the job does.

    INT TERM USR1 USR2      told to the job: to the processes that listen, else as the system's signal to its first one
    KILL                    every process of the job is killed
    STOP CONT               the job stands still, goes on
    POLICY TRUST            killed, with that reason
    BUDGET LOOP DRIFT       told to those that listen, then the job stands still until somebody who may lets it go on
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

__all__ = [
    "FATAL",
    "FREEZING",
    "MAX_WHY",
    "TOLD",
    "UNMASKABLE",
    "Answer",
    "Outcome",
    "Signal",
    "SignalName",
]

MAX_WHY: Final = 256

#: delivered: the job's process has it. queued: it comes once it is unblocked, or the job goes on. refused: nothing
#: happened. applied: it was enforced from outside.
Outcome = Literal["delivered", "queued", "refused", "applied"]


class SignalName(StrEnum):
    """Every signal there is."""

    KILL = "KILL"
    STOP = "STOP"
    CONT = "CONT"
    INT = "INT"
    TERM = "TERM"
    USR1 = "USR1"
    USR2 = "USR2"
    POLICY = "POLICY"
    TRUST = "TRUST"
    BUDGET = "BUDGET"
    LOOP = "LOOP"
    DRIFT = "DRIFT"


TOLD: Final = frozenset({SignalName.INT, SignalName.TERM, SignalName.USR1, SignalName.USR2})
FATAL: Final = frozenset({SignalName.KILL, SignalName.POLICY, SignalName.TRUST})
FREEZING: Final = frozenset({SignalName.BUDGET, SignalName.LOOP, SignalName.DRIFT})
#: What no mask holds up: only what is told can wait for the job.
UNMASKABLE: Final = frozenset(SignalName) - TOLD


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal on its way to a job of another node, signed by the sender's node.

    ``sender``: the job that sent it; the receiving node looks up under that job's own signature whether it may.
    """

    id: str
    tenant: str
    signal: SignalName
    job: str
    sender: str
    attempt: int
    node: str
    at_ms: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a signal, signed by the node that holds its job."""

    signal: str
    tenant: str
    job: str
    outcome: Outcome
    node: str
    reason: str = ""
