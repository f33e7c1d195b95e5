"""Artifacts of jobs: bytes that come over the job's own session and go to the store, never a path (attack 10).

Put together by the desk. Must never hold more of a job than one piece, keep what a job began and never ended, or let a
reader see half of one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from node_agent.cancelling import end_all
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.storecalls import StoreCalls, text_of
from node_agent.kernel.table import Entry
from runner.wire.artifact import MAX_ARTIFACT_BYTES, PIECE_BYTES, check_name
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.event import EventType

__all__ = ["Artifacts", "PutArtifact"]

TTL_S: Final = 7 * 86_400
#: Transfers that one session may have under way.
_MOST_OPEN: Final = 4


@dataclass(frozen=True, slots=True)
class PutArtifact:
    """One piece: ``data`` in base64, which stands at ``offset``. ``last``: the artifact is whole with it."""

    name: str
    data: str
    offset: int = 0
    last: bool = True


@dataclass(slots=True)
class _Transfer:
    """What has come of one artifact so far."""

    gen: str
    size: int = 0
    pieces: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class Artifacts:
    """The artifacts of one boot's jobs."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._calls = StoreCalls(around.redis, around.keys)
        self._open: dict[Caller, dict[str, _Transfer]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        around.stopping.append(self._stop)

    def entries(self) -> tuple[Entry, ...]:
        """Return this part's calls."""
        return (
            Entry(
                "artifact.put",
                PutArtifact,
                self._put,
                "Give bytes to whoever looks at the job later, in pieces; a name that exists gets new bytes.",
                "{bytes: so far, sha256: of all of it, once it is whole, else null}",
                changes=True,
                errors=(ErrorCode.CONFLICT, ErrorCode.QUOTA, ErrorCode.UNAVAILABLE),
                resource=lambda ask: str(ask.name),
                late=True,
            ),
        )

    def _put(self, caller: Caller, ask: PutArtifact) -> Awaitable[Json]:
        """Look at the piece at once, in the order in which pieces come; only the store is waited for."""
        if not check_name(ask.name):
            what = "an artifact's name is 1 to 128 of letters, digits, _ . and -, and does not begin with . or -"
            raise CallError(ErrorCode.BAD_REQUEST, what)
        try:
            data = base64.b64decode(ask.data, validate=True)
        except (binascii.Error, ValueError):
            raise CallError(ErrorCode.BAD_REQUEST, "data is no base64") from None
        if len(data) > PIECE_BYTES:
            raise CallError(ErrorCode.BAD_REQUEST, f"a piece has at most {PIECE_BYTES} bytes")
        transfer, older = self._transfer(caller, ask)
        if transfer.size + len(data) > MAX_ARTIFACT_BYTES:
            self._transfers(caller).pop(ask.name, None)
            return self._give_up(caller, transfer, _full())
        number = transfer.pieces
        transfer.size += len(data)
        transfer.pieces += 1
        transfer.digest.update(data)
        if ask.last:
            self._transfers(caller).pop(ask.name, None)
        return self._store(caller, ask, transfer, number, data, older)

    def _transfers(self, caller: Caller) -> dict[str, _Transfer]:
        found = self._open.get(caller)
        if found is None:
            found = self._open[caller] = {}
            caller.closing.append(lambda: self._closed(caller))
        return found

    def _transfer(self, caller: Caller, ask: PutArtifact) -> tuple[_Transfer, _Transfer | None]:
        """Return what the piece belongs to, and what its first piece puts an end to."""
        held = self._transfers(caller)
        if ask.offset == 0:
            older = held.pop(ask.name, None)
            if len(held) >= _MOST_OPEN:
                raise CallError(ErrorCode.QUOTA, f"a session has at most {_MOST_OPEN} artifacts under way")
            held[ask.name] = _Transfer(secrets.token_hex(8))
            return held[ask.name], older
        found = held.get(ask.name)
        if found is None or found.size != ask.offset:
            size = 0 if found is None else found.size
            raise CallError(ErrorCode.CONFLICT, f"{size} bytes of {ask.name} have come, so the next piece begins there")
        return found, None

    async def _store(
        self, caller: Caller, ask: PutArtifact, transfer: _Transfer, number: int, data: bytes, older: _Transfer | None
    ) -> Json:
        if older is not None:
            await self._drop(caller, older)
        document: dict[str, object] = {"op": "piece", "gen": transfer.gen, "number": number}
        reply = await self._run(caller, document, data)
        if reply[0] != "ok":
            self._transfers(caller).pop(ask.name, None)
            return await self._give_up(caller, transfer, _full())
        if not ask.last:
            return {"bytes": transfer.size, "sha256": None}
        return await self._finish(caller, ask.name, transfer)

    async def _finish(self, caller: Caller, name: str, transfer: _Transfer) -> Json:
        digest, attempt = transfer.digest.hexdigest(), caller.run.attempt
        detail: dict[str, str | int | float | bool] = {"name": name, "bytes": transfer.size, "sha256": digest}
        detail |= {"pieces": transfer.pieces, "transfer": transfer.gen}
        event = self._around.notary.event(EventType.JOB_ARTIFACT, job=caller.job, attempt=attempt, detail=detail)
        document: dict[str, object] = {"op": "finish", "gen": transfer.gen, "name": name, "attempt": attempt}
        word = f"{event.signature} ".encode() + event.payload
        reply = await self._run(caller, document | {"pieces": transfer.pieces}, word)
        if reply[0] == "full":
            raise _full()
        if reply[0] != "ok":
            what = "a newer attempt has written it" if reply[0] == "stale" else "a piece of it is lost: send it again"
            raise CallError(ErrorCode.CONFLICT, f"{name}: {what}")
        self._around.told(caller.job, attempt, EventType.JOB_ARTIFACT, detail)
        return {"bytes": transfer.size, "sha256": digest}

    def _closed(self, caller: Caller) -> None:
        """What a session began and did not end goes; where the store is away, with the job's artifacts."""
        for transfer in self._open.pop(caller, {}).values():
            task = asyncio.get_running_loop().create_task(self._forget(caller, transfer))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _forget(self, caller: Caller, transfer: _Transfer) -> None:
        with suppress(CallError):
            await self._drop(caller, transfer)

    async def _stop(self) -> None:
        await end_all(self._dropping)

    async def _give_up(self, caller: Caller, transfer: _Transfer, error: CallError) -> Json:
        await self._drop(caller, transfer)
        raise error

    async def _drop(self, caller: Caller, transfer: _Transfer) -> None:
        await self._run(caller, {"op": "drop", "gen": transfer.gen, "pieces": transfer.pieces})

    async def _run(self, caller: Caller, document: dict[str, object], *data: bytes) -> list[str]:
        bounds: dict[str, object] = {"most": MAX_ARTIFACT_BYTES, "ttl": TTL_S}
        key = self._around.keys.artifacts(caller.job)
        return [text_of(part) for part in await self._calls.run("artifact", [key], document | bounds, *data)]


def _full() -> CallError:
    what = f"all artifacts of a job have at most {MAX_ARTIFACT_BYTES} bytes: write to a granted path instead"
    return CallError(ErrorCode.QUOTA, what)
