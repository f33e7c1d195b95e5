"""What agents and jobs say to the broker, read into values; and where a job sits.

Called by the desk. Must never take a place for a job's that it does not have to itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from broker.vault import peer
from broker.vault.errors import VaultUsageError
from broker.vault.peer import Message, Sender
from broker.vault.rules import Ask, Mode

__all__ = ["Seat", "ask_of", "channel_of", "read", "seat_of"]

_MODES: Final = ("proxy", "get", "file", "env")


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


def read(message: Message) -> dict[str, object]:
    """Return the object that a message holds. Raises ValueError, RecursionError."""
    found = json.loads(message.data)
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


def ask_of(item: object, order: Mapping[str, object]) -> Ask:
    """Return one secret that an ``open`` asks for. Raises VaultUsageError, KeyError."""
    if not isinstance(item, dict) or item.get("mode") not in _MODES:
        raise VaultUsageError("a secret is asked for with name and mode")
    tags = order.get("tags") or {}
    if not isinstance(tags, dict):
        raise VaultUsageError("tags are an object")
    task, command, host = order.get("task"), order.get("command"), item.get("host")
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
