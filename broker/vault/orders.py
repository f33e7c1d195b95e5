"""What agents and jobs say to the broker, read into values; and where a job sits.

Called by the desk. Must never take a place for a job's that it does not have to itself.

    agent → broker   {"op": "open", "attempt", "job", "asks": […], "level", "uid", "sealed": how many} + the channel's
                     end, the mould's pidfd, the worker's pidfd and (level B) the mould's pid namespace
                     {"op": "sealed", "attempt", "place", "data"}, before the streams
                     {"op": "streams", "attempt"} + the job's two read ends, the agent's two write ends and its alarm
                     {"op": "service", "attempt"} + a listener on the job's own loopback
                     {"op": "file", "attempt"} + a file to read and one to write
                     {"op": "proxy", "attempt"} + one end of the egress process's line (lines.py)
                     {"op": "approve" | "deny", "attempt", "name", "by"} · {"op": "close", "attempt"} · {"op": "ping"}
    job → broker     {"op": "list"} · {"op": "get", "name"} · {"op": "sealed", "place"}
    broker → any     {"ok": true, …} · {"ok": false, "err": CODE}

The codes for a job: denied expired used-up pending not-you too-big garbage slow-down unavailable.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from broker.egress.errors import BadRequestError
from broker.egress.rules import canonical
from broker.vault import peer
from broker.vault.errors import VaultUsageError
from broker.vault.peer import Sender
from broker.vault.rules import Ask, Mode

__all__ = ["Seat", "ask_of", "channel_of", "host_of", "read", "seat_of"]

_MODES: Final = ("proxy", "get", "file", "env")
_HTTPS_PORT: Final = 443


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a job sits, as the kernel tells it of a sender: an exclusive uid (A), or a pid namespace (B)."""

    level: Literal["A", "B"]
    uid: int
    namespace: tuple[int, int] | None = None

    def holds(self, sender: Sender) -> bool:
        """Return whether the sender is one of this job's live processes."""
        if sender.pidfd is None or sender.uid != self.uid:
            return False
        if self.level == "B" and (self.namespace is None or peer.pid_namespace(sender) != self.namespace):
            return False
        return peer.alive(sender.pidfd)


def read(data: bytes) -> dict[str, object]:
    """Return the object that a message holds. Raises ValueError, RecursionError."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("no object")  # noqa: TRY004 - the sender's text has no value of ours
    return found


def seat_of(order: Mapping[str, object], fds: tuple[int, ...]) -> Seat:
    """Return where the job of an ``open`` sits. Raises VaultUsageError: that place would not tell it from others."""
    level, uid = order["level"], order["uid"]
    if not isinstance(uid, int) or uid < 0 or level not in ("A", "B"):
        raise VaultUsageError("a lease needs level A or B and the job's uid")
    if len(fds) != (3 if level == "A" else 4):
        raise VaultUsageError("a lease needs the channel, the pidfds of mould and worker, and at B the pid namespace")
    if level == "A":
        if uid in (0, os.geteuid()):
            # An identity that is not the job's alone tells nothing.
            raise VaultUsageError("at level A a job has a uid of its own")
        return Seat("A", uid)
    namespace = peer.namespace_of(fds[3])
    own = os.stat("/proc/self/ns/pid")
    if namespace == (own.st_dev, own.st_ino):
        raise VaultUsageError("at level B a job has a pid namespace of its own")
    return Seat("B", uid, namespace)


def channel_of(fd: int) -> socket.socket:
    """Take over the broker's end of a job's channel. Raises VaultUsageError: it keeps no record borders."""
    channel = socket.socket(fileno=fd)
    if channel.family != socket.AF_UNIX or channel.type != socket.SOCK_SEQPACKET:
        channel.detach()
        raise VaultUsageError("a channel is one end of a SEQPACKET pair")
    return channel


@functools.lru_cache(maxsize=1024)
def host_of(text: str) -> str:
    """Return the one form of a proxied secret's host, as rules name it: HOST, or HOST:PORT for another port than 443.

    Raises:
        VaultUsageError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(_HTTPS_PORT)
    try:
        found = canonical(host, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0)
    except BadRequestError as error:
        raise VaultUsageError(f"the host of a proxied secret is HOST or HOST:PORT: {error}") from None
    return found.host if found.port == _HTTPS_PORT else str(found)


def ask_of(item: object, order: Mapping[str, object]) -> Ask:
    """Return one secret that an ``open`` asks for. Raises VaultUsageError, KeyError."""
    if not isinstance(item, dict) or item.get("mode") not in _MODES:
        raise VaultUsageError("a secret is asked for with name and mode")
    tags = order.get("tags") or {}
    if not isinstance(tags, dict):
        raise VaultUsageError("tags are an object")
    task, command, host = order.get("task"), order.get("command"), item.get("host")
    if item["mode"] == "proxy":
        host = host_of(str(host or ""))
    return Ask(
        secret=str(item["name"]),
        mode=cast("Mode", item["mode"]),
        tenant=str(order["tenant"]),
        queue=str(order["queue"]),
        task=None if task is None else str(task),
        command=None if command is None else str(command),
        host=None if host is None else str(host),
        tags={str(key): str(value) for key, value in tags.items()},
    )
