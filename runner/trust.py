"""Whose signatures count: trust.toml on each node, node cards for clients.

Called by keys (writes both), node agents (load trust.toml at start) and clients (verify cards). Must never take an
entry it does not fully understand: an unknown key, right or type refuses the whole file.

    [[key]]
    id = "0123456789abcdef"             # label: first 16 hex digits of SHA-256 of the public key
    public = "…64 hex digits…"
    may = ["enqueue", "kill", "operate"]
    tenants = ["main"]                  # "*" = every tenant; so do queues
    queues = ["*"]
    revoked = true                      # optional; a revoked key stays listed, so that it can't come back
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from runner import signing
from runner.errors import ConfigError, UsageError
from runner.files import read_file, replace_file
from runner.wire import ids, record
from runner.wire.card import MAX_CARD_BYTES, NodeCard, SignedCard, TrustedKey
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.receipt import Outcome
from runner.wire.spec import NEEDS_BROKER
from runner.wire.states import END_STATES, State

__all__ = [
    "RIGHTS",
    "Trust",
    "is_end_of",
    "is_value_of",
    "load",
    "pack_card",
    "read_card",
    "save",
    "serves",
    "signed_outcome",
]

RIGHTS: Final = ("enqueue", "kill", "operate")
MAX_TRUST_BYTES: Final = 1024 * 1024
_MAX_OUTCOME_BYTES: Final = 256 * 1024
_QUEUE: Final = re.compile(r"\*|[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_HEAD: Final = (
    "# Whose jobs and commands this node takes. Written by `ringfence keys`; agents read it at their start.\n"
)


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys of one trust.toml, each at most once."""

    keys: tuple[TrustedKey, ...] = ()

    def by_id(self) -> dict[str, TrustedKey]:
        """Return the keys by their label; the whole public key is what verifies."""
        return {key.id: key for key in self.keys}

    def with_key(self, key: TrustedKey) -> Trust:
        """Return the trust with ``key`` added, or replaced if its public key is listed. Raises ConfigError."""
        _check(key)
        clash = [old for old in self.keys if old.id == key.id and old.public != key.public]
        if clash:
            raise ConfigError(f"another key has the label {key.id}: make a new key")
        return Trust((*(old for old in self.keys if old.public != key.public), key))

    def revoke(self, label: str) -> tuple[Trust, TrustedKey]:
        """Return the trust with the key of that label (or public key) revoked, and that key. Raises ConfigError."""
        for key in self.keys:
            if label in {key.id, key.public}:
                gone = replace(key, revoked=True)
                return Trust(tuple(gone if old is key else old for old in self.keys)), gone
        raise ConfigError(f"no key {label[:64]!r} in this trust.toml: `ringfence keys show` lists them")


def load(path: Path) -> Trust:
    """Return a trust.toml. Raises ConfigError (missing, not TOML, unknown content), UnsafeFileError."""
    data = read_file(path, MAX_TRUST_BYTES, secret=False)
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    entries = document.pop("key", [])
    if document or not isinstance(entries, list):
        raise ConfigError(f"{path} holds more than [[key]] entries: remove {', '.join(sorted(document)) or 'key'}")
    trust = Trust()
    for number, entry in enumerate(entries, 1):
        try:
            key = record.decode(TrustedKey, entry)
            grown = trust.with_key(key)
        except (WireError, ConfigError) as error:
            raise ConfigError(f"{path}, entry {number}: {error}") from None
        if len(grown.keys) == len(trust.keys):
            raise ConfigError(f"{path}, entry {number}: key {key.id} is listed twice")
        trust = grown
    return trust


def save(path: Path, trust: Trust) -> None:
    """Write a trust.toml anew, atomically, 0600."""
    replace_file(path, (_HEAD + "".join(_entry(key) for key in trust.keys)).encode("ascii"), 0o600)


def pack_card(fleet: signing.Signer, card: NodeCard) -> bytes:
    """Return the signed card as it is stored and published in ``rf:cards``."""
    payload = record.dumps(card)
    return record.dumps(SignedCard(payload.decode("utf-8"), fleet.sign(Domain.CARD, payload)))


def read_card(data: bytes, fleet_public: str, now_ms: int) -> NodeCard | None:
    """Return the card if the fleet signed it and it is in date, else None. Never raises for bad input."""
    try:
        signed = record.loads(SignedCard, data, limit_bytes=MAX_CARD_BYTES)
        payload = signed.card.encode("utf-8")
        if not signing.verify(fleet_public, Domain.CARD, payload, signed.sig):
            return None
        card = record.loads(NodeCard, payload, limit_bytes=MAX_CARD_BYTES)
        signing.key_id_of(card.public)
    except (WireError, ValueError):
        return None
    return card if card.v == 1 and now_ms < card.not_after_ms else None


def serves(card: NodeCard, tenant: str, lane: str) -> bool:
    """Return whether the card covers tenant, queue and every requirement of the lane (node pin, level, labels)."""
    queue, _, needs = lane.partition("@")
    labels = card.labels or {}
    for need in needs.split(",") if needs else ():
        name, _, wanted = need.partition("=")
        if need == NEEDS_BROKER:
            # Any node may have a broker; one that has none refuses, and signs that.
            met = True
        elif name == "node":
            met = card.node == wanted
        elif name == "level":
            met = card.level <= wanted
        elif name == "priority":
            met = True
        else:
            met = labels.get(name) == wanted
        if not met:
            return False
    return card.may_serve(tenant, queue)


def signed_outcome(cards: Iterable[NodeCard], job_id: str, lane: str, data: bytes, signature: str) -> Outcome | None:
    """Return how a job ended if the node of one of these cards signed it and may say so of that lane, else None."""
    label, tenant = signing.signer_of(signature), ids.tenant_of(job_id)
    for card in cards if label else ():
        fits = signing.key_id_of(card.public) == label and card.may_serve(tenant, lane.partition("@")[0])
        if fits and signing.verify(card.public, Domain.OUTCOME, data, signature):
            outcome = _outcome(job_id, card, data)
            # A node that is gone can't say so: of a job's loss, any that serves its queue may tell.
            told = (outcome is not None and outcome.state == State.LOST) or serves(card, tenant, lane)
            return outcome if told else None
    return None


def is_end_of(outcome: Outcome, envelope_sha256: str) -> bool:
    """Return whether a signed end is that of the envelope with this hash, and not of another one under the same id.

    An end that came before a node had verified an envelope names none; a finished job's always does.
    """
    named = outcome.envelope_sha256
    return named == envelope_sha256 or (named is None and outcome.state != State.FINISHED)


def is_value_of(outcome: Outcome, data: bytes) -> bool:
    """Return whether these bytes are the value that a job returned, as the node signed its end."""
    return outcome.result_sha256 is not None and hashlib.sha256(data).hexdigest() == outcome.result_sha256


def _outcome(job_id: str, card: NodeCard, data: bytes) -> Outcome | None:
    try:
        outcome = record.loads(Outcome, data, limit_bytes=_MAX_OUTCOME_BYTES)
    except WireError:
        return None
    genuine = outcome.job == job_id and outcome.node == card.node and outcome.state in END_STATES
    return outcome if genuine else None


def _check(key: TrustedKey) -> None:
    try:
        if signing.key_id_of(key.public) != key.id:
            raise ConfigError(f"the id of key {key.public[:16]}… must be {signing.key_id_of(key.public)}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not set(key.may) <= set(RIGHTS):
        raise UsageError(f"a right is one of {', '.join(RIGHTS)}")
    for tenant in key.tenants:
        if tenant != "*":
            ids.check_tenant(tenant)
    for queue in key.queues:
        if not _QUEUE.fullmatch(queue):
            raise UsageError(f"{queue[:64]!r} is no queue name and not *")


def _entry(key: TrustedKey) -> str:
    """Every text here was checked against a grammar without quotes, backslashes and control characters."""
    lines = [
        "[[key]]",
        f'id = "{key.id}"',
        f'public = "{key.public}"',
        f"may = {_list(key.may)}",
        f"tenants = {_list(key.tenants)}",
        f"queues = {_list(key.queues)}",
        *(["revoked = true"] if key.revoked else []),
    ]
    return "\n" + "\n".join(lines) + "\n"


def _list(words: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"
