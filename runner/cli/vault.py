"""`ringfence vault`: make a vault, put secrets into it, look at what it holds and what was done with it.

Called by commands.py. Must never print a value of a secret, or take one from the command line, where every user of the
machine and the shell's history would see it.

Port: the command line's way to the vault (broker.vault).
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from broker.vault import audit as audits
from broker.vault import keystore
from broker.vault.audit import Audit, Head
from broker.vault.disk import Folder
from broker.vault.errors import VaultError, VaultUsageError
from broker.vault.hostkey import CommandKey
from broker.vault.keystore import MAX_VALUE_BYTES, Keystore
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line, print_table, say
from runner.cli.site import site_of
from runner.errors import ConfigError, UsageError
from runner.home import check_safe

__all__ = ["vault"]

vault = typer.Typer(name="vault", help="Keep secrets on this host.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The secret's name.")]
_MAX_AUDIT_BYTES: Final = 256 << 20


@vault.command()
def init(
    context: typer.Context,
    recovery: Annotated[
        list[str] | None,
        typer.Option("--recovery", metavar="AGE1…", help="Public recovery key, kept elsewhere; repeat. Default: new."),
    ] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Make this home's vault. Without --recovery, shows a recovery key once: store it off this host."""
    place = site_of(context, home, redis).home
    if not place.path.is_dir():
        raise ConfigError(f"{place.path} is no folder: run `ringfence keys init --home {place.path}`")
    check_safe(place)
    with _said():
        shown = keystore.create(place.vault, recovery or ())
    with _opened(place.vault) as (store, record):
        record.write("vault.made", recipients=len(store.recipients))
    if shown is not None:
        say("this recovery key is shown once and stored nowhere; keep it off this host, it opens every secret:")
        print_line(shown)


@vault.command(name="set")
def put(
    context: typer.Context,
    name: NameArgument,
    file: Annotated[Path | None, typer.Option("--file", metavar="PATH", help="Read the value from a file.")] = None,
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="Kept, sealed, with the value.")] = "",
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Store a new version of a secret: asked for on a terminal, else read from stdin (one line end is dropped)."""
    place = site_of(context, home, redis).home.vault
    with _said():
        keystore.check_name(name)
    value = _value(file)
    with _opened(place) as (store, record):
        version = store.put(name, value, note=note)
        record.write("secret.put", name=name, version=version)
    say(f"{name} version {version} is stored")


@vault.command(name="list")
def entries(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """List the secrets by name, with the versions that are kept; no value is opened."""
    with _opened(site_of(context, home, redis).home.vault) as (store, _):
        found = store.entries()
    if as_json:
        print_json([{"name": entry.name, "versions": list(entry.versions)} for entry in found])
        return
    print_table(
        ("NAME", "NEWEST", "KEPT"), [(entry.name, str(entry.versions[-1]), str(len(entry.versions))) for entry in found]
    )


@vault.command()
def rm(context: typer.Context, name: NameArgument, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Take a secret away with all its versions."""
    with _opened(site_of(context, home, redis).home.vault) as (store, record):
        store.remove(name)
        record.write("secret.removed", name=name)


@vault.command()
def rollback(
    context: typer.Context,
    name: NameArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version whose value becomes the newest.")],
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Make an older value the newest again, as a new version."""
    with _opened(site_of(context, home, redis).home.vault) as (store, record):
        new = store.rollback(name, version)
        record.write("secret.rolled_back", name=name, version=new, to=version)
    say(f"{name} version {new} holds the value of version {version}")


@vault.command()
def rotate(
    context: typer.Context,
    recovery: Annotated[
        list[str] | None,
        typer.Option("--recovery", metavar="AGE1…", help="Replace the recovery keys by these; repeat."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Only write every file anew, for a host key that comes from elsewhere.")
    ] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Encrypt everything to a new host key and forget the old one. A secret itself is rotated with `vault set`."""
    with _opened(site_of(context, home, redis).home.vault) as (store, record):
        if recovery:
            store.set_recovery(recovery)
            record.write("vault.recovery_changed", recipients=len(recovery))
        elif again:
            store.reencrypt()
            record.write("vault.reencrypted")
        else:
            store.rotate_host_key()
            record.write("vault.rotated")
    say("every file is encrypted anew; back the vault up")


@vault.command()
def restore(
    context: typer.Context,
    recovery: Annotated[Path, typer.Option("--recovery", metavar="FILE", help="A file with the private recovery key.")],
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Open a copied vault with the recovery key, and give it a host key of this host."""
    place = site_of(context, home, redis).home.vault
    with _said(), Keystore(place, CommandKey(["/bin/cat", str(recovery)])) as store:
        store.rehost()
        good, bad = store.verify()
    say(f"{good} versions open with this host's new key" + (f"; lost: {', '.join(bad)}" if bad else ""))
    if bad:
        raise typer.Exit(1)


@vault.command()
def audit(
    context: typer.Context,
    anchor: Annotated[
        str | None, typer.Option("--anchor", metavar="COUNT:MAC", help="An end that was noted earlier, elsewhere.")
    ] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the record's chain and print it; the last line says its end, to be noted elsewhere."""
    place = site_of(context, home, redis).home.vault
    with _opened(place) as (store, _):
        folder = Folder(place)
        try:
            data = folder.read(audits.AUDIT_FILE, _MAX_AUDIT_BYTES)
        finally:
            folder.close()
        head, lines = audits.verify(data, store.audit_seed(), _anchor(anchor))
    for line in lines:
        if as_json:
            print_json(line)
        else:
            rest = "  ".join(f"{key}={value}" for key, value in line.items() if key not in {"n", "at", "event"})
            print_line(f"{line['n']}  {line['at']}  {line['event']}  {rest}")
    say(f"{head.count} lines, unchanged; end {head.count}:{head.mac}")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Keystore, Audit]]:
    """Open vault and record; what goes wrong becomes the command line's own error."""
    with _said(), Keystore(path) as store:
        folder = Folder(path)
        try:
            record = Audit(folder, store.audit_seed())
            try:
                yield store, record
                record.sync()
            finally:
                record.close()
        finally:
            folder.close()


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except VaultUsageError as error:
        raise UsageError(str(error)) from None
    except VaultError as error:
        raise ConfigError(str(error)) from None


def _value(file: Path | None, ask: Callable[[str], str] = getpass.getpass) -> bytes:
    if file is not None:
        try:
            with file.open("rb") as stream:
                return stream.read(MAX_VALUE_BYTES + 1)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
    if sys.stdin.isatty():
        return ask("value (not shown): ").encode()
    return sys.stdin.buffer.read(MAX_VALUE_BYTES + 2).removesuffix(b"\n")


def _anchor(text: str | None) -> Head | None:
    if text is None:
        return None
    count, colon, mac = text.partition(":")
    if not colon or not count.isdecimal():
        raise UsageError("--anchor takes COUNT:MAC, as `ringfence vault audit` prints it")
    return Head(int(count), mac)
