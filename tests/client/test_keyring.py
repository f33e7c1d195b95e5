"""Keys, trust.toml, client.json and cards."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import keyring, trust
from runner.errors import ConfigError, UnsafeFileError, UsageError
from runner.home import Home
from runner.keyring import ClientConfig
from runner.signing import Signer, new_private
from runner.wire.card import CARD_TTL_S, TrustedKey
from tests.client.paper import now_ms
from tests.support import scratch

STRANGER = Signer(new_private())


@pytest.fixture
def home() -> Iterator[Home]:
    """A fresh place for a home."""
    with scratch.folder() as folder:
        yield Home(folder / "home")


def mode(path: Path) -> int:
    """The permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_a_home_that_only_its_owner_can_use(home: Home) -> None:
    """Keys and client.json are 0600, the client may do all, and a second init changes nothing but the URL."""
    first = keyring.init(home, "unix:///x")
    assert [view.kind for view in first] == ["client", "fleet", "trusted"]
    assert mode(home.path) == (0o711 if os.geteuid() == 0 else 0o700)
    assert [mode(path) for path in (home.keys, home.key("fleet"), home.key("client"), home.client)] == [
        0o700,
        0o600,
        0o600,
        0o600,
    ]
    assert keyring.load_fleet_public(home) == keyring.load_key(home.key("fleet")).public
    config = keyring.load_client(home)
    assert config == ClientConfig("unix:///x", "keys/client.key", keyring.load_fleet_public(home))
    (key,) = trust.load(home.trust).keys
    assert (key.public, set(key.may), key.tenants) == (first[0].public, {"enqueue", "kill", "operate"}, ("*",))
    assert keyring.init(home) == first
    keyring.init(home, "unix:///y")
    assert keyring.load_client(home).redis_url == "unix:///y"
    assert not list(home.path.rglob(".*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemons have users of their own")
def test_an_existing_folder_becomes_a_home_that_daemons_can_pass(home: Home) -> None:
    """As root, a private folder made by hand is opened for passing through, and for nothing else."""
    home.path.mkdir(mode=0o700)
    keyring.init(home)
    assert (mode(home.path), mode(home.keys)) == (0o711, 0o700)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(home: Home, bits: int) -> None:
    """A private key open to anybody else is as good as lost: the message says how to close it."""
    keyring.init(home)
    home.key("client").chmod(bits)
    with pytest.raises(UnsafeFileError, match=r"chmod 600"):
        keyring.load_key(home.key("client"))
    home.client.chmod(bits)
    with pytest.raises(UnsafeFileError):
        keyring.load_client(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(home: Home) -> None:
    """Whoever owns the file could have put any key there."""
    keyring.init(home)
    os.chown(home.key("client"), 12345, 12345)
    with pytest.raises(UnsafeFileError, match="belongs to user 12345"):
        keyring.load_key(home.key("client"))


def test_links_and_other_kinds_of_files_are_no_keys(home: Home) -> None:
    """A link, a pipe or a folder in place of a key is refused without waiting."""
    keyring.init(home)
    path = home.key("client")
    target = path.rename(path.with_suffix(".real"))
    path.symlink_to(target)
    with pytest.raises(ConfigError):
        keyring.load_key(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UnsafeFileError, match="no plain file"):
        keyring.load_key(path)


def test_broken_keys_say_what_to_do(home: Home) -> None:
    """A file that is no key, or is missing, names itself and the command."""
    keyring.init(home)
    home.key("client").write_text("hello")
    with pytest.raises(ConfigError, match="no Ringfence key"):
        keyring.load_key(home.key("client"))
    with pytest.raises(ConfigError, match="keys init"):
        keyring.load_key(home.key("node-x"))


def test_a_foreign_fleet_key_is_noticed(home: Home) -> None:
    """fleet.pub and fleet.key must belong together."""
    keyring.init(home)
    home.fleet_pub.write_text(STRANGER.public)
    with pytest.raises(ConfigError, match="does not belong"):
        keyring.init(home)


def test_trust_and_revoke(home: Home) -> None:
    """A key is added with its rights, changed by a second call, revoked for good."""
    keyring.init(home)
    view = keyring.trust(home, STRANGER.public, ["kill", "enqueue"], ["acme"], ["q1", "q2"])
    assert (view.id, view.may, view.tenants, view.queues) == (
        STRANGER.key_id,
        ("enqueue", "kill"),
        ("acme",),
        ("q1", "q2"),
    )
    public_file = home.path / "their.pub"
    public_file.write_text(f"{STRANGER.public}\n")
    keyring.trust(home, public_file, ["enqueue"])
    assert trust.load(home.trust).by_id()[STRANGER.key_id].tenants == ("main",)
    assert keyring.revoke(home, STRANGER.key_id).revoked
    assert trust.load(home.trust).by_id()[STRANGER.key_id].revoked
    with pytest.raises(ConfigError, match="was revoked"):
        keyring.trust(home, STRANGER.public)
    with pytest.raises(ConfigError, match="keys show"):
        keyring.revoke(home, "0" * 16)
    assert len(trust.load(home.trust).keys) == 2


@pytest.mark.parametrize(
    ("public", "may", "tenants", "queues"),
    [
        ("xyz", ["enqueue"], ["a"], ["*"]),
        (STRANGER.public, ["everything"], ["a"], ["*"]),
        (STRANGER.public, ["enqueue"], ["Bad Tenant"], ["*"]),
        (STRANGER.public, ["enqueue"], ["a"], ['q"]\n[[key]]']),
    ],
    # The key is new in every process, and parallel workers compare names.
    ids=["no key", "no right", "no tenant", "no queue"],
)
def test_bad_rights_are_refused(home: Home, public: str, may: list[str], tenants: list[str], queues: list[str]) -> None:
    """Nothing is written that could not be read back, or that breaks out of its line."""
    keyring.init(home)
    before = home.trust.read_bytes()
    with pytest.raises(UsageError):
        keyring.trust(home, public, may, tenants, queues)
    assert home.trust.read_bytes() == before


GOOD = f'[[key]]\nid = "{STRANGER.key_id}"\npublic = "{STRANGER.public}"\nmay = ["enqueue"]\ntenants = ["a"]\n'


@pytest.mark.parametrize(
    "text",
    [
        "not toml",
        "[other]\nx = 1",
        "key = 1",
        GOOD + "admin = true",
        GOOD + GOOD,
        GOOD.replace(STRANGER.key_id, "0" * 16),
        GOOD.replace('"enqueue"', '"all"'),
        GOOD.replace('["a"]', '"a"'),
        GOOD.replace(STRANGER.public, STRANGER.public.upper()),
        GOOD + "revoked = 1",
    ],
)
def test_a_trust_file_with_anything_unknown_is_refused(home: Home, text: str) -> None:
    """An unknown key, right, type or second entry refuses the whole file, by name."""
    keyring.init(home)
    home.trust.write_text(text)
    with pytest.raises(ConfigError, match=r"trust\.toml"):
        trust.load(home.trust)
    home.trust.write_text(GOOD)
    assert trust.load(home.trust).keys == (TrustedKey(STRANGER.key_id, STRANGER.public, ("enqueue",), ("a",)),)


def test_a_trust_file_that_others_can_write_is_refused(home: Home) -> None:
    """Everybody may read it, nobody else may write it."""
    keyring.init(home)
    home.trust.chmod(0o664)
    with pytest.raises(UnsafeFileError, match="go-w"):
        trust.load(home.trust)


def test_cards_carry_the_fleet_s_word(home: Home) -> None:
    """A card says what it was issued with, for 90 days; changed, foreign and late ones are none."""
    keyring.init(home)
    path = keyring.issue_card(home, "n1", level="A", tenants=["a"], queues=["q"], labels={"zone": "b"})
    data = keyring.load_card(home, "n1")
    fleet = keyring.load_fleet_public(home)
    card = trust.read_card(data, fleet, now_ms())
    assert card is not None
    assert (card.node, card.public, card.level) == ("n1", keyring.node_key(home, "n1").public, "A")
    assert (card.tenants, card.queues, card.labels) == (("a",), ("q",), {"zone": "b"})
    assert path == home.card("n1")
    assert mode(home.key("node-n1")) == 0o600
    assert trust.read_card(data, fleet, now_ms() + CARD_TTL_S * 1000 + 1000) is None
    assert trust.read_card(data, STRANGER.public, now_ms()) is None
    assert trust.read_card(data.replace(b"zone", b"zona"), fleet, now_ms()) is None
    for junk in (b"", b"{}", b"\xff", b'{"card":"{}","sig":""}', b"x" * 100_000):
        assert trust.read_card(junk, fleet, now_ms()) is None


def test_a_card_for_a_key_made_elsewhere(home: Home) -> None:
    """With a public key, the fleet's machine signs a card without ever holding the node's key."""
    keyring.init(home)
    keyring.issue_card(home, "n7", public=STRANGER.public)
    card = trust.read_card(keyring.load_card(home, "n7"), keyring.load_fleet_public(home), now_ms())
    assert card is not None
    assert card.public == STRANGER.public
    assert not home.key("node-n7").exists()
