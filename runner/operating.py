"""Drain and undrain a node, suspend and unsuspend a queue: a signed order, and the receipts of the nodes.

Called by app and command line. Must never report a node as drained, or a queue as held, without the receipt of that
node for exactly this order (attack 21); who did not answer is named.
"""

from __future__ import annotations

import time
from typing import Literal, cast

from runner import orders
from runner.client import Client
from runner.errors import UsageError
from runner.orders import STEP_S, Replies
from runner.wire import ids
from runner.wire.command import Command, Selector
from runner.wire.errors import WireError
from runner.wire.receipt import NodeReceipt
from runner.wire.times import iso

__all__ = ["drain", "suspend", "undrain", "unsuspend"]

Op = Literal["drain", "undrain", "suspend", "unsuspend"]
_Local = Literal["unknown", "unconfirmed"]


def drain(
    client: Client,
    node: str,
    *,
    grace_s: float | None = None,
    checkpoint_s: float = 0.0,
    reason: str = "",
    wait_s: float = 15.0,
) -> NodeReceipt:
    """Have a node claim nothing more; return its receipt once nothing runs there, or the best known after ``wait_s``.

    ``grace_s``: what still runs then gets SIGTERM and, ``checkpoint_s`` later, SIGKILL; None: it may run to its end.
    Raises StoreError, UsageError.
    """
    command = orders.command(
        "drain",
        _named("node", node),
        None,
        reason=reason,
        grace_s=grace_s or 0.0,
        force=grace_s is not None,
        checkpoint_s=checkpoint_s,
    )
    return _to_node(client, command, node, wait_s)


def undrain(client: Client, node: str, *, reason: str = "", wait_s: float = 15.0) -> NodeReceipt:
    """Have a drained node claim again. Raises StoreError, UsageError."""
    command = orders.command("undrain", _named("node", node), None, reason=reason)
    return _to_node(client, command, node, wait_s)


def suspend(client: Client, queue: str, *, reason: str = "", wait_s: float = 15.0) -> list[NodeReceipt]:
    """Have no node claim from a queue; one receipt per live node. Raises StoreError, UsageError."""
    return _to_all(client, orders.command("suspend", _named("queue", queue), None, reason=reason), wait_s)


def unsuspend(client: Client, queue: str, *, reason: str = "", wait_s: float = 15.0) -> list[NodeReceipt]:
    """Have a suspended queue served again; one receipt per live node. Raises StoreError, UsageError."""
    return _to_all(client, orders.command("unsuspend", _named("queue", queue), None, reason=reason), wait_s)


def _named(kind: Literal["node", "queue"], name: str) -> Selector:
    try:
        return Selector(kind, ids.check_node(name) if kind == "node" else ids.check_name(name, "queue"))
    except WireError as error:
        raise UsageError(str(error)) from None


def _to_node(client: Client, command: Command, node: str, wait_s: float) -> NodeReceipt:
    keys = client.keys
    spot = [keys.control(node), keys.leases(), keys.nodes(), keys.clock()]
    (word,) = orders.words(client.script("pause", spot, [orders.document(client, command, "node", node=node)]))
    if word == "unknown":
        return _local(command, "unknown", node, "no node of this name ever registered; `ringfence nodes` lists them")
    best: NodeReceipt | None = None
    replies = Replies(client, command)
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        for card, reply in replies.read(min(left_s, STEP_S)):
            if isinstance(reply, NodeReceipt) and card.node == node:
                best = reply
        if best is not None and (command.op != "drain" or best.outcome != "done" or best.state == "drained"):
            return best
    if best is not None:
        return best
    why = "it is not alive; the order waits for it for an hour" if word == "away" else f"no answer in {wait_s:g} s"
    return _local(command, "unconfirmed", node, why)


def _to_all(client: Client, command: Command, wait_s: float) -> list[NodeReceipt]:
    keys, queue = client.keys, command.selector.value
    spot = [keys.control(), keys.leases(), keys.nodes(), keys.clock(), keys.suspended()]
    document = orders.document(client, command, "queue", queue=queue, op=command.op)
    heard: dict[str, NodeReceipt | None] = dict.fromkeys(orders.words(client.script("pause", spot, [document])))
    replies = Replies(client, command)
    deadline = time.monotonic() + wait_s
    while None in heard.values() and (left_s := deadline - time.monotonic()) > 0:
        for card, reply in replies.read(min(left_s, STEP_S)):
            if isinstance(reply, NodeReceipt):
                heard[card.node] = reply
    why = f"no answer in {wait_s:g} s; the order stands, and holds there as soon as the node hears of it"
    return [found or _local(command, "unconfirmed", node, why) for node, found in heard.items()]


def _local(command: Command, outcome: _Local, node: str, reason: str) -> NodeReceipt:
    """What this client knows by itself: not signed, and never a confirmed order."""
    return NodeReceipt(
        command=command.id,
        op=cast("Op", command.op),
        outcome=outcome,
        state="",
        done_at=iso(time.time_ns() // 1_000_000),
        nonce=ids.new_nonce(),
        node=node,
        reason=reason,
        by=command.by,
    )
