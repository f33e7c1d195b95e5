"""`ringfence vault doctor`: how well this host's secrets are kept, each line graded, each fault with its fix.

Port: broker.vault. Called by vault.py. Must never open a secret, change anything, or print a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import typer

from broker.vault import doctor as grades
from broker.vault import hostkey, operator
from broker.vault.doctor import Finding, Process
from broker.vault.errors import VaultError
from broker.vault.operator import COUNTER
from broker.vault.rulesfile import RULES_FILE
from runner.cli import egress
from runner.cli.broker import RECOVERY_FILE, as_owner
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line, print_table
from runner.cli.site import site_of
from runner.errors import ConfigError, RingfenceError
from runner.home import Home, check_safe

__all__ = ["describe", "doctor"]

EXIT_INSECURE: Final = 1
_MANY: Final = 2
_ANSWER_S: Final = 2.0
_NONE_ANSWERS: Final = "none answers"


def doctor(
    context: typer.Context, home: HomeOption = None, redis: RedisOption = None, as_json: JsonOption = False
) -> None:
    """Grade what the secrets' protection rests on: secure, weak, insecure; exits 1 if anything is insecure."""
    place = site_of(context, home, redis).home
    if not place.vault.is_dir():
        raise ConfigError(f"{place.vault} is missing: make a vault with `ringfence vault init --home {place.path}`")
    findings = _findings(place)
    worst = grades.worst(findings)
    if as_json:
        print_json({"grade": worst, "findings": findings})
    else:
        print_table(("GRADE", "WHAT", "WHY"), [(one.grade, one.what, one.why) for one in findings])
        for one in findings:
            if one.fix:
                print_line(f"{one.what}: fix: {one.fix}")
        print_line(f"the vault is {worst}")
    raise typer.Exit(EXIT_INSECURE if worst == "insecure" else 0)


def describe(home: Home) -> str:
    """Return the vault's grade and its worst lines for `ringfence doctor`. Raises ConfigError: it is insecure."""
    if not home.vault.is_dir():
        return "none: jobs get no secret; `ringfence vault init` makes one"
    findings = _findings(home)
    worst = grades.worst(findings)
    faults = [f"{one.what}: {one.why}" for one in findings if one.grade == worst != "secure"]
    text = "; ".join([worst, *faults[:_MANY]]) + "; see `ringfence vault doctor`"
    if worst == "insecure":
        raise ConfigError(text)
    return text


def _findings(place: Home) -> list[Finding]:
    told = _told(place)
    recovery = place.keys / RECOVERY_FILE
    near = recovery if recovery.exists() else None
    with as_owner(place) as path:
        source, handed = hostkey.outside(os.environ), told.get("key") == "outside"
        found = grades.vault(path, path.parent / RULES_FILE, source, place.vault, handed=handed, near=near)
    broker, scrubber = (_process(told.get(name)) for name in ("pid", "scrubber_pid"))
    agent_uid = place.path.stat().st_uid
    return [
        _home(place),
        *found,
        *grades.processes(broker, scrubber, told, agent_uid, swap=_swap()),
        _egress(place),
    ]


def _told(place: Home) -> Mapping[str, object]:
    """Return what the broker says of itself; nothing if none answers."""
    try:
        return operator.ask(place.sockets / COUNTER, {"op": "status"}, wait_s=_ANSWER_S)
    except VaultError:
        return {}


def _process(pid: object) -> Process | None:
    return Process.of(pid) if isinstance(pid, int) else None


def _home(place: Home) -> Finding:
    try:
        check_safe(place)
    except RingfenceError as error:
        return Finding("home", "insecure", str(error), f"ls -lad {place.path} and the folders above it")
    return Finding("home", "secure", f"nobody else can change {place.path}")


def _egress(place: Home) -> Finding:
    try:
        return Finding("egress", "secure", egress.describe(place))
    except ConfigError as error:
        if str(error).startswith(_NONE_ANSWERS):
            return Finding("egress", "secure", "none runs: no job reaches the network, or a secret by proxy")
        return Finding("egress", "weak", str(error), "run the node as root, on a kernel with Landlock")


def _swap() -> bool:
    try:
        return len(Path("/proc/swaps").read_text("ascii", "replace").splitlines()) > 1
    except OSError:
        return True
