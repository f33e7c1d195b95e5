"""`ringfence broker`: the process that hands this host's secrets to its jobs, in the foreground.

Port: broker.vault. Called by commands.py (the command), up.py (its own one) and vault.py (who owns a vault). Must never
hand a setting with a secret in it to the process, and never make a vault that an operator has not asked for but `up`'s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer

from broker.vault import hostkey, keystore
from broker.vault.errors import VaultError
from broker.vault.rulesfile import RULES_FILE
from runner.cli import store as stores
from runner.cli.children import Program, environment
from runner.cli.egress import EGRESS_UID
from runner.cli.options import HomeOption, RedisOption
from runner.cli.output import say
from runner.cli.site import site_of
from runner.files import create_file
from runner.home import Home, check_safe

__all__ = ["RECOVERY_FILE", "as_owner", "broker", "hand_over", "prepare", "program"]

#: One of the uids that are reserved for Ringfence's own daemons; the scrubber's is the next.
VAULT_UID: Final = stores.STORE_UID + 4
SCRUB_UID: Final = stores.STORE_UID + 5
#: The recovery key of a vault that `up` made, below the home's keys: to be moved off the host.
RECOVERY_FILE: Final = "vault-recovery.age"
_STOP_S: Final = 5.0
_UP_RULES: Final = """\
# Written by `ringfence up` once: on this machine every job of this home may have every secret in its vault.
# Edit it and run `ringfence vault reload`; docs/operations.md, secrets.
version = 1
[[allow]]
secrets = ["*"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
modes = ["proxy", "get", "file", "env"]
hosts = ["*"]
"""


def broker(context: typer.Context, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Run the vault broker in the foreground: what hands secrets to jobs on this host."""
    place = site_of(context, home, redis).home
    check_safe(place)
    words = program(place).words
    # Its own settings, and where systemd has put the key, if it keeps it.
    given = {k: v for k, v in os.environ.items() if k == "CREDENTIALS_DIRECTORY" or k.startswith("RINGFENCE_BROKER_")}
    os.execve(words[0], words, {**environment(), **given})  # noqa: S606 - becoming the broker is the command's job


def program(home: Home) -> Program:
    """Return how the broker is run. As root it takes the vault's own user by itself, once its sockets stand."""
    words = (sys.executable, "-I", "-m", "broker.vault", "--home", str(home.path))
    scrub, egress = stores.daemon_uid(SCRUB_UID), stores.daemon_uid(EGRESS_UID)
    return Program(
        "broker",
        words if scrub is None else (*words, "--scrub-uid", str(scrub), "--egress-uid", str(egress)),
        signal.SIGTERM,
        _STOP_S,
        stage=0,
    )


def prepare(home: Home) -> str | None:
    """Make a vault for `up` if there is none: with a recovery key beside the others, and rules that allow all of it.

    Returns whom sealed arguments are encrypted to; None if the vault can't be opened, which the broker tells.
    """
    if not home.vault.exists():
        shown = keystore.create(home.vault)
        hand_over(home)
        path = home.keys / RECOVERY_FILE
        with contextlib.suppress(FileExistsError):
            create_file(path, f"{shown}\n".encode("ascii"), 0o600)
        say(f"made a vault for secrets; its recovery key is {path}: move it off this host")
    with contextlib.suppress(FileExistsError):
        create_file(home.path / RULES_FILE, _UP_RULES.encode("ascii"), 0o600)
        uid = stores.daemon_uid(VAULT_UID)
        if uid is not None:
            os.chown(home.path / RULES_FILE, uid, uid, follow_symlinks=False)
    try:
        with as_owner(home) as path, keystore.Keystore(path, hostkey.outside(os.environ)) as store:
            return store.seal_keys().current()
    except VaultError:
        return None


def hand_over(home: Home) -> None:
    """Give a new vault to the broker's own user, where root has one to give."""
    uid = stores.daemon_uid(VAULT_UID)
    if uid is None:
        return
    for folder, _, names in os.walk(home.vault):
        for name in names:
            os.chown(Path(folder) / name, uid, uid, follow_symlinks=False)
        os.chown(folder, uid, uid, follow_symlinks=False)


@contextlib.contextmanager
def as_owner(home: Home) -> Iterator[Path]:
    """Act as the vault's owner: root does not read another user's vault as itself. Yields the vault's path."""
    try:
        owner = home.vault.lstat().st_uid
    except FileNotFoundError:
        owner = 0
    if os.geteuid() != 0 or owner == 0:
        yield home.vault
        return
    before = Path.cwd()
    os.chdir(home.path)
    os.setegid(owner)
    os.seteuid(owner)
    try:
        yield Path("vault")
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.chdir(before)
