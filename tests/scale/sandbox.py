"""A node's sandboxes for agents under load: the interface of Zygote, Slot and Attempt over jobs that only take time.

Put into an agent by nursery.py, in place of the containment. Everything else of the agent is real: claims, signatures,
admission, ledger, lease, ends. Must never be used where a test says anything about isolation.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, cast

from node_agent.containment.errors import SpawnError
from node_agent.containment.freezing import Still
from node_agent.containment.host import HostReport
from node_agent.containment.plan import Plan, Profile, Usage, Verdict
from tests.scale import floor

__all__ = ["Attempt", "Slot", "Zygote", "report"]

ENDED = {"done": "exit", "killed": "killed"}


def report() -> HostReport:
    """Return a host on which everything is enforced."""
    return HostReport(
        level="B",
        kernel="simulated",
        machine="simulated",
        python="3",
        user=os.geteuid(),
        enforces=("kill", "freeze", "pids", "memory", "cpu"),
        landlock_abi=5,
        userns=True,
    )


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Zygote:
    """One boot's ground: a process of floor.py, or with ``journal`` = None jobs end on the agent's own loop."""

    journal: Path | None = None
    _starts = itertools.count(1)

    def __init__(self, *, level: str) -> None:
        self.level = level
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keys = itertools.count(1)
        self._attempts: dict[int, Attempt] = {}
        self._deadline_ns: int | None = None
        self._line: socket.socket | None = None
        self._pid = 0

    async def start(self) -> None:
        """Have the process stand, if there is to be one."""
        if self.journal is not None:
            name = f"{os.getpid()}.{next(self._starts)}"
            self._pid, self._line = floor.fork(self.journal, name, boottime_ns)
            self._line.setblocking(False)
            asyncio.get_running_loop().add_reader(self._line.fileno(), self._hear)

    async def stop(self) -> None:
        """End the process and what still runs on it. Idempotent."""
        line, self._line = self._line, None
        if line is not None:
            asyncio.get_running_loop().remove_reader(line.fileno())
            line.close()
            await asyncio.to_thread(os.waitpid, self._pid, 0)
        for key in tuple(self._attempts):
            self._over(key, "eof")

    def renew(self, deadline_ns: int) -> None:
        """Pass the deadline on, once for all slots."""
        if deadline_ns != self._deadline_ns:
            self._deadline_ns = deadline_ns
            self._send({"deadline": deadline_ns})

    def lapsed(self) -> bool:
        """Whether nothing may start."""
        return self._deadline_ns is not None and boottime_ns() >= self._deadline_ns

    def run(self, attempt: Attempt, hold_s: float) -> int:
        """Let a job run for so long; return what to kill it by."""
        key = next(self._keys)
        self._attempts[key] = attempt
        if self.journal is None:
            asyncio.get_running_loop().call_later(hold_s, self._over, key, "done")
        elif self._line is None:
            self._over(key, "eof")
        else:
            job, number = attempt.name.rsplit(".", 1)
            self._send({"key": key, "job": job, "attempt": int(number), "hold_s": hold_s})
        return key

    def kill(self, key: int) -> None:
        """End a job."""
        if self.journal is None:
            self._over(key, "killed")
        else:
            self._send({"op": "kill", "key": key})

    def _send(self, order: dict[str, object]) -> None:
        if self._line is not None:
            try:
                self._line.send(json.dumps(order).encode())
            except OSError:
                self._lose()

    def _hear(self) -> None:
        line = self._line
        try:
            data = b"" if line is None else line.recv(floor.MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        told = json.loads(data)
        self._over(int(told["key"]), str(told["how"]))

    def _lose(self) -> None:
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
        for key in tuple(self._attempts):
            self._over(key, "eof")
        if not self.died.done():
            self.died.set_result(None)

    def _over(self, key: int, how: str) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.over(how)


class Attempt:
    """One simulated job: what the supervisor asks of an attempt."""

    def __init__(self, zygote: Zygote, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.stdout, self._out = _pipe()
        self.stderr, err = _pipe()
        os.close(err)
        self.verdict: asyncio.Future[Verdict] = loop.create_future()
        self.proved: asyncio.Future[None] = loop.create_future()
        self._zygote = zygote
        self._key: int | None = None
        self._result: bytes | None = None
        self._begun_s = loop.time()
        self._killed_s: float | None = None
        self.method = "simulated"
        self.on_open: Callable[[], object] | None = None

    @property
    def kill_ms(self) -> float:
        """From the kill until now."""
        now = asyncio.get_running_loop().time()
        return round(1000 * (now - (self._killed_s or now)), 3)

    async def release(self, payload: bytes) -> None:
        """Let the job run as its arguments say: ``hold_ms``, ``fails`` (attempts that raise), ``says``."""
        asked = cast("dict[str, dict[str, object]]", json.loads(payload))
        named = asked.get("kwargs") or {}
        number = int(self.name.rsplit(".", 1)[1])
        if number <= int(str(named.get("fails", 0))):
            self._result = b'{"error":{"type":"OSError","message":"on purpose","traceback":""}}'
        else:
            self._result = b'{"ok":%d}' % number
        if says := str(named.get("says", "")):
            os.write(self._out, says.encode())
        if self._killed_s is not None:
            self.over("killed")
        else:
            self._key = self._zygote.run(self, int(str(named.get("hold_ms", 0))) / 1000)

    def over(self, how: str) -> None:
        """The job has ended."""
        if self.verdict.done():
            return
        self._close_out()
        kind = cast("Literal['exit', 'killed', 'worker_died']", ENDED.get(how, "worker_died"))
        usage = Usage(wall_s=round(asyncio.get_running_loop().time() - self._begun_s, 6), processes=1)
        killed = {"method": self.method, "kill_ms": self.kill_ms} if how == "killed" else {}
        self.verdict.set_result(Verdict(kind, usage=usage, forced=self._killed_s is not None, **killed))  # type: ignore[arg-type]  # as Verdict has them
        self.proved.set_result(None)

    def kill(self) -> None:
        """End the job."""
        if self.verdict.done() or self._killed_s is not None:
            return
        self._killed_s = asyncio.get_running_loop().time()
        if self._key is None:
            self.over("killed")
        else:
            self._zygote.kill(self._key)

    terminate = kill

    def tell(self, number: int) -> None:
        """It hears every signal as its end."""
        self.kill()

    def hear(self) -> bool:
        """It says nothing."""
        return True

    def listens_itself(self) -> bool:
        """It has no channel, and opens no session."""
        return True

    async def freed(self) -> None:
        """It holds no memory."""

    def cpu_s(self) -> float:
        """It uses none."""
        return 0.0

    def sockets(self) -> int:
        """It has none."""
        return 0

    async def freeze(self, frozen: bool, timeout_s: float = 1.0) -> Still:
        """Nothing moves in a simulated job."""
        return Still(True, 0, "simulated")

    def unready(self, verdict: Verdict) -> None:
        """It is always ready."""

    def result(self, limit: int) -> bytes | None:
        """Return what the task would have written."""
        return self._result

    def close(self) -> None:
        """Give back what is open; idempotent."""
        self._close_out()

    def _close_out(self) -> None:
        if self._out >= 0:
            os.close(self._out)
            self._out = -1


class Slot:
    """One simulated slot."""

    def __init__(
        self,
        index: int,
        zygote: Zygote,
        group: object,
        *,
        paths: Sequence[str] = (),
        clock: Callable[[], int] = boottime_ns,
    ) -> None:
        self.index = index
        self.healthy = True
        self.mould_pid: int | None = None
        self._zygote = zygote
        self._attempt: Attempt | None = None

    def renew(self, deadline_ns: int) -> None:
        """Take the newest deadline."""
        self._zygote.renew(deadline_ns)

    async def prepare(self, profile: Profile) -> None:
        """A slot takes one attempt at a time. Raises SpawnError."""
        if self._attempt is not None and not self._attempt.proved.done():
            raise SpawnError("the slot's last attempt is not proved gone")

    async def begin(self, plan: Plan, fds: Sequence[int]) -> Attempt:
        """Start an attempt. Raises SpawnError."""
        if self._zygote.lapsed():
            raise SpawnError("the lease of this node has run out")
        await self.prepare(Profile(tenant="", signer=""))
        self._attempt = Attempt(self._zygote, plan.attempt)
        return self._attempt

    async def close(self) -> None:
        """End what runs. Idempotent."""
        if self._attempt is not None:
            self._attempt.kill()
            await asyncio.wait([self._attempt.verdict])


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    return read, write
