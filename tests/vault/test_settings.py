"""The broker's settings: flags before variables, each checked, none guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.vault.errors import VaultUsageError
from broker.vault.settings import BrokerSettings, read


def test_flags_come_before_variables() -> None:
    """A flag wins; what no flag says comes from a variable, else from the default."""
    environ = {"RINGFENCE_BROKER_HOME": "/b", "RINGFENCE_BROKER_AGENTS": "[7, 8]", "RINGFENCE_BROKER_SCRUB_UID": "9"}
    assert read({"home": Path("/a")}, environ) == BrokerSettings(Path("/a"), agents=(7, 8), scrub_uid=9)
    assert read({}, {"RINGFENCE_BROKER_HOME": "/b", "PATH": "/x"}) == BrokerSettings(Path("/b"))
    command = {"RINGFENCE_BROKER_KEY_COMMAND": '["/bin/k", "read"]'}
    assert read({"home": Path("/a")}, command).key_command == ("/bin/k", "read")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGENTS", "7"),
        ("AGENTS", "[true]"),
        ("AGENTS", "[-1]"),
        ("AGENTS", "[7"),
        ("KEY_COMMAND", "/bin/k"),
        ("KEY_COMMAND", "[]"),
        ("KEY_COMMAND", "[1]"),
        ("SCRUB_UID", "-1"),
        ("SCRUB_UID", "x"),
        ("KEYCOMMAND", '["/bin/k"]'),
    ],
)
def test_a_setting_that_is_wrong_is_named(name: str, value: str) -> None:
    """Nothing is left out or taken for something else: the broker does not start."""
    with pytest.raises(VaultUsageError, match=f"RINGFENCE_BROKER_{name}"):
        read({"home": Path("/a")}, {f"RINGFENCE_BROKER_{name}": value})


def test_a_home_is_needed() -> None:
    """Without a home there is no broker."""
    with pytest.raises(VaultUsageError, match="home"):
        read({}, {})
