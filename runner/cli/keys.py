"""`ringfence keys`: make keys, show them, say whose count, sign node cards.

Called by commands.py. Must never print a private key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from runner import keyring
from runner.cli.options import HomeOption, JsonOption, RedisOption, pairs
from runner.cli.output import print_json, print_line, print_table
from runner.cli.site import site_of
from runner.errors import UsageError
from runner.keyring import KeyView
from runner.wire import ids

__all__ = ["keys"]

#: Isolation levels, the best first.
LEVELS: Final = ("A", "B", "C", "D", "E", "F")

keys = typer.Typer(name="keys", help="Make keys, show them, say whose count.", no_args_is_help=True)


@keys.command()
def init(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """Make what is missing: fleet key, client key, trust.toml and client.json."""
    site = site_of(context, home, redis)
    _print(keyring.init(site.home, redis_url=site.redis), as_json)


@keys.command()
def show(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """Show the keys of this home and whom it trusts; public halves only."""
    _print(keyring.show(site_of(context, home, redis).home), as_json)


@keys.command()
def trust(
    context: typer.Context,
    public: Annotated[str, typer.Argument(metavar="PUBLIC", help="64 hex digits, or a file that holds them.")],
    may: Annotated[
        list[str] | None,
        typer.Option("--may", metavar="RIGHT", help="enqueue, kill or operate; repeat. Default enqueue."),
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option("--tenant", metavar="T", help="Repeat; * is every one.")] = None,
    queue: Annotated[list[str] | None, typer.Option("--queue", metavar="Q", help="Repeat; default every one.")] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let this home's nodes take jobs or commands that a key signed; agents read it at their next start."""
    place = site_of(context, home, redis).home
    view = keyring.trust(place, public, may or ("enqueue",), tenant or (ids.DEFAULT_TENANT,), queue or ("*",))
    _print((view,), as_json)


@keys.command()
def revoke(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as show prints it.")],
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take no more jobs or commands of a key, for ever."""
    _print((keyring.revoke(site_of(context, home, redis).home, key),), as_json)


@keys.command()
def card(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")],
    public: Annotated[
        str | None, typer.Option("--public", metavar="KEY", help="Its public key; default: made and kept here.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", metavar="T", help="Repeat; default every one.")
    ] = None,
    queue: Annotated[list[str] | None, typer.Option("--queue", metavar="Q", help="Repeat; default every one.")] = None,
    level: Annotated[
        str, typer.Option("--level", metavar="A…F", help="The best isolation that it may claim; default B.")
    ] = "B",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="k=v", help="A label it may claim; repeat.")
    ] = None,
    recipient: Annotated[
        str | None,
        typer.Option("--recipient", metavar="AGE1…", help="Its `vault recipient`: lets sealed arguments go there."),
    ] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Sign a node's card with the fleet key; prints the file to copy to the node."""
    place = site_of(context, home, redis).home
    if level not in LEVELS:
        raise UsageError(f"--level is one of {', '.join(LEVELS)}, not {level[:16]!r}")
    path: Path = keyring.issue_card(
        place,
        node,
        public=public,
        level=level,
        tenants=tenant or ("*",),
        queues=queue or ("*",),
        labels=pairs(label, "--label") or None,
        recipient=recipient,
    )
    print_line(str(path))


def _print(views: Sequence[KeyView], as_json: bool) -> None:
    if as_json:
        print_json(list(views))
        return
    print_table(
        ("KIND", "NAME", "ID", "PUBLIC", "MAY", "TENANTS", "QUEUES"),
        [
            (
                view.kind,
                view.name,
                view.id,
                view.public,
                "revoked" if view.revoked else ",".join(view.may) or "-",
                ",".join(view.tenants) or "-",
                ",".join(view.queues) or "-",
            )
            for view in views
        ],
    )
