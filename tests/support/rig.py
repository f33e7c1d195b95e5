"""Node agents without `up`, each a process that a test may kill, stop, break and start again. Called by the e2e tests.

Must never outlive its block: the kernel ends every agent with the test process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack, cast

import redis

from node_agent.containment.cgroup import NodeGroups
from runner import App, Grants, keyring
from runner.cli import ceiling, launch
from runner.cli.ceiling import Import
from runner.home import Home
from runner.job import Job
from runner.request import JobOptions
from runner.wire.keys import Keys
from runner.wire.states import END_STATES
from tests.support import agents, scratch, valkey
from tests.support.valkey import Valkey
from tests.support.wait import wait_until

__all__ = ["FAULTY", "PROGRAMS", "Node", "Rig", "ends_of", "rigged"]

PROGRAMS = Path(__file__).parents[1] / "e2e" / "programs"
FAULTY = Path(__file__).with_name("faulty_agent.py")
HEARTBEAT_S = 1.0
READY_S = 30.0
STOP_S = 15.0


@dataclass(slots=True)
class Node:
    """One agent by name; ``process`` is its present one."""

    name: str
    words: list[str]
    env: dict[str, str]
    log: Path
    #: What starts it, word for word; without, it is forked from the nursery (agents.py).
    under: list[str] | None = None
    faulty: bool = False
    process: subprocess.Popen[bytes] | agents.Agent | None = None

    @property
    def pid(self) -> int:
        """The agent's process id."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def start(self) -> None:
        """Start the agent; it ends with this process."""
        head = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(signal.SIGKILL)), launch.NO_UID]
        with self.log.open("ab") as log:
            if self.under is None:
                self.process = agents.start(self.words, self.env, log.fileno(), faulty=self.faulty)
                return
            words = [*head, *self.under, *self.words]
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, cwd="/"
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent's process alone; one that has ended gets none."""
        assert self.process is not None, f"{self.name} was never started"
        self.process.send_signal(number)

    def crash(self) -> None:
        """SIGKILL to the agent, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for the end; return the exit status."""
        assert self.process is not None
        return self.process.wait(STOP_S)

    def dead(self) -> bool:
        """Return whether the process has ended."""
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """End the agent in order, stopped or not; idempotent."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def tail(self) -> str:
        """Return the end of what the agent said."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""


@dataclass(slots=True)
class Rig:
    """A store, a home and agents. ``tag`` is part of every node's name."""

    home: Path
    work: Path
    store: Valkey
    app: App
    redis: redis.Redis
    tag: str
    slots: int
    heartbeat_s: float
    imports: tuple[Import, ...] = ()
    real: bool = False
    keys: Keys = field(default_factory=Keys)
    nodes: dict[str, Node] = field(default_factory=dict)

    def start(self, name: str, *, faulty: bool = False, under: Sequence[str] = (), **settings: str) -> Node:
        """Start a new agent ``TAG-name`` and wait until it is registered.

        ``faulty``: see faulty_agent.py. ``under``: a program that starts it, with its own arguments.
        """
        full = f"{self.tag}-{name}"
        home = Home(self.home)
        keyring.issue_card(home, full, level="B")
        words = [*([str(self.fault)] if faulty else []), "--home", str(self.home), "--name", full]
        words += ["--slots", str(self.slots), "--policy", str(self.home / "policy.toml")]
        for item in self.imports:
            words += ["--import", item.module, "--task-path", str(item.folder)]
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "RINGFENCE_HEARTBEAT_S": str(self.heartbeat_s), **settings}
        entry = [str(FAULTY)] if faulty else ["-m", "node_agent"]
        own = [*under, sys.executable, "-I", *entry] if under or self.real else None
        node = Node(full, words, env, self.home.parent / f"{full}.log", own, faulty)
        self.nodes[name] = node
        node.start()
        self.wait_up(node)
        return node

    def sweep(self, node: Node) -> None:
        """Remove the groups of an agent that a test killed and never started again, as its next start would."""
        groups = NodeGroups.open(node.name, home=self.home)
        if groups is not None:
            groups.sweep()
            groups.close()

    @property
    def fault(self) -> Path:
        """The file that arms the next fault of a faulty agent."""
        return self.home.parent / "fault"

    def restart(self, node: Node) -> None:
        """Start a dead agent again and wait until it is registered."""
        assert node.dead(), f"{node.name} still runs"
        node.start()
        self.wait_up(node)

    def wait_up(self, node: Node) -> None:
        """Wait until the agent's present process is registered. Fails with its last words if it ends."""

        def up() -> bool:
            assert not node.dead(), node.tail()
            return self.record(node).get("pid") == node.pid

        wait_until(up, f"{node.name} to be registered", READY_S)

    def record(self, node: Node) -> dict[str, object]:
        """Return what the agent last published of itself."""
        raw = cast("bytes | None", self.redis.hget(self.keys.nodes(), node.name))
        return cast("dict[str, object]", json.loads(raw)) if raw else {}

    def boot(self, node: Node) -> str:
        """Return the agent's present boot id."""
        return str(self.record(node).get("boot", ""))

    def ledger(self, node: Node) -> str:
        """Return what the agent's replay ledger holds; its lines follow the store by a moment."""
        return (Home(self.home).node(node.name) / "ledger").read_text("ascii")

    def state(self, job: Job[None] | Job[object]) -> str:
        """Return the state that the store shows."""
        raw = cast("bytes | None", self.redis.hget(self.keys.job(job.id), "rf_state"))
        return raw.decode() if raw else ""

    def attempt(self, job: Job[None]) -> int:
        """Return the number of the last attempt."""
        return int(cast("bytes", self.redis.hget(self.keys.job(job.id), "rf_attempt")) or b"0")

    def wait_state(self, job: Job[None] | Job[object], *states: str, timeout_s: float = 20.0) -> None:
        """Wait until the store shows one of these states."""
        wait_until(lambda: self.state(job) in states, f"{job.id} to be {' or '.join(states)}", timeout_s)

    def wait_idle(self) -> None:
        """Wait until no agent start holds a job: every slot is free."""
        wait_until(lambda: not list(self.redis.scan_iter(f"{self.keys.rf}claims:*")), "all slots to be free", 20)

    def logs(self, job: Job[None] | Job[object]) -> str:
        """Return the job's output so far."""
        return b"".join(data for _, data in job.logs()).decode("utf-8", "replace")

    def wait_output(self, job: Job[None] | Job[object], word: str, timeout_s: float = 20.0) -> None:
        """Wait until the job's output holds ``word``."""

        def said() -> bool:
            # The state first: what was written before an end stands by then.
            state = self.state(job)
            found = word in self.logs(job)
            assert found or state not in END_STATES, f"{job.id} {state} without {word!r}: {job.status().detail}"
            return found

        wait_until(said, f"{word!r} in the output of {job.id}", timeout_s)

    def command(self, *argv: str, **options: Unpack[JobOptions]) -> Job[None]:
        """Enqueue a command."""
        return self.app.command(argv, **options)

    def pulse(
        self,
        name: str,
        *words: str,
        tags: Mapping[str, str] | None = None,
        retries: int = 0,
        once: bool = False,
        node: str | None = None,
    ) -> tuple[Job[None], Path]:
        """Enqueue a job that adds lines ``PROCESS TIME`` to a marker file until it dies; see pulse.py for words."""
        marker = self.work / name
        marker.touch()
        granted = Grants(read=(str(PROGRAMS),), write=(str(self.work),))
        argv = ["python3", str(PROGRAMS / "pulse.py"), str(marker), *words]
        options = JobOptions(grants=granted, tags=tags or {}, retries=retries, at_most_once=once)
        if node is not None:
            options["node"] = node
        job = self.app.command(argv, **options)
        return job, marker


@contextmanager
def rigged(
    *,
    slots: int = 2,
    heartbeat_s: float = HEARTBEAT_S,
    imports: Sequence[Import] = (),
    tag: str = "",
    real: bool = False,
) -> Iterator[Rig]:
    """Yield a rig without agents; whatever it starts is gone afterwards.

    ``real``: agents start from nothing, for tests of their memory and environment; each costs 0.4 s of processor time.
    """
    with scratch.folder(mode=0o711) as folder, valkey.running(("--appendonly", "yes")) as store:
        work, home = folder / "work", folder / "h"
        work.mkdir()
        keyring.init(Home(home), redis_url=store.url)
        (home / "policy.toml").write_text(ceiling.policy_text([work, PROGRAMS], imports))
        client = store.client()
        client.sadd(Keys().lanes(), "agents")  # a lane that agents don't know yet waits for their next look, a second
        with App(home=home) as app:
            name = tag or f"r{secrets.token_hex(3)}"
            rig = Rig(home, work, store, app, client, name, slots, heartbeat_s, tuple(imports), real)
            try:
                yield rig
            finally:
                for node in rig.nodes.values():
                    node.stop()
                    rig.sweep(node)
                client.close()


def ends_of(rig: Rig, jobs: Sequence[Job[None]]) -> dict[str, tuple[str, int]]:
    """Return for each job its stored state and how many job.ended events it has."""
    counts = {job.id: 0 for job in jobs}
    for event in rig.app.events():
        if event.type == "job.ended" and event.job in counts:
            counts[event.job] += 1
    found = {job.id: (rig.state(job), counts[job.id]) for job in jobs}
    open_ones = [job for job, (state, _) in found.items() if state not in END_STATES]
    assert not open_ones, f"not ended: {open_ones}"
    return found
