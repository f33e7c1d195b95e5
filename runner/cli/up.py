"""`ringfence up`: a fleet on one machine without set-up, in the foreground.

Called by commands.py. Must never leave a process behind, start twice on one home, or put the store's password where
another user could see it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from runner import keyring
from runner.app import App
from runner.cli import broker, ceiling, egress, store
from runner.cli.ceiling import Import
from runner.cli.children import Child, Children, Program
from runner.cli.options import HomeOption, RedisOption
from runner.cli.output import say
from runner.cli.policy import parsed
from runner.cli.site import site_of
from runner.errors import ConfigError, StoreError, UsageError
from runner.files import replace_file
from runner.home import Home
from runner.wire.view import NodeView

__all__ = ["only_one", "up"]

_STORE_START_S: Final = 60.0
_STORE_STOP_S: Final = 15.0
_AGENT_STOP_S: Final = 20.0
_SLOW_START_S: Final = 15.0
_LOCK_WAIT_S: Final = 3.0
_POLL_S: Final = 0.05
_IDLE_S: Final = 3600.0
_MAX_NODES: Final = 64


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What this `up` runs."""

    home: Home
    redis: str | None
    nodes: tuple[str, ...]
    slots: int
    policy: Path
    imports: tuple[Import, ...]


def up(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, max=_MAX_NODES, help="Node agents.")] = 1,
    slots: Annotated[int, typer.Option("--slots", metavar="N", min=1, max=256, help="Jobs at a time on each.")] = 4,
    allow: Annotated[
        list[Path] | None,
        typer.Option("--allow", metavar="PATH", help="Jobs may be granted paths below PATH; default: this folder."),
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", metavar="MODULE[:DIR]", help="Serve the tasks of this module.")
    ] = None,
    allow_net: Annotated[
        list[str] | None,
        typer.Option("--allow-net", metavar="HOST:PORT", help="Jobs may be granted this one, also on this machine."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Tools and rules of this policy file, too (docs/policy.md)."),
    ] = None,
    ca: egress.CaOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Run a store and N node agents on this machine until Ctrl-C; prints `ready`."""
    site = site_of(context, home, redis)
    modules = tuple(ceiling.parse_import(word) for word in imports or ())
    place = site.home
    text = _policy(place, modules, allow, allow_net or (), rules)
    authorities = egress.bundles(ca)
    keyring.init(place)
    with only_one(place) as lock:
        policy = place.path / "up-policy.toml"
        replace_file(policy, text.encode("utf-8"), 0o600)
        names = tuple(f"node-{number}" for number in range(1, nodes + 1))
        fleet = _Fleet(place, site.redis, names, slots, policy, modules)
        children = Children(say)
        children.catch_signals()
        # The socket outlives the process: agents that come while it starts again wait for it.
        with egress.listening(place) as descriptors:
            try:
                children.start(egress.program(descriptors, authorities=authorities))
                recipient = broker.prepare(place)
                children.start(broker.program(place))
                _run(fleet, children, lock, recipient)
            finally:
                children.close()
    raise typer.Exit(children.exit_code)


def _run(fleet: _Fleet, children: Children, lock: int, recipient: str | None) -> None:
    _start_store(fleet, children, lock)
    if children.over():
        return
    for name in fleet.nodes:
        # The best level that this user can reach; the agent serves no more than what it finds.
        level = "A" if os.geteuid() == 0 else "B"
        keyring.issue_card(fleet.home, name, level=level, recipient=recipient)
    agents = {name: children.start(_agent(fleet, name)) for name in fleet.nodes}
    _wait_ready(fleet, children, agents)
    if children.over():
        return
    place = shlex.quote(str(fleet.home.path))
    say(f"{len(agents)} node(s) with {fleet.slots} slots each; try: ringfence --home {place} run -- echo hi")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not children.over():
        children.watch(_IDLE_S)


def _start_store(fleet: _Fleet, children: Children, lock: int) -> None:
    """Start the embedded store and wait until it answers, or note the one that is given."""
    if fleet.redis is not None:
        keyring.init(fleet.home, redis_url=fleet.redis)
        return
    embedded = store.prepare(fleet.home.path)
    words = (str(embedded.program), str(embedded.config))
    # The store inherits the lock: while it still writes, no other `up` can start a second one on its files.
    program = Program("store", words, signal.SIGTERM, _STORE_STOP_S, stage=0, uid=embedded.uid, inherit=(lock,))
    children.start(program)
    keyring.init(fleet.home, redis_url=embedded.url)
    deadline = time.monotonic() + _STORE_START_S
    while not children.over() and not embedded.answers():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the store does not answer at {embedded.socket}: see {embedded.config.parent}/valkey.log"
            )
        children.watch(_POLL_S)


def _agent(fleet: _Fleet, name: str) -> Program:
    words = [sys.executable, "-I", "-m", "node_agent", "--home", str(fleet.home.path), "--name", name]
    words += ["--slots", str(fleet.slots), "--policy", str(fleet.policy)]
    for item in fleet.imports:
        words += ["--import", item.module]
    for folder in dict.fromkeys(item.folder for item in fleet.imports if item.folder is not None):
        words += ["--task-path", str(folder)]
    return Program(name, tuple(words), signal.SIGKILL, _AGENT_STOP_S, stage=1)


def _wait_ready(fleet: _Fleet, children: Children, agents: dict[str, Child]) -> None:
    """Wait until every agent is registered, under its present process id."""
    app = App(home=fleet.home.path)
    started = time.monotonic()
    told = False
    while not children.over():
        views = {view.name: view for view in _views(app)}
        late = [name for name, child in agents.items() if not _is_up(views.get(name), child)]
        if not late:
            app.close()
            return
        if not told and time.monotonic() - started > _SLOW_START_S:
            say(f"still waiting for {', '.join(late)}; see the lines above, or run `ringfence doctor`")
            told = True
        children.watch(_POLL_S)


def _views(app: App) -> Sequence[NodeView]:
    try:
        return app.nodes()
    except StoreError:
        return ()


def _is_up(view: NodeView | None, child: Child) -> bool:
    return view is not None and view.pid == child.pid and view.state != "lost"


def _policy(
    home: Home, imports: Sequence[Import], allow: Sequence[Path] | None, allow_net: Sequence[str], file: Path | None
) -> str:
    """Return the policy of these agents: this command's own rule, unless FILE says itself which jobs are let in."""
    net = ceiling.allowed_net(allow_net)
    if file is None:
        return ceiling.policy_text(_allowed(allow, home), imports, net)
    rules, whole = ceiling.read_rules(file)
    if whole and (allow or net):
        raise UsageError(f"{file} has [[allow]] rules of its own: write what --allow and --allow-net say into them")
    text = f"{ceiling.HEADER}\n{rules}" if whole else ceiling.policy_text(_allowed(allow, home), imports, net, rules)
    parsed(text, file)
    return text


def _allowed(named: Sequence[Path] | None, home: Home) -> tuple[Path, ...]:
    if named:
        return ceiling.allowed_paths(named)
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return ()
    place, why_not = ceiling.default_path(folder, home.path)
    if place is None:
        say(f"{why_not}: jobs can be granted no path; name some with --allow PATH")
        return ()
    return (place,)


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[int]:
    """Hold the home's lock. Raises ConfigError when another `up` runs on it."""
    path = home.path / "up.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        # An `up` that was killed a moment ago leaves its store running until that has written its data.
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise ConfigError(f"another `ringfence up` runs on {home.path}: end it, or choose another --home")
            time.sleep(_POLL_S)
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
