"""A node agent that breaks at one exact step: ``faulty_agent.py FAULT_FILE AGENT_ARGUMENT…``.

Started by tests in place of ``-m node_agent``. The fault acts once, when FAULT_FILE exists and holds its name:

    claim    SIGKILL after the turn that claims      mark           SIGKILL after the turn that marks the start
    running  SIGKILL a little later                  before-finish  SIGKILL before the turn that finishes
    after-finish  SIGKILL after that turn            deaf-claim, deaf-mark, deaf-finish  that turn's answer gets lost
    full-disk  the ledger can't be written
    crowded    the next message with descriptors fails with ETOOMANYREFS
    unproved   no proof of a kill comes while the file says so (simulated), and 1 s is long enough to wait for it
"""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from node_agent import __main__ as agent
from node_agent import ledger, rq_store
from node_agent.containment import attempts
from node_agent.errors import StoreAwayError
from node_agent.turns import Turn, TurnReply

RUNNING_S = 0.05
fault = Path(sys.argv[1])
honest = rq_store.Store.turn
note = ledger.Ledger.started


def strikes(name: str) -> bool:
    """Return whether this is the step; disarm the fault if so."""
    try:
        if fault.read_text() != name:
            return False
        fault.unlink()
    except FileNotFoundError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def step_of(turn: Turn, reply: TurnReply | None) -> str:
    if any(finish.kind == "end" for finish in turn.finishes):
        return "finish"
    if turn.starts:
        return "mark"
    return "claim" if reply is not None and reply.claims else ""


async def broken(store: rq_store.Store, turn: Turn) -> TurnReply:
    step = step_of(turn, None)
    if step == "finish" and strikes("before-finish"):
        die()
    reply = await honest(store, turn)
    step = step_of(turn, reply)
    if strikes({"claim": "claim", "mark": "mark", "finish": "after-finish"}.get(step, "-")):
        die()
    if step == "mark" and strikes("running"):
        asyncio.get_running_loop().call_later(RUNNING_S, die)
    if step and strikes(f"deaf-{step}"):
        raise StoreAwayError("the answer got lost, on purpose")
    return reply


def started(own: ledger.Ledger, nonce: str, attempt: int, not_after_ms: int) -> None:
    if strikes("full-disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    note(own, nonce, attempt, not_after_ms)


def send_fds(end: socket.socket, buffers: Sequence[bytes], fds: Sequence[int], *rest: object) -> int:
    if strikes("crowded"):
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
    return really_send(end, buffers, fds, *rest)


really_send = socket.send_fds
socket.send_fds = send_fds  # type: ignore[assignment]  # the fault under test


def gone(attempt: attempts.Attempt) -> None:
    if fault.exists() and fault.read_text() == "unproved":
        asyncio.get_running_loop().call_later(0.05, gone, attempt)
    else:
        really_gone(attempt)


really_gone = attempts.Attempt._take_gone
attempts.Attempt._take_gone = gone  # type: ignore[assignment, method-assign]  # the fault under test
attempts.PROOF_TIMEOUT_S = 1.0  # type: ignore[misc]  # the fault under test
ledger.Ledger.started = started  # type: ignore[assignment, method-assign]  # the fault under test
rq_store.Store.turn = broken  # type: ignore[assignment, method-assign]  # the fault under test
sys.exit(agent.main(sys.argv[2:]))
