"""Key files, client.json and what `ringfence keys` does.

Called by the command line, `up`, clients (their key) and node agents (their key and card). Must never overwrite a
private key, read one that someone else can read, or write one anywhere but into a 0600 file below the home.

A key file is one line, ``ringfence-ed25519 `` and 64 hex digits; a public one holds the 64 hex digits alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from runner import trust as trusts
from runner.errors import ConfigError, UsageError
from runner.files import create_file, locked, read_file, replace_file
from runner.home import Home, check_safe
from runner.signing import Signer, key_id_of, new_private
from runner.wire import codec, ids, record
from runner.wire.card import CARD_TTL_S, MAX_CARD_BYTES, NodeCard, TrustedKey
from runner.wire.errors import WireError

__all__ = [
    "ClientConfig",
    "KeyView",
    "init",
    "issue_card",
    "load_card",
    "load_client",
    "load_fleet_public",
    "load_key",
    "node_key",
    "revoke",
    "save_client",
    "show",
    "trust",
]

DEFAULT_REDIS_URL: Final = "redis://127.0.0.1:6379/0"
_KEY_HEAD: Final = b"ringfence-ed25519"
_MAX_KEY_FILE_BYTES: Final = 256
_MAX_CLIENT_BYTES: Final = 16 * 1024
_ROOT_HOME_MODE: Final = 0o711
_USER_HOME_MODE: Final = 0o700


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """client.json: the store, the client's key file (relative to the home, or absolute) and the fleet's public key."""

    redis_url: str
    key_file: str
    fleet_pub: str


@dataclass(frozen=True, slots=True)
class KeyView:
    """One line of `keys show`. ``kind``: fleet, client, node (private halves here), trusted (of trust.toml)."""

    kind: Literal["fleet", "client", "node", "trusted"]
    name: str
    id: str
    public: str
    may: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    revoked: bool = False


def init(home: Home, redis_url: str | None = None) -> tuple[KeyView, ...]:
    """Make what is missing: folder, fleet key, client key, trust.toml (the client may do all) and client.json.

    What exists stays; only ``redis_url``, if given, is written anew into client.json. Returns `show`.
    Raises ConfigError, UnsafeFileError.
    """
    _make_folders(home)
    with locked(home.path):
        fleet = _make_key(home.key("fleet"))
        client = _make_key(home.key("client"))
        with contextlib.suppress(FileExistsError):
            create_file(home.fleet_pub, f"{fleet.public}\n".encode("ascii"), 0o644)
        if load_fleet_public(home) != fleet.public:
            raise ConfigError(f"{home.fleet_pub} does not belong to {home.key('fleet')}: move one of them away")
        if not home.trust.exists():
            key = TrustedKey(client.key_id, client.public, trusts.RIGHTS, ("*",), ("*",))
            trusts.save(home.trust, trusts.Trust().with_key(key))
        if not home.client.exists():
            save_client(home, ClientConfig(redis_url or DEFAULT_REDIS_URL, "keys/client.key", fleet.public))
        elif redis_url is not None:
            save_client(home, replace(load_client(home), redis_url=redis_url))
    return show(home)


def show(home: Home) -> tuple[KeyView, ...]:
    """Return the keys whose private half lies here, then the trusted ones. Raises ConfigError, UnsafeFileError."""
    found = []
    for path in sorted(home.keys.glob("*.key")) if home.keys.is_dir() else []:
        key = load_key(path)
        kind: Literal["fleet", "client", "node"] = "client"
        if path.stem == "fleet":
            kind = "fleet"
        elif path.stem.startswith("node-"):
            kind = "node"
        found.append(KeyView(kind, path.stem, key.key_id, key.public))
    known = trusts.load(home.trust).keys if home.trust.exists() else ()
    return (*found, *(_trusted_view(key) for key in known))


def trust(
    home: Home,
    public: str | Path,
    may: Sequence[str] = ("enqueue",),
    tenants: Sequence[str] = (ids.DEFAULT_TENANT,),
    queues: Sequence[str] = ("*",),
) -> KeyView:
    """Add a public key (64 hex digits, or a file that holds them) to this home's trust.toml, or change its rights.

    A revoked key stays revoked. Raises ConfigError, UsageError.
    """
    digits = _public_text(public)
    _make_folders(home)
    if not set(may) <= set(trusts.RIGHTS):
        raise UsageError(f"--may takes {', '.join(trusts.RIGHTS)}")
    with locked(home.path):
        known = trusts.load(home.trust) if home.trust.exists() else trusts.Trust()
        if any(key.public == digits and key.revoked for key in known.keys):
            raise ConfigError(f"key {key_id_of(digits)} was revoked here: make a new key")
        rights = tuple(right for right in trusts.RIGHTS if right in may)
        key = record.decode(
            TrustedKey,
            {
                "id": key_id_of(digits),
                "public": digits,
                "may": list(rights),
                "tenants": list(tenants),
                "queues": list(queues),
            },
        )
        try:
            trusts.save(home.trust, known.with_key(key))
        except WireError as error:
            raise UsageError(str(error)) from None
    return _trusted_view(key)


def revoke(home: Home, label: str) -> KeyView:
    """Mark the key with that id (or public key) as revoked: agents refuse its jobs and commands. Raises ConfigError."""
    with locked(home.path):
        known, gone = trusts.load(home.trust).revoke(label)
        trusts.save(home.trust, known)
    return _trusted_view(gone)


def issue_card(
    home: Home,
    node: str,
    *,
    public: str | Path | None = None,
    level: str = "B",
    tenants: Sequence[str] = ("*",),
    queues: Sequence[str] = ("*",),
    labels: dict[str, str] | None = None,
    recipient: str | None = None,
) -> Path:
    """Sign a node's card with the fleet key of this home, valid 90 days, and return its file keys/node-NAME.card.

    Without ``public`` the node's key is made (or read) here, as `up` needs it. ``recipient``: the public half of what
    its broker opens sealed arguments with; without it no job with such arguments runs there.

    Raises:
        ConfigError, GrammarError.
    """
    ids.check_node(node)
    fleet = load_key(home.key("fleet"))
    digits = node_key(home, node).public if public is None else _public_text(public)
    not_after_ms = time.time_ns() // 1_000_000 + CARD_TTL_S * 1000
    card = NodeCard(node, digits, level, not_after_ms, tuple(tenants), tuple(queues), labels, recipient)
    replace_file(home.card(node), trusts.pack_card(fleet, card), 0o644)
    return home.card(node)


def load_card(home: Home, node: str) -> bytes:
    """Return the signed card that an agent publishes in ``rf:cards``. Raises ConfigError."""
    return read_file(home.card(node), MAX_CARD_BYTES, secret=False)


def node_key(home: Home, node: str) -> Signer:
    """Return a node's key, made at first use. Raises ConfigError, UnsafeFileError, GrammarError."""
    ids.check_node(node)
    _make_folders(home)
    return _make_key(home.key(f"node-{node}"))


def load_key(path: Path) -> Signer:
    """Return the private key of one file. Raises ConfigError, UnsafeFileError (others can read it)."""
    head, _, digits = read_file(path, _MAX_KEY_FILE_BYTES, secret=True).partition(b" ")
    try:
        return Signer(bytes.fromhex(digits.strip().decode("ascii") if head == _KEY_HEAD else ""))
    except ValueError:
        raise ConfigError(f"{path} is no Ringfence key: move it away and run `ringfence keys init`") from None


def load_fleet_public(home: Home) -> str:
    """Return the fleet's public key as 64 hex digits. Raises ConfigError."""
    return _public_text(home.fleet_pub)


def load_client(home: Home) -> ClientConfig:
    """Return client.json. Raises ConfigError (missing: the message says what to do), UnsafeFileError."""
    if not home.client.exists():
        raise ConfigError(
            f"no {home.client}: start `ringfence up --home {home.path}`, or copy client.json and its key from the"
            " operator, or name another home with --home or RINGFENCE_HOME"
        )
    try:
        found = record.loads(ClientConfig, read_file(home.client, _MAX_CLIENT_BYTES, secret=True))
        key_id_of(found.fleet_pub)
    except (WireError, ValueError) as error:
        raise ConfigError(f"{home.client} is not valid: {error}") from None
    return found


def save_client(home: Home, config: ClientConfig) -> None:
    """Write client.json anew, 0600 (its URL may hold a password)."""
    replace_file(home.client, codec.dump(record.encode(config)) + b"\n", 0o600)


def _make_folders(home: Home) -> None:
    mode = _ROOT_HOME_MODE if os.geteuid() == 0 else _USER_HOME_MODE
    try:
        if not home.path.exists():
            home.path.mkdir(mode=0o700, parents=True)
            home.path.chmod(mode)
        # As root the daemons' own users pass through the home: an existing folder gets the right to be passed, no more.
        info = home.path.stat()
        if os.geteuid() == 0 and info.st_uid == 0 and stat.S_IMODE(info.st_mode) & mode != mode:
            home.path.chmod(stat.S_IMODE(info.st_mode) | mode)
        home.keys.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{home.path} can't be made: {error.strerror}; name another with --home") from None
    check_safe(home)


def _make_key(path: Path) -> Signer:
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            create_file(path, b"%s %s\n" % (_KEY_HEAD, new_private().hex().encode("ascii")), 0o600)
    return load_key(path)


def _public_text(public: str | Path) -> str:
    text = public if isinstance(public, str) and not os.path.exists(public) else None
    if text is None:
        text = read_file(Path(public), _MAX_KEY_FILE_BYTES, secret=False).decode("ascii", "replace")
    try:
        key_id_of(text.strip())
    except ValueError:
        raise UsageError("a public key is 64 hex digits, or a file that holds them (`ringfence keys show`)") from None
    return text.strip()


def _trusted_view(key: TrustedKey) -> KeyView:
    return KeyView("trusted", key.id, key.id, key.public, key.may, key.tenants, key.queues, key.revoked)
