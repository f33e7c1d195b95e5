"""The broker's line to its scrubber: what to look for, which streams, and what was found.

Called by the desk and by service.py, which starts the scrubber. Must never let a value be released that the scrubber of
its job has not been told first.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker.vault.errors import VaultError

__all__ = ["Cleaning", "start"]

#: The scrubber is our own and reads at once; one that does not for so long is none.
_SEND_S: Final = 2
_END_S: Final = 5.0
_CONFINED_S: Final = 10.0
_LOOK_S: Final = 0.005
_MAX_STATUS_BYTES: Final = 16 * 1024
_MAX_REPLY_BYTES: Final = 4096


@dataclass(slots=True, eq=False)
class Cleaning:
    """One scrubber. ``leaked`` hears of each stream that held something: attempt, how often, and of which secrets."""

    line: socket.socket
    process: subprocess.Popen[bytes]
    status: int
    leaked: Callable[[str, int, list[str]], None] = lambda attempt, hits, names: None
    _number: int = 0
    _files: dict[int, Callable[[dict[str, bool] | None], None]] = field(default_factory=dict)

    def tell(self, attempt: str, name: str, value: bytes, *, kill: bool = False) -> None:
        """Have a value looked for in an attempt's output; ``kill``: the job ends if it is found. Raises VaultError."""
        text = base64.b64encode(value).decode()
        self._send({"op": "value", "attempt": attempt, "name": name, "value": text, "kill": kill})

    def streams(self, attempt: str, fds: Sequence[int]) -> None:
        """Put the scrubber between a job and its agent. The descriptors stay the caller's. Raises VaultError."""
        self._send({"op": "streams", "attempt": attempt}, fds)

    def file(self, attempt: str, fds: Sequence[int], done: Callable[[dict[str, bool] | None], None]) -> None:
        """Copy a file without the values; ``done`` hears of which it held (name: kill), or None: it failed.

        Raises:
            VaultError.
        """
        self._number += 1
        self._files[self._number] = done
        self._send({"op": "file", "attempt": attempt, "id": self._number}, fds)

    def forget(self, attempt: str) -> None:
        """The attempt is over. Never raises."""
        with suppress(VaultError):
            self._send({"op": "forget", "attempt": attempt})

    def hear(self) -> None:
        """Take one answer.

        Raises:
            VaultError: the scrubber has ended, and with it what jobs print.
        """
        try:
            data = self.line.recv(_MAX_REPLY_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise VaultError("the scrubber has ended")
        record = json.loads(data)
        if "leak" in record:
            self.leaked(str(record["leak"]), int(record["hits"]), [str(name) for name in record["names"]])
            return
        done = self._files.pop(int(record["file"]), None)
        if done is not None:
            done(None if "err" in record else dict(record["leaked"]))

    def await_confined(self) -> None:
        """Wait for the kernel's word that the scrubber has given up what it does not need.

        Raises:
            VaultError: it has not, in time.
        """
        until_s = time.monotonic() + _CONFINED_S
        while not _filtered(self.status):
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise VaultError("the scrubber does not come up confined: see what it said above")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the scrubber. Idempotent."""
        self.line.close()
        if self.status >= 0:
            os.close(self.status)
            self.status = -1
        # Where it has a user of its own we may not: then it ends because its line has.
        with suppress(ProcessLookupError, PermissionError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)

    def _send(self, record: dict[str, object], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.line, [json.dumps(record).encode()], list(fds), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise VaultError(f"the scrubber does not answer ({error.strerror})") from None


def _look_at(pid: int) -> int:
    """Open the kernel's word on a child while we are still of its user: later it may be hidden from us."""
    return os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)


def _filtered(status: int) -> bool:
    try:
        return b"\nSeccomp:\t2\n" in os.pread(status, _MAX_STATUS_BYTES, 0)
    except ProcessLookupError:
        return False


def start(uid: int | None) -> Cleaning:
    """Start a scrubber, under a user of its own if there is one."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
    words = [sys.executable, "-I", "-B", "-m", "broker.scrub", str(far.fileno())]
    with far:
        process = subprocess.Popen(
            [*words, *([] if uid is None else [str(uid)])],
            pass_fds=[far.fileno()],
            env={},
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
        )
    return Cleaning(near, process, _look_at(process.pid))
