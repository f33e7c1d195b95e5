"""`ringfence policy`: is a policy file valid, what does it say of a job or a call, and does it say what it should?

Port: the command line's way to the node's policy (node_agent). Called by commands.py. Must never judge otherwise than
a node does: it calls the same functions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from node_agent import policy as policies
from node_agent import policycases
from node_agent.errors import PolicyError
from node_agent.policy import Policy
from runner.cli.options import HomeOption, JsonOption, json_value, pairs
from runner.cli.output import print_fields, print_json, print_line, say
from runner.cli.site import site_of
from runner.errors import ConfigError, UsageError
from runner.wire.spec import JobSpec

__all__ = ["parsed", "policy"]

policy = typer.Typer(name="policy", help="Check a node's policy, and ask what it says.", no_args_is_help=True)

EXIT_DIFFERENT: Final = 1
_FileOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Default HOME/policy.toml.")]
_Spec = Annotated[str | None, typer.Argument(metavar="[JOBSPEC]", help="JSON file of a job spec's fields; - is stdin.")]
_Cases = Annotated[Path, typer.Argument(metavar="CASES", help="TOML file of [[case]] tables (docs/policy.md).")]


@policy.command()
def check(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Default HOME/policy.toml.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a policy file as a node does; exits 78 if it does not load."""
    found = _load(context, file, home)
    facts = {
        "policy": found.version,
        "allow": str(sum(rule.effect == "allow" for rule in found.rules)),
        "deny": str(sum(rule.effect == "deny" for rule in found.rules)),
        "call": str(len(found.calls.rules)),
        "calls": "listed" if found.calls.listed else "granted",
    }
    print_json(facts) if as_json else print_fields(list(facts.items()))


@policy.command()
def explain(
    context: typer.Context,
    jobspec: _Spec = None,
    task: Annotated[str | None, typer.Option("--task", metavar="M:F", help="A task's job.")] = None,
    command: Annotated[str | None, typer.Option("--command", metavar="CMD", help="A command's job.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="T")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="Q")] = None,
    key: Annotated[str, typer.Option("--key", metavar="ID", help="The id of the key that signed it.")] = "",
    action: Annotated[str, typer.Option("--action", metavar="OP", help="A call of the job, such as tool.call.")] = "",
    resource: Annotated[str, typer.Option("--resource", metavar="R", help="Tool, mailbox or path of the call.")] = "",
    arg: Annotated[list[str] | None, typer.Option("--arg", metavar="NAME=JSON", help="Of the call; repeat.")] = None,
    file: _FileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which rule decides on a job, or on a call of it; exits 0 allowed, 1 denied or left to a person."""
    if not action and (resource or arg):
        raise UsageError("--resource and --arg go with --action")
    given = {"task": task, "argv": [command] if command else None, "tenant": tenant, "queue": queue}
    spec = _spec(jobspec, {name: value for name, value in given.items() if value is not None})
    args = {name: json_value(text, "--arg") for name, text in pairs(arg, "--arg").items()}
    found = _load(context, file, home)
    said = policycases.explained(found, spec, key or policycases.NO_KEY, action, resource, args)
    if as_json:
        print_json(said)
    else:
        print_fields(
            [("decision", said.decision), ("rule", said.rule), ("reason", said.reason), ("policy", said.policy)]
        )
    raise typer.Exit(0 if said.decision == "allow" else EXIT_DIFFERENT)


@policy.command(name="test")
def try_cases(
    context: typer.Context,
    cases: _Cases,
    file: _FileOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try a table of jobs and calls; exits 1 if the policy says of one of them what it should not."""
    found = _load(context, file, home)
    try:
        tried = policycases.tried(found, cases.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{cases} can't be read: {error}") from None
    except PolicyError as error:
        raise UsageError(f"{cases}: {error}") from None
    if as_json:
        print_json(tried)
    else:
        for one in tried:
            print_line(_line(one))
    wrong = sum(not one.right for one in tried)
    say(f"{len(tried)} cases, {wrong} not as expected; policy {found.version[:16]}")
    raise typer.Exit(EXIT_DIFFERENT if wrong else 0)


def _line(one: policycases.Tried) -> str:
    said = one.said
    if one.right:
        return f"ok    {one.name}: {said.decision} ({said.rule})"
    wanted = one.expected + (f" by {one.expected_rule}" if one.expected_rule else "")
    return f"WRONG {one.name}: {said.decision} ({said.rule}: {said.reason}), expected {wanted}"


def _load(context: typer.Context, file: Path | None, home: Path | None) -> Policy:
    path = file or _default(site_of(context, home, None).home.path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"the policy {path} can't be read: {error}"
        raise ConfigError(why if file else f"{why}; name one, or the --home of the node") from None
    return parsed(text, path)


def parsed(text: str, file: Path) -> Policy:
    """Return what a policy file says, as a node reads it. Raises ConfigError that names the file."""
    try:
        return policies.parse(text)
    except PolicyError as error:
        raise ConfigError(f"{file}: {error}") from None


def _default(home: Path) -> Path:
    own, of_up = home / "policy.toml", home / "up-policy.toml"
    return of_up if of_up.exists() and not own.exists() else own


def _spec(place: str | None, given: dict[str, object]) -> JobSpec:
    fields: object = {}
    if place is not None:
        try:
            text = sys.stdin.read() if place == "-" else Path(place).read_text("utf-8")
            fields = json.loads(text)
        except (OSError, ValueError) as error:
            raise UsageError(f"JOBSPEC {place} is no JSON file: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError("JOBSPEC is an object of a job spec's fields")
    if not {"task", "argv"} & {*fields, *given}:
        raise UsageError("explain takes a JOBSPEC, --task M:F or --command CMD")
    try:
        return policycases.spec_of({**fields, **given})
    except PolicyError as error:
        raise UsageError(str(error)) from None
