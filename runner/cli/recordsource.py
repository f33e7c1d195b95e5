"""Where `ringfence audit` gets a record from, and what it holds it against: files, cards, the store, receipts.

Port: node_agent.kernel. Called by audit.py. Must never take a key for a node's that the fleet key has not signed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node_agent.kernel import segments
from node_agent.kernel.recordcheck import Anchor, Known
from node_agent.kernel.segments import Segment
from runner import keyring, signing, trust
from runner.app import App
from runner.errors import ConfigError, StoreError, UsageError
from runner.home import Home
from runner.signing import Signer
from runner.wire import flight, record
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.flight import FlightHead
from runner.wire.receipt import Receipt

if TYPE_CHECKING:
    from runner.client import Client

__all__ = ["Folder", "anchors_of", "following", "given", "known_of", "nodes_of", "opener_of"]

_POLL_S: Final = 0.3
_PAGE: Final = 1000
_MAX_HEAD_BYTES: Final = 1024
_MAX_FILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Folder:
    """The record of one node of this home."""

    node: str
    path: Path

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Hold the folder open. Raises ConfigError."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self.path} can't be read: {error.strerror}") from None
        try:
            yield fd
        finally:
            os.close(fd)


def nodes_of(home: Home, name: str | None) -> list[Folder]:
    """Return the records that lie in this home, or the one of a node. Raises ConfigError."""
    root = home.path / "nodes"
    names = [name] if name is not None else sorted(path.name for path in root.glob("*") if path.is_dir())
    found = [Folder(each, home.node(each) / segments.FOLDER) for each in names]
    found = [folder for folder in found if folder.path.is_dir()]
    others = sorted(path.parent.name for path in root.glob(f"*/{segments.FOLDER}"))
    if not found and name is not None and others:
        raise ConfigError(f"no flight record of a node {name} here, but of {', '.join(others)}")
    if not found:
        raise ConfigError(f"no flight record below {root}: is this the --home of an agent on this host?")
    return found


def opener_of(home: Home, path: Path | None) -> Signer | None:
    """Return the key that opens the seeds: the file that was named, or the fleet's key if this home holds it."""
    if path is not None:
        return keyring.load_key(path)
    key = home.key("fleet")
    with contextlib.suppress(OSError):
        if key.exists():
            return keyring.load_key(key)
    return None


def known_of(home: Home, node: str) -> str:
    """Return a node's public key, as its card in this home says. Raises ConfigError."""
    # A card that has run out still says whose record this is.
    card = trust.read_card(keyring.load_card(home, node), keyring.load_fleet_public(home), 0)
    if card is None or card.node != node:
        raise ConfigError(f"{home.card(node)} is no card of node {node} that the fleet's key has signed")
    return card.public


def given(words: Iterable[str], receipts: Iterable[Path], node: str, public: str) -> tuple[Anchor, ...]:
    """Return the heads that the caller has kept. Raises UsageError: one is none, or not of this node."""
    heads = []
    for word in words:
        try:
            heads.append(Anchor(*flight.parse_head(word), where=f"--anchor {word[:24]}…"))
        except WireError as error:
            raise UsageError(str(error)) from None
    for path in receipts:
        try:
            loaded = json.loads(path.read_bytes()[:_MAX_FILE_BYTES])
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} can't be read as JSON: {error}") from None
        for one in loaded if isinstance(loaded, list) else [loaded]:
            heads += _of_receipt(path, one, node, public)
    return tuple(heads)


def _of_receipt(path: Path, found: object, node: str, public: str) -> list[Anchor]:
    try:
        receipt = record.decode(Receipt, found)
    except WireError as error:
        raise UsageError(f"{path} holds no receipt: {error}") from None
    if receipt.node != node or not receipt.flight:
        return []
    if not signing.verify_receipt(public, receipt):
        raise UsageError(f"the receipt in {path} is not signed by node {node}")
    return [Anchor(*flight.parse_head(receipt.flight), where=f"the receipt of {receipt.job}")]


def anchors_of(app: App, known: Known, tenants: Iterable[str]) -> tuple[Known, list[str]]:
    """Return what the store holds of a node's heads, and what is wrong with it. Raises StoreError."""
    client, faults = app.client(), list[str]()
    key = client.keys.anchor(known.node)
    added, entries = 0, list[tuple[str, dict[str, bytes]]]()
    with _misuse(faults, f"the key {key}, where the store keeps this record's anchors"):
        # Before the entries are read: an agent adds to them meanwhile.
        added = client.entries_added(key)
        entries = list(_entries(client, key))
    stream = []
    for identity, fields in entries:
        payload, signature = fields.get("head", b""), fields.get("sig", b"").decode("ascii", "replace")
        head = _head(payload)
        signed = head is not None and signing.verify(known.public, Domain.HEAD, payload, signature)
        if head is None or not signed or head.node != known.node:
            faults.append(f"the anchor {identity} in the store is not signed by the node")
            continue
        stream.append(Anchor(head.count, head.hash, f"the anchor {identity} in the store", identity))
    heads = list(known.heads)
    for tenant in tenants:
        place = client.keys.events(tenant)
        with _misuse(faults, f"the key {place}, where the store keeps the ends of tenant {tenant}"):
            heads += _ends(app, tenant, known.node)
    return replace(known, stream=tuple(stream), added=added, heads=tuple(heads)), faults


@contextlib.contextmanager
def _misuse(faults: list[str], what: str) -> Iterator[None]:
    """A key that somebody put another type under is a fault of what is checked, no reason to check no further."""
    try:
        yield
    except StoreError as error:
        if not str(error.__cause__ or "").startswith("WRONGTYPE"):
            raise
        faults.append(f"{what}, is no stream: somebody has replaced it; remove it there, the agent makes it anew")


def _ends(app: App, tenant: str, node: str) -> list[Anchor]:
    heads = []
    for event in app.events(tenant=tenant):
        text = event.detail.get("flight")
        if event.type == EventType.JOB_ENDED and event.node == node and event.verified and text:
            with contextlib.suppress(WireError):
                heads.append(Anchor(*flight.parse_head(str(text)), where=f"the end of {event.job}"))
    return heads


def following(folder: int, sleep: Callable[[float], object] = time.sleep) -> Iterator[tuple[Segment, Iterable[bytes]]]:
    """Yield each file with its lines, those that are written from now on, too, for ever."""
    done = 0
    while True:
        for segment in [each for each in segments.found(folder) if each.number > done]:
            done = segment.number
            yield segment, _growing(folder, segment.number, sleep)
        sleep(_POLL_S)


def _growing(folder: int, number: int, sleep: Callable[[float], object]) -> Iterator[bytes]:
    """Yield a file's lines until it has ended and another one has begun."""
    fd = os.open(segments.name_of(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    rest, at, last = b"", 0, False
    try:
        while True:
            part = os.pread(fd, 1 << 20, at)
            at += len(part)
            *whole, rest = (rest + part).split(b"\n")
            yield from (line + b"\n" for line in whole)
            if not part:
                if last:
                    return
                # Once more after the next one has begun: what was written in between is of this one.
                last = any(each.number > number for each in segments.found(folder))
                if not last:
                    sleep(_POLL_S)
    finally:
        os.close(fd)


def _entries(client: Client, key: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    start = "-"
    while entries := client.span(key, start, _PAGE):
        for entry in entries:
            yield entry.id, dict(entry.fields)
        start = f"({entries[-1].id}"


def _head(payload: bytes) -> FlightHead | None:
    try:
        return record.loads(FlightHead, payload, limit_bytes=_MAX_HEAD_BYTES)
    except WireError:
        return None
