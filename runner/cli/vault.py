"""`ringfence vault`: make a vault, put secrets into it, look at what it holds and what was done with it.

Called by commands.py. Must never print a value of a secret, or take one from the command line, where every user of the
machine and the shell's history would see it.

A running broker has the vault open: then it is asked on its own socket, and does the same.

Port: the command line's way to the vault (broker.vault).
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from broker.vault import audit as audits
from broker.vault import bounds, hostkey, keystore, operator, seeds
from broker.vault.audit import Audit, Head
from broker.vault.counter import Clerk
from broker.vault.disk import Folder
from broker.vault.errors import VaultBusyError, VaultError, VaultUsageError
from broker.vault.hostkey import GivenKey
from broker.vault.keystore import MAX_VALUE_BYTES, Keystore
from broker.vault.leases import Leases
from broker.vault.operator import COUNTER
from broker.vault.orders import host_of
from broker.vault.rules import Ask, Mode, Rules, decide
from broker.vault.rulesfile import RULES_FILE, load_rules
from runner.cli.approve import approve, deny, pending
from runner.cli.broker import as_owner, hand_over
from runner.cli.options import HomeOption, JsonOption, RedisOption, pairs
from runner.cli.output import print_json, print_line, print_table, say
from runner.cli.site import site_of
from runner.cli.vaultdoctor import doctor
from runner.errors import ConfigError, UsageError
from runner.home import Home, check_safe
from runner.wire import ids

__all__ = ["vault"]

vault = typer.Typer(name="vault", help="Keep secrets on this host.", no_args_is_help=True)
for _function in (doctor, pending, approve, deny):
    vault.command()(_function)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The secret's name.")]
_MAX_AUDIT_BYTES: Final = 256 << 20
_FOLLOW_S: Final = 0.2


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
        hand_over(place)
    with _said(), _opened(place) as (store, record):
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
    place = site_of(context, home, redis).home
    with _said():
        keystore.check_name(name)
    value = base64.b64encode(_value(file)).decode()
    reply = _ask(place, op="put", name=name, value=value, note=note)
    say(f"{name} version {reply['version']} is stored")


@vault.command(name="list")
def entries(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """List the secrets by name, with the versions that are kept; no value is opened."""
    found = cast("list[dict[str, Any]]", _ask(site_of(context, home, redis).home, op="list")["entries"])
    if as_json:
        print_json(found)
        return
    rows = [(one["name"], str(one["versions"][-1]), str(len(one["versions"]))) for one in found]
    print_table(("NAME", "NEWEST", "KEPT"), rows)


@vault.command()
def recipient(
    context: typer.Context,
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new key; the old one opens for 14 days.")] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Print whom sealed arguments for this host are encrypted to: `keys card NODE --recipient` takes it."""
    print_line(str(_ask(site_of(context, home, redis).home, op="recipient", rotate=rotate)["recipient"]))


@vault.command()
def rm(context: typer.Context, name: NameArgument, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Take a secret away with all its versions."""
    _ask(site_of(context, home, redis).home, op="remove", name=name)


@vault.command()
def rollback(
    context: typer.Context,
    name: NameArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version whose value becomes the newest.")],
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Make an older value the newest again, as a new version."""
    reply = _ask(site_of(context, home, redis).home, op="rollback", name=name, version=version)
    say(f"{name} version {reply['version']} holds the value of version {version}")


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
    place = site_of(context, home, redis).home
    if recovery:
        _ask(place, op="recovery", recipients=recovery)
    else:
        _ask(place, op="reencrypt" if again else "rotate")
    say("every file is encrypted anew; back the vault up")


@vault.command()
def restore(
    context: typer.Context,
    recovery: Annotated[Path, typer.Option("--recovery", metavar="FILE", help="A file with the private recovery key.")],
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Open a copied vault with the recovery key, and give it a host key of this host."""
    place = site_of(context, home, redis).home
    try:
        key = recovery.read_bytes()
    except OSError as error:
        raise UsageError(f"{recovery}: {error.strerror}") from None
    with _said(), as_owner(place) as path, Keystore(path, GivenKey(key)) as store:
        store.rehost()
        good, bad = store.verify()
    say(f"{good} versions open with this host's new key" + (f"; lost: {', '.join(bad)}" if bad else ""))
    if bad:
        raise typer.Exit(1)


@vault.command()
def reload(context: typer.Context, home: HomeOption = None, redis: RedisOption = None) -> None:
    """Have the broker read vault-policy.toml anew: live jobs lose what it no longer allows, and gain nothing."""
    reply = _ask(site_of(context, home, redis).home, op="reload")
    say(f"the rules are loaded; {reply.get('revoked', 0)} live grants ended")


@vault.command()
def explain(
    context: typer.Context,
    name: NameArgument,
    task: Annotated[str | None, typer.Option("--task", metavar="M:T", help="The task that would ask.")] = None,
    command: Annotated[str | None, typer.Option("--command", metavar="CMD", help="The command that would.")] = None,
    mode: Annotated[str, typer.Option("--mode", metavar="MODE", help="proxy, get, file or env.")] = "proxy",
    host: Annotated[str | None, typer.Option("--host", metavar="HOST", help="With proxy: where to.")] = None,
    request: Annotated[
        str | None, typer.Option("--request", metavar="'METHOD /PATH'", help="With proxy: what it would ask there.")
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="T")] = ids.DEFAULT_TENANT,
    queue: Annotated[str, typer.Option("--queue", metavar="Q")] = "agents",
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="K=V", help="Repeat.")] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which rule of vault-policy.toml decides for such a job; exits 1 if it would get nothing."""
    if mode not in ("proxy", "get", "file", "env"):
        raise UsageError("--mode takes proxy, get, file or env")
    if request is not None and mode != "proxy":
        raise UsageError("--request is for the mode proxy")
    if (task is None) == (command is None):
        raise UsageError("explain takes one of --task and --command")
    place = site_of(context, home, redis).home
    with _said(), as_owner(place) as path:
        asked = None if host is None else host_of(host)
        ask = Ask(name, cast("Mode", mode), tenant, queue, task, command, asked, pairs(tag, "--tag"))
        decision = decide(load_rules(path.parent / RULES_FILE), ask)
    if decision.allowed and decision.requests and request is not None and not bounds.fits(request, [decision.requests]):
        decision = replace(decision, allowed=False, message=f"{decision.rule} does not list the request {request}")
    if as_json:
        print_json(decision)
    else:
        limits = f"ttl_s={decision.ttl_s or '-'} uses={decision.uses or '-'} approve={decision.approve}"
        if mode == "proxy":
            limits += f" field={decision.field!r}" if decision.field else f" header={decision.header!r}"
            limits += f" requests={', '.join(decision.requests) or '*'} sdk={decision.sdk or '-'}"
            limits += f" body_bytes={decision.body_bytes or '-'} at_once={decision.at_once or '-'}"
        print_line(f"{decision.rule}: {decision.message or limits}")
    if not decision.allowed:
        raise typer.Exit(1)


@vault.command()
def audit(
    context: typer.Context,
    anchor: Annotated[
        str | None, typer.Option("--anchor", metavar="COUNT:MAC", help="An end that was noted earlier, elsewhere.")
    ] = None,
    only_verify: Annotated[bool, typer.Option("--verify", help="Check the chain and print its end alone.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each new line until Ctrl-C.")] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the record's chain and print it; the last line says its end, to be noted elsewhere."""
    if only_verify and follow:
        raise UsageError("audit takes one of --verify and --follow")
    place = site_of(context, home, redis).home
    with _said(), contextlib.ExitStack() as stack:
        with as_owner(place) as path, contextlib.closing(Folder(path)) as folder:
            data = folder.read(audits.AUDIT_FILE, _MAX_AUDIT_BYTES)
            seed = seeds.read(folder, hostkey.parse(hostkey.source_of(folder, os.environ).read()))
            head, lines = audits.verify(data, seed, _anchor(anchor))
            reader = stack.enter_context(contextlib.closing(audits.Reader(folder, seed)))
        if follow:
            _follow(reader, as_json=as_json)
            return
    for line in () if only_verify else lines:
        _show(line, as_json=as_json)
    say(f"{head.count} lines, unchanged; end {head.count}:{head.mac}")


def _follow(reader: audits.Reader, *, as_json: bool) -> None:
    """Print the record and what is added to it; a line that does not fit ends it as an error."""
    try:
        while True:
            for line in reader.more():
                _show(line, as_json=as_json)
            time.sleep(_FOLLOW_S)
    except KeyboardInterrupt:
        say(f"{reader.head.count} lines, unchanged; end {reader.head.count}:{reader.head.mac}")


def _show(line: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(line)
        return
    rest = "  ".join(f"{key}={value}" for key, value in line.items() if key not in {"n", "at", "event"})
    print_line(f"{line['n']}  {line['at']}  {line['event']}  {rest}")


def _ask(place: Home, **order: object) -> Mapping[str, object]:
    """Have the running broker do something, or do it here if none runs; what goes wrong becomes our own error."""
    with _said():
        try:
            with _opened(place) as (store, record):
                return Clerk(store, record, Leases(Rules())).act(order)
        except VaultBusyError:
            return operator.ask(place.sockets / COUNTER, order)


@contextmanager
def _opened(place: Home) -> Iterator[tuple[Keystore, Audit]]:
    with as_owner(place) as path, Keystore(path, hostkey.outside(os.environ)) as store:
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
