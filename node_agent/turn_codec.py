"""Turns to script arguments, script replies to values. Pure.

Called by rq_store alone. Must never guess: a reply of another shape raises InvariantError, because it means that script
and reader do not belong together.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar, cast

from node_agent.errors import InvariantError
from node_agent.turns import (
    Claim,
    Dead,
    Finish,
    FinishReply,
    FinishResult,
    KillWord,
    Orphan,
    Start,
    StartReply,
    Turn,
    TurnReply,
)
from runner.wire.spec import priority_of
from runner.wire.states import NODE_LOST, RQ_STATUS, State

__all__ = ["Blobs", "claim_of", "deads", "leases", "orphans", "table", "text", "turn_document", "turn_reply", "word"]

T = TypeVar("T")

#: RQ's result types. Source: rq 3.0, results.py.
_SUCCESSFUL: Final = 1
_FAILED: Final = 2
_RETRIED: Final = 4
_REGISTRIES: Final = {"finished": "finished", "canceled": "canceled"}


class Blobs:
    """Byte strings beside the JSON document; the document names them by their number in ARGV."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def add(self, value: bytes) -> int:
        """Return the number of ``value`` in ARGV (the document is 1), or 0 for nothing."""
        if not value:
            return 0
        self.values.append(value)
        return len(self.values) + 1


def turn_document(
    turn: Turn, worker_name: Callable[[int], str], executions: Sequence[str]
) -> tuple[dict[str, object], Blobs]:
    """Return the document of turn.lua without the store's own fields; ``executions``: a fresh id per free slot."""
    blobs = Blobs()
    document: dict[str, object] = {
        "budget": turn.budget,
        "finishes": [_finish(finish, worker_name, blobs) for finish in turn.finishes],
        "starts": [{**_fence(start.claim, worker_name), **_mark(start, blobs)} for start in turn.starts],
        "free": [
            [str(slot), worker_name(slot), execution] for slot, execution in zip(turn.free, executions, strict=True)
        ],
        "lanes": list(turn.lanes),
    }
    if any("priority=" in lane for lane in turn.lanes):
        document["points"] = [priority_of(lane) or 0 for lane in turn.lanes]
    if turn.held is not None:
        document["held"] = list(turn.held)
    return document, blobs


def turn_reply(turn: Turn, reply: object) -> tuple[TurnReply, list[list[object]]]:
    """Return the answers and the raw cutoff tables of a reply of turn.lua."""
    parts = _items(reply, 12)
    finishes = zip(turn.finishes, _items(parts[0], len(turn.finishes)), strict=True)
    starts = zip(turn.starts, _items(parts[1], len(turn.starts)), strict=True)
    answer = TurnReply(
        finishes=tuple(_finish_reply(finish, answer) for finish, answer in finishes),
        starts=tuple(_start_reply(start, answer) for start, answer in starts),
        claims=tuple(_claim(row) for row in _items(parts[2])),
        dead=deads(parts[3]),
        expired=tuple(_claim(row) for row in _items(parts[4])),
        dropped=_number(parts[5]),
        lost=parts[6] == 1,
        counter=_number(parts[7]),
        more=parts[8] == 1,
        orphans=orphans(parts[10]),
        lanes=tuple(text(lane) for lane in _items(parts[11])),
    )
    return answer, [_items(entry) for entry in _items(parts[9])]


def deads(value: object) -> tuple[Dead, ...]:
    """Return jobs that a kill hit before their start."""
    return tuple(Dead(_claim(row), _word(kill)) for row, kill in (_items(pair, 2) for pair in _items(value)))


def orphans(value: object) -> tuple[Orphan, ...]:
    """Return started attempts of agent starts that are no more."""
    found = []
    for entry in _items(value):
        parts = _items(entry)
        node, _, boot = text(parts[1]).partition("/")
        kill = _word(parts[4]) if len(parts) > 4 else None
        found.append(Orphan(_claim(parts[0]), node, boot, parts[2] == 1, _number(parts[3]), kill))
    return tuple(found)


def leases(value: object) -> dict[str, int]:
    """Return member -> score (ms) of a flat reply with scores."""
    flat = _items(value)
    return {text(flat[i]): int(float(text(flat[i + 1]))) for i in range(0, len(flat), 2)}


def table(flat: Sequence[object]) -> dict[str, bytes]:
    """Return field -> value of a flat hash reply."""
    return {text(flat[i]): cast("bytes", flat[i + 1]) for i in range(0, len(flat), 2)}


def word(value: bytes) -> KillWord | None:
    """Return a cutoff from its stored form ``SEQ SIGNATURE COMMAND``; None when it is malformed."""
    seq, _, rest = value.partition(b" ")
    signature, _, command = rest.partition(b" ")
    if not seq.isdigit() or len(seq) > 16 or not command:
        return None
    return KillWord("cutoff", command, signature.decode("utf-8", "replace"), int(seq))


def text(value: object) -> str:
    """Return a reply's byte string as text."""
    if not isinstance(value, bytes):
        raise InvariantError("a script answered in another form than expected; client with decode_responses?")
    return value.decode("utf-8", "replace")


def claim_of(job: str, value: bytes) -> Claim | None:
    """Return the fence of an entry in the list of claims (prelude.lua, hold); None for a forged one."""
    parts = value.decode("utf-8", "replace").split(" ", 4)
    if len(parts) != 5 or not parts[0].isdigit():
        return None
    attempt, execution, _, hand, lane = parts
    slot = int(hand) if hand.isdigit() else None
    return Claim(job, int(attempt), lane, slot, "" if execution in {"-", "!"} else execution)


def _fence(claim: Claim, worker_name: Callable[[int], str]) -> dict[str, object]:
    return {
        "job": claim.job,
        "attempt": claim.attempt,
        "slot": "-" if claim.slot is None else str(claim.slot),
        "execution": claim.execution,
        "lane": claim.lane,
        "worker": "" if claim.slot is None else worker_name(claim.slot),
    }


def _mark(start: Start, blobs: Blobs) -> dict[str, object]:
    return {
        "state": start.state.value,
        "status": RQ_STATUS[start.state],
        "event": blobs.add(start.event),
        "esig": str(start.event_signature),
    }


def _finish(finish: Finish, worker_name: Callable[[int], str], blobs: Blobs) -> dict[str, object]:
    status = "canceled" if finish.state is State.KILLED and not finish.started else RQ_STATUS[finish.state]
    kind = _RETRIED if finish.kind == "retry" else _SUCCESSFUL if finish.state is State.FINISHED else _FAILED
    failed = finish.kind != "release" and kind != _SUCCESSFUL
    return {
        **_fence(finish.claim, worker_name),
        "kind": finish.kind,
        "state": finish.state.value,
        "reason": finish.reason or "",
        "status": status,
        "registry": _REGISTRIES.get(status, "failed"),
        "type": kind,
        "wall": f"{finish.wall_s:.6f}",
        "value": blobs.add(b"" if finish.return_value is None else base64.b64encode(finish.return_value)),
        "failure": blobs.add(_packed(finish.failure) if failed else b""),
        "outcome": blobs.add(finish.outcome),
        "osig": str(finish.outcome_signature),
        "event": blobs.add(finish.event or b"{}"),
        "esig": str(finish.event_signature),
        "delay": finish.delay_ms,
        "crash": int(finish.state is State.LOST and finish.reason == NODE_LOST),
    }


def _packed(failure: str) -> bytes:
    return base64.b64encode(zlib.compress(failure.encode("utf-8", "replace")))


def _finish_reply(finish: Finish, answer: object) -> FinishReply:
    parts = _items(answer)
    result = text(parts[0])
    if result not in {"done", "stale", "killed", "poison"}:
        raise InvariantError(f"unknown answer {result!r} to a finish")
    kill = _word(parts[1]) if len(parts) > 1 else None
    return FinishReply(finish.claim.job, finish.claim.attempt, cast("FinishResult", result), kill)


def _start_reply(start: Start, answer: object) -> StartReply:
    parts = _items(answer)
    kill = _word(parts[1]) if len(parts) > 1 else None
    return StartReply(start.claim.job, start.claim.attempt, "done" if parts[0] == b"done" else "stale", kill)


def _claim(value: object) -> Claim:
    job, attempt, lane, slot, execution, seq, data, oversized, odd, flow = _items(value, 10)
    return Claim(
        job=text(job),
        attempt=_number(attempt),
        lane=text(lane),
        slot=None if slot == b"-" else int(text(slot)),
        execution=text(execution),
        seq=_number(seq),
        data=cast("bytes", data),
        oversized=oversized == 1,
        odd=tuple(name for name in text(odd).split(",") if name),
        flow=text(flow),
    )


def _word(value: object) -> KillWord:
    kind, seq, command, signature = _items(value, 4)
    name = "cutoff" if kind == b"cutoff" else "tombstone"
    return KillWord(cast('Literal["tombstone", "cutoff"]', name), cast("bytes", command), text(signature), _number(seq))


def _items(value: object, length: int | None = None) -> list[object]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise InvariantError("a script answered in another form than expected")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise InvariantError("a script answered in another form than expected")
    return value
