"""The list of all commands, and the exit code of every error.

Called by main.py once the interpreter is known to be safe. Must never print a traceback for an error with a message.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Final

import typer

from runner.cli import exitcode
from runner.cli.agent import agent
from runner.cli.artifact import artifact
from runner.cli.audit import audit
from runner.cli.broker import broker
from runner.cli.daemons import store
from runner.cli.decide import approvals, approve, deny
from runner.cli.doctor import doctor
from runner.cli.drain import drain, suspend, undrain, unsuspend
from runner.cli.egress import egress
from runner.cli.keys import keys
from runner.cli.kill import kill
from runner.cli.look import events, logs, nodes, ps, result, show
from runner.cli.metrics import metrics
from runner.cli.options import HomeOption, RedisOption
from runner.cli.output import print_line, say
from runner.cli.pause import pause, resume
from runner.cli.policy import policy
from runner.cli.retry import retry
from runner.cli.run import call, run
from runner.cli.schedule import schedule, scheduler
from runner.cli.signal import signal
from runner.cli.site import Site
from runner.cli.up import up
from runner.cli.vault import vault
from runner.errors import ConfigError, RingfenceError, StoreError, UsageError
from runner.wire.errors import WireError

__all__ = ["application", "run_words"]

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_SETUP: Final = 78
#: Commands that are designed, and come with a later version.
LATER: Final = frozenset({"web"})

#: Commands that wait for a node's word: without the store there is none.
_CONFIRMED: Final = frozenset(
    {"kill", "pause", "resume", "signal", "approve", "deny", "drain", "undrain", "suspend", "unsuspend"}
)

application = typer.Typer(
    name="ringfence",
    help="Run AI-agent jobs on a fleet of hosts, isolated, and always be able to stop them.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print_line(importlib.metadata.version("ringfence"))
        raise typer.Exit


@application.callback()
def site(
    context: typer.Context,
    home: HomeOption = None,
    redis: RedisOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that may stand before every command."""
    context.obj = Site(home, redis)


_looks = (ps, show, result, logs, events, nodes, metrics, approvals, doctor)
_orders = (kill, pause, resume, signal, approve, deny, retry, drain, undrain, suspend, unsuspend)
for _function in (up, run, call, *_orders, *_looks, store, egress, broker, scheduler):
    # A job's own words follow the command: the first one that is no option ends our options.
    _settings = {"allow_interspersed_args": False} if _function is run else {}
    application.command(context_settings=_settings)(_function)
application.add_typer(keys)
application.add_typer(vault)
application.add_typer(agent)
application.add_typer(schedule)
application.add_typer(audit)
application.add_typer(policy)
application.add_typer(artifact)


def run_words(words: list[str]) -> int:
    """Run one command line and return its exit code; every known error becomes a message and a code."""
    named = _command_of(words)
    if named in LATER:
        say(f"{named}: not in this version")
        return EXIT_USAGE
    try:
        application(words, prog_name="ringfence", standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_ERROR
    except (UsageError, WireError) as error:
        say(str(error))
        say(f"see `ringfence {named} --help`")
        return EXIT_USAGE
    except ConfigError as error:
        say(str(error))
        return EXIT_SETUP
    except RingfenceError as error:
        say(str(error))
        return _code_of(named, error)
    return 0


def _command_of(words: list[str]) -> str:
    rest = iter(words)
    for word in rest:
        if word in {"--home", "--redis"}:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""


def _code_of(command: str, error: RingfenceError) -> int:
    if command in {"run", "call"}:
        return exitcode.INFRASTRUCTURE
    if command in _CONFIRMED and isinstance(error, StoreError):
        return exitcode.UNCONFIRMED
    return EXIT_ERROR
