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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker.vault.errors import VaultError

__all__ = ["Cleaning", "start"]

#: The scrubber is our own and reads at once; one that does not for so long is none.
_SEND_S: Final = 2
_MAX_REPLY_BYTES: Final = 4096


@dataclass(slots=True, eq=False)
class Cleaning:
    """One scrubber. ``leaked`` hears of each stream that held something: attempt and how often."""

    line: socket.socket
    process: subprocess.Popen[bytes]
    leaked: Callable[[str, int], None] = lambda attempt, hits: None
    _number: int = 0
    _files: dict[int, Callable[[bool], None]] = field(default_factory=dict)

    def tell(self, attempt: str, name: str, value: bytes) -> None:
        """Have a value looked for in an attempt's output. Raises VaultError."""
        self._send({"op": "value", "attempt": attempt, "name": name, "value": base64.b64encode(value).decode()})

    def streams(self, attempt: str, fds: Sequence[int]) -> None:
        """Put the scrubber between a job and its agent. The descriptors stay the caller's. Raises VaultError."""
        self._send({"op": "streams", "attempt": attempt}, fds)

    def file(self, attempt: str, fds: Sequence[int], done: Callable[[bool], None]) -> None:
        """Copy a file without the values; ``done`` hears whether that worked. Raises VaultError."""
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
            self.leaked(str(record["leak"]), int(record["hits"]))
            return
        done = self._files.pop(int(record["file"]), None)
        if done is not None:
            done("err" not in record)

    def close(self) -> None:
        """End the scrubber. Idempotent."""
        self.line.close()
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def _send(self, record: dict[str, object], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.line, [json.dumps(record).encode()], list(fds), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise VaultError(f"the scrubber does not answer ({error.strerror})") from None


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
    return Cleaning(near, process)
