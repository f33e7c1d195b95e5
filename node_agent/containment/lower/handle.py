"""The agent's handle on one mould of levels C to F, for one attempt: lifeline, control socket, proof.

Called by slots.py (makes it, begins) and by the attempt (kills, waits). Must never signal by pid, and never say that a
mould is gone without a word of proof from it or from its guard: without a namespace, their end alone proves nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from node_agent.containment.errors import SpawnError
from node_agent.containment.moulds import pair
from node_agent.containment.orders import End
from node_agent.containment.plan import Level
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError

__all__ = ["LowMould"]

MODULE: Final = "node_agent.containment.lower.mould"
METHODS: Final = {"C": "subreaper", "D": "uid", "E": "subreaper", "F": "killpg"}
START_TIMEOUT_S: Final = 20.0
#: The guard ends right after the mould; on a host that is so slow it is waited for without blocking.
REAP_S: Final = 2.0
_MAX_RECORD_BYTES: Final = 8192
_MAX_ERROR_BYTES: Final = 4000


class LowMould:
    """One mould and its guard, from the exec to the proof that nothing of the attempt is left."""

    def __init__(
        self, level: Level, process: subprocess.Popen[bytes], ends: tuple[socket.socket, socket.socket]
    ) -> None:
        """``ends``: ours of lifeline and control."""
        self._loop = asyncio.get_running_loop()
        self.level = level
        self.method = METHODS[level]
        self.guard = process.pid
        #: The mould's, once it is up.
        self.pid = process.pid
        self.used = False
        self.up: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.on_end: Callable[[End], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self._process = process
        self._lifeline, self._control = ends
        self._pidfd: int | None = None
        self._uid = 0
        self._held: asyncio.Future[tuple[int, int]] | None = None
        self._word = False
        self._asked = False
        self._clearing: tuple[subprocess.Popen[bytes], int] | None = None
        for end in ends:
            end.setblocking(False)
        self._loop.add_reader(self._control, self._read)

    @classmethod
    async def start(
        cls, level: Level, join_paths: Sequence[str], job_fd: int | None, *, python: str = sys.executable
    ) -> LowMould:
        """Return a mould that is ready to begin. Raises SpawnError."""
        lifeline, far_lifeline = pair()
        control, far_control = pair()
        fds = [far_lifeline.fileno(), far_control.fileno(), -1 if job_fd is None else job_fd]
        process = subprocess.Popen(
            [python, "-I", "-B", "-m", MODULE, level, *map(str, fds), *join_paths],
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[fd for fd in fds if fd >= 0],
            # Ctrl-C at a terminal is for the agent, which ends its moulds in order.
            start_new_session=True,
        )
        far_lifeline.close()
        far_control.close()
        mould = cls(level, process, (lifeline, control))
        try:
            await asyncio.wait_for(asyncio.shield(mould.up), START_TIMEOUT_S)
        except (SpawnError, TimeoutError) as error:
            said = _said(process)
            mould.close()
            raise SpawnError(f"no mould at level {level}: {said or str(error) or 'no answer'}") from error
        except BaseException:
            mould.close()
            raise
        finally:
            if process.stderr is not None:
                process.stderr.close()
        return mould

    def renew(self, deadline_ns: int) -> None:
        """Write a deadline. Never blocks: unread records can only make the mould's deadline older, the safe side."""
        with suppress(OSError):
            self._lifeline.send(struct.pack("q", deadline_ns))

    def begin(self, attempt: str, uid: int, channel_fd: int) -> None:
        """Have a worker forked that holds ``channel_fd`` and will be ``uid``. Raises SpawnError."""
        self.used = True
        self._uid = uid
        order = codec.dump({"op": "begin", "attempt": attempt, "uid": uid})
        try:
            socket.send_fds(self._control, [order], [channel_fd])
        except OSError as error:
            raise SpawnError(f"the mould does not answer: {error}") from error

    def tell(self, _attempt: str, number: int) -> None:
        """Have a signal sent to the worker, if it still runs."""
        self._tell(op="signal", number=int(number))

    def hold(self, _attempt: str, *, still: bool) -> asyncio.Future[tuple[int, int]]:
        """Have everything below the mould stopped, or let go on; resolves to (standing still, not yet)."""
        if self._held is None or self._held.done():
            self._held = self._loop.create_future()
            if self.gone.done():
                self._held.set_result((0, 0))
        self._tell(op="stop" if still else "cont")
        return self._held

    def kill(self) -> None:
        """Have everything killed. Asked again, the mould itself is killed: its guard then does the rest."""
        if self._asked and self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._asked = True
        self._tell(op="kill")

    def close(self) -> None:
        """Give the descriptors back; the closed lifeline ends a mould that still lives, and its job. Idempotent."""
        for end in (self._control, self._lifeline):
            if end.fileno() >= 0:
                self._loop.remove_reader(end)
                end.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._clearing is not None:
            self._loop.remove_reader(self._clearing[1])
            os.close(self._clearing[1])
            self._clearing = None
        self._collect()
        for future in (self.up, self.gone, self._held):
            if future is not None and not future.done():
                future.cancel()

    def _collect(self) -> None:
        """Reap the guard: it ends in no time after its socket, or is waited for without blocking."""
        try:
            self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            pidfd = os.pidfd_open(self._process.pid)

            def reap() -> None:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
                self._process.wait()

            self._loop.add_reader(pidfd, reap)

    def _tell(self, **order: Json) -> None:
        with suppress(OSError):
            self._control.send(codec.dump(order))

    def _read(self) -> None:
        while True:
            try:
                data = self._control.recv(_MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # An order of ours was not read before the end: told first, before the words that wait here.
                continue
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._control)
                self._ended()
                return
            try:
                self._take(codec.load(data))
            except (WireError, KeyError, TypeError, ValueError):
                self.kill()

    def _take(self, record: Json) -> None:
        if not isinstance(record, dict):
            raise TypeError("no object")
        match record["op"]:
            case "up":
                self._pin(int(str(record["pid"])))
                self.up.set_result(None)
            case "failed":
                if not self.up.done():
                    self.up.set_exception(SpawnError(str(record.get("detail"))))
            case "held":
                if self._held is not None and not self._held.done():
                    self._held.set_result((int(str(record["still"])), int(str(record["moving"]))))
            case "gone":
                self._word = True
            case "end":
                end = End(
                    attempt=str(record["attempt"]),
                    status=int(str(record["status"])),
                    cpu_s=float(str(record["cpu_s"])),
                    max_rss_bytes=int(str(record["max_rss_bytes"])),
                    processes=int(str(record["processes"])),
                )
                if self.on_end is not None:
                    self.on_end(end)
            case _:
                raise ValueError("unknown op")

    def _pin(self, pid: int) -> None:
        """Open the mould's pidfd; that it is the guard's child is read after that, so no other process is meant."""
        self.pid = pid
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            if parent == self.guard:
                self._pidfd = pidfd
            else:
                os.close(pidfd)

    def _ended(self) -> None:
        """Both processes are gone. What their last word did not prove is proved now, or never claimed."""
        if not self.up.done():
            self.up.set_exception(SpawnError("the mould ended before it was ready"))
            self.up.exception()  # the waiter may be gone already
        # At C the attempt looks at the group itself. Without an attempt there was nobody to kill.
        if self._word or self.level == "C" or not self.used:
            self._resolve()
        elif self.level == "D":
            words = [sys.executable, "-I", "-B", "-m", MODULE, "clear", str(self._uid)]
            process = subprocess.Popen(words, env={}, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True)
            pidfd = os.pidfd_open(process.pid)
            self._clearing = process, pidfd
            self._loop.add_reader(pidfd, self._cleared)

    def _cleared(self) -> None:
        if self._clearing is None:
            return
        process, pidfd = self._clearing
        self._clearing = None
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if process.wait() == 0:
            self._resolve()

    def _resolve(self) -> None:
        if self._held is not None and not self._held.done():
            self._held.set_result((0, 0))
        if not self.gone.done():
            self.gone.set_result(None)
        if self.on_gone is not None:
            self.on_gone()


def _said(process: subprocess.Popen[bytes]) -> str:
    """Return the end of what it wrote so far; its child may hold the pipe, so nothing is waited for."""
    if process.stderr is None:
        return ""
    os.set_blocking(process.stderr.fileno(), False)
    with suppress(BlockingIOError):
        return os.read(process.stderr.fileno(), _MAX_ERROR_BYTES).decode(errors="replace").strip()[-500:]
    return ""
