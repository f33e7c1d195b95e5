"""`keys card`: what a card says is what the command line said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner import keyring, trust
from runner.cli.commands import run_words
from runner.home import locate
from runner.wire.card import NodeCard


def card_of(home: Path, *words: str) -> NodeCard:
    """Sign a card for n1 with these options and read it as a client does."""
    assert run_words(["--home", str(home), "keys", "init"]) == 0
    assert run_words(["--home", str(home), "keys", "card", "n1", *words]) == 0
    place = locate(home)
    fleet = keyring.load_key(place.key("fleet")).public
    card = trust.read_card(keyring.load_card(place, "n1"), fleet, time.time_ns() // 1_000_000)
    assert card is not None
    return card


def test_a_card_says_what_its_node_may_claim(home: Path) -> None:
    """Results of a lane with a level or a label count only from a card that covers it."""
    plain = card_of(home / "h")
    assert not trust.serves(plain, "main", "agents@level=A")
    assert not trust.serves(plain, "main", "agents@zone=b")
    wide = card_of(home / "h", "--level", "A", "--label", "zone=b")
    assert trust.serves(wide, "main", "agents@level=A,zone=b")
    assert not trust.serves(wide, "main", "agents@zone=c")


@pytest.mark.parametrize("words", [("--level", "Z"), ("--label", "zone")])
def test_wrong_words_sign_nothing(home: Path, words: tuple[str, str]) -> None:
    """Exit code 2, and no card."""
    assert run_words(["--home", str(home / "h"), "keys", "init"]) == 0
    assert run_words(["--home", str(home / "h"), "keys", "card", "n1", *words]) == 2
    assert not locate(home / "h").card("n1").exists()
