"""Watches how full disks are: those that jobs may write to through a grant, and the one that this node writes to.

Called by the session, one loop per boot. Must never wait for a file system on the agent's loop: one that does not
answer holds up a thread of its own and nothing else.

A write grant has no quota, so a job could fill the host's disk, and with it stop what the node has to write before a
job may start (attack 40): below LOW of it the jobs that may write there are paused, and they go on when OK of it is
free again. A node whose own disk is full takes no work, instead of failing job after job (scenario A-F06).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from node_agent.pausing import Order
from node_agent.records import Notary, Signed
from node_agent.run import Run
from runner.wire.event import EventType
from runner.wire.receipt import PauseReceipt

__all__ = ["DiskWatch", "Room"]

log = logging.getLogger(__name__)

#: Shares of free blocks or inodes: below LOW jobs are paused, below OK the node warns.
LOW: Final = 0.05
OK: Final = 0.10
#: Less than this on the node's own disk, and it takes no work: bytes, inodes.
OWN_BYTES: Final = 8 << 20
OWN_INODES: Final = 256
EVERY_S: Final = 1.0


class Room(Protocol):
    """The part of os.statvfs_result that counts."""

    @property
    def f_frsize(self) -> int: ...
    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...
    @property
    def f_files(self) -> int: ...
    @property
    def f_favail(self) -> int: ...


class Pausing(Protocol):
    """Who pauses: the Pauser."""

    async def carry_out(self, run: Run, order: Order, *, act: bool = True) -> PauseReceipt:
        """Pause or resume one attempt."""


class DiskWatch:
    """The disks of one boot. ``statvfs`` is a parameter for tests."""

    def __init__(
        self,
        home: Path,
        runs: Callable[[], Iterable[Run]],
        pauser: Pausing,
        notary: Notary,
        emit: Callable[[str | None, Signed], None],
        *,
        statvfs: Callable[[str], Room] = os.statvfs,
    ) -> None:
        self._home = str(home)
        self._runs = runs
        self._pauser = pauser
        self._notary = notary
        self._emit = emit
        self._statvfs = statvfs
        self._asked: asyncio.Future[dict[str, float]] | None = None
        self._warned: dict[str, str] = {}
        #: Whether this node's own disk has no room.
        self.full = False

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    def no_room(self) -> None:
        """Something could not be written: take no work until the next look finds room."""
        self._set_full(True)

    async def look(self) -> None:
        """Look once, and act."""
        own = self._statvfs(self._home)
        self._set_full(own.f_bavail * own.f_frsize < OWN_BYTES or bool(own.f_files and own.f_favail < OWN_INODES))
        writers = {run: _writes(run) for run in self._runs() if run.started_at_ms is not None and not run.stopping}
        paths = sorted({path for found in writers.values() for path in found})
        free = await self._free(paths) if paths else {}
        for path, share in free.items():
            self._tell(path, share)
        for run, found in writers.items():
            shares = {path: free[path] for path in found if path in free}
            if shares:
                await self._act(run, shares)

    async def _act(self, run: Run, shares: Mapping[str, float]) -> None:
        path = min(shares, key=lambda name: shares[name])
        held = "disk" in run.holders
        by = f"node {self._notary.node}"
        if shares[path] < LOW and not held:
            why = f"{shares[path]:.1%} free on the file system of {path}, which it may write; free some and it goes on"
            await self._pauser.carry_out(run, Order("pause", "disk", reason=why, by=by))
        elif held and shares[path] >= OK:
            await self._pauser.carry_out(run, Order("resume", "disk", reason=f"{path} has room again", by=by))

    async def _free(self, paths: list[str]) -> dict[str, float]:
        """Return the free share by path; nothing while an earlier question still waits for its file system."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            # Not of a pool: the interpreter's end would wait for one that hangs.
            work = (self._statvfs, paths, asyncio.get_running_loop(), self._asked)
            threading.Thread(target=_ask, args=work, name="disks", daemon=True).start()
        done, _ = await asyncio.wait([self._asked], timeout=EVERY_S)
        return self._asked.result() if done else {}

    def _tell(self, path: str, share: float) -> None:
        """Say once that a disk gets full, and once that it is."""
        how = "full" if share < LOW else "low" if share < OK else ""
        if self._warned.get(path, "") == how:
            return
        self._warned[path] = how
        if how:
            log.warning("a disk that jobs write to gets full", extra={"path": path, "free": share})
            detail: dict[str, str | int | float | bool] = {"what": f"disk {how}", "path": path, "free": round(share, 4)}
            self._emit(None, self._notary.event(EventType.NODE_DEGRADED, detail=detail))

    def _set_full(self, full: bool) -> None:
        if full and not self.full:
            log.error("this node's own disk is full, it takes no work", extra={"path": self._home})
            detail: dict[str, str | int | float | bool] = {"what": "own disk full", "path": self._home}
            self._emit(None, self._notary.event(EventType.NODE_DEGRADED, detail=detail))
        self.full = full


def _writes(run: Run) -> tuple[str, ...]:
    if run.spec is None:
        return ()
    return tuple(grant.path for grant in run.spec.grants.paths if grant.mode == "write")


def _ask(
    statvfs: Callable[[str], Room],
    paths: list[str],
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[dict[str, float]],
) -> None:
    found = _shares(statvfs, paths)
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))


def _shares(statvfs: Callable[[str], Room], paths: list[str]) -> dict[str, float]:
    found = {}
    for path in paths:
        try:
            room = statvfs(path)
        except OSError:
            continue
        blocks = room.f_bavail / room.f_blocks if room.f_blocks else 1.0
        inodes = room.f_favail / room.f_files if room.f_files else 1.0
        found[path] = min(blocks, inodes)
    return found
