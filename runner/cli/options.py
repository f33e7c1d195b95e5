"""The options that several commands share, and their values as the API wants them.

Called by the commands. Must never accept an option that has no effect: what has not landed yet is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, cast

import typer

from runner.errors import UsageError
from runner.grants import Grants, Secret

__all__ = [
    "HomeOption",
    "JobArgument",
    "JsonOption",
    "RedisOption",
    "TenantOption",
    "build_grants",
    "json_value",
    "moment",
    "pairs",
    "seconds_or_moment",
]

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", metavar="DIR", help="The home; default $RINGFENCE_HOME, /var/lib/ringfence, XDG state."),
]
RedisOption = Annotated[str | None, typer.Option("--redis", metavar="URL", help="The store, instead of client.json's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON (docs/cli.md).")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id, as ps prints it.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", metavar="T", help="Only this tenant.")]


def pairs(words: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return ``k=v`` words as a dict. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} takes NAME=VALUE")
        if key in found:
            raise UsageError(f"{option} names {key!r} twice")
        found[key] = value
    return found


def json_value(text: str, option: str) -> object:
    """Return one JSON value of the command line. Raises UsageError."""
    try:
        return cast("object", json.loads(text))
    except ValueError:
        raise UsageError(f"{option} takes JSON: a text needs quotes inside the quotes, such as '\"solar\"'") from None


def moment(text: str, option: str, other: str = "") -> datetime:
    """Return an aware datetime of the command line; ``other``: what else the option takes. Raises UsageError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(f"{option} takes {other}a time with its zone, such as 2030-01-02T03:04:05Z or …+01:00")
    return found


def seconds_or_moment(text: str, option: str) -> float | datetime:
    """Return a number of seconds from now, or an aware datetime. Raises UsageError."""
    try:
        return float(text)
    except ValueError:
        return moment(text, option)


def build_grants(
    *,
    read: Sequence[str] | None,
    write: Sequence[str] | None,
    net: Sequence[str] | None,
    secret: Sequence[str] | None,
    memory: str | None,
    cpus: float | None,
    pids: int | None,
    disk: str | None,
    no_exec: bool = False,
    service: bool = False,
    unix: bool = False,
    spawn: int | None = None,
    state: str | None = None,
    agent: str | None = None,
    mail: Sequence[str] | None = None,
    watch: Sequence[str] | None = None,
    tool: Sequence[str] | None = None,
) -> Grants:
    """Return the grants that the options ask for. Paths become absolute here, on the operator's side.

    Raises:
        UsageError: says which form is meant.
    """
    if net and "none" in net and len(net) > 1:
        raise UsageError("--net none stands alone")
    return Grants(
        read=[str(Path(word).resolve()) for word in read or ()],
        write=[_write_path(word) for word in write or ()],
        net=list(net or ()),
        secrets=[_secret(word) for word in secret or ()],
        memory=memory,
        cpus=cpus,
        pids=pids,
        disk=disk,
        exec=not no_exec,
        service=service,
        unix=unix,
        spawn=spawn,
        state=state,
        agent=agent,
        mail=list(mail or ()),
        watch=list(watch or ()),
        tools=list(tool or ()),
    )


def _write_path(word: str) -> str:
    # Links are resolved here because the node refuses a granted path that has any.
    path = str(Path(word.removesuffix(":all")).resolve())
    return f"{path}:all" if word.endswith(":all") else path


def _secret(word: str) -> Secret:
    name, colon, rest = word.partition(":")
    mode, _, target = rest.partition("=")
    if not colon or rest == "get":
        return Secret(name, get=True)
    if rest == "file":
        return Secret(name, file=True)
    if mode == "env" and target:
        return Secret(name, env=target)
    if mode == "proxy" and target:
        return Secret(name, proxy=target)
    raise UsageError("--secret takes NAME, NAME:env=VAR, NAME:file, NAME:get or NAME:proxy=HOST; NAME alone means get")
