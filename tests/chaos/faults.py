"""What goes wrong in a chaos run, at random.

Agents are killed, stopped, restarted and sent to sleep; connections are cut; the store is crashed, frozen and
restarted; clocks are moved. Called by test_chaos.py. ``calm`` undoes all of it; must never leave a process stopped or a
store away.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from redis.exceptions import RedisError

from tests.scale.clocks import SKEW
from tests.scale.fleet import Agent, Fleet
from tests.support.wait import pause

__all__ = ["Weather"]

#: How far a wall clock is moved: a node refuses what its clock says was handed out two minutes too early.
WALL_S = (-100.0, 1200.0)
#: An agent that was told to stop has to be gone after so long, stops and outages in between included.
LONGEST_END_S = 90.0


@dataclass(slots=True)
class Weather:
    """Throws faults until told to stop; ``counts`` says how many of each."""

    fleet: Fleet
    seed: int
    longest_stop_s: float = 6.0
    longest_outage_s: float = 2.0
    counts: Counter[str] = field(default_factory=Counter)
    skew_s: int = 0
    latest_skew_s: int = 0
    #: Agents whose whole node slept: pid, from, to, in CLOCK_MONOTONIC nanoseconds.
    naps: list[tuple[int, int, int]] = field(default_factory=list)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed}/weather")

    def throw(self, until: Callable[[], bool], mean_s: float) -> None:
        """Throw a fault every ``mean_s`` seconds or so until ``until``."""
        kinds: dict[Callable[[], None], int] = {
            self.crash: 5,
            self.stop: 4,
            self.sleep: 2,
            self.restart: 2,
            self.cut: 4,
            self.store_crash: 2,
            self.store_restart: 1,
            self.outage: 2,
            self.wall: 3,
            self.skew: 2,
        }
        while not until():
            fault = self._chance.choices(list(kinds), list(kinds.values()))[0]
            fault()
            self.counts[fault.__name__] += 1
            rest = time.monotonic() + self._chance.expovariate(1 / mean_s)
            while time.monotonic() < rest and not until():
                self._due()
                pause(0.02)

    def calm(self) -> None:
        """Bring everything back, and the store's time to the latest that was seen: what is due then becomes due."""
        while self._later:
            self._due()
            pause(0.02)
        self.skew_s = self.latest_skew_s
        self._set_skew()
        for agent in self.fleet.agents.values():
            if agent.dead():
                self.fleet.launch(agent)

    def crash(self) -> None:
        """An agent is killed, and started again a little later."""
        agent = self._anyone()
        agent.signal(signal.SIGKILL)
        agent.wait()
        self._after(self._chance.uniform(0, 2.0), self._relauncher(agent))

    def restart(self) -> None:
        """An agent is stopped in order, and started again."""
        agent = self._anyone()
        agent.signal(signal.SIGTERM)
        self._after(self._chance.uniform(0.2, 2.0), self._relauncher(agent))

    def stop(self) -> None:
        """An agent stands still, its jobs do not."""
        agent = self._anyone()
        agent.signal(signal.SIGSTOP)
        agent.stopped = True
        self._after(self._chance.uniform(0.1, self.longest_stop_s), lambda: self._go_on(agent))

    def sleep(self) -> None:
        """A whole simulated node stands still, and its CLOCK_MONOTONIC with it."""
        agent = self._anyone(simulated=True)
        pid, begun_ns = agent.pid, time.monotonic_ns()
        agent.signal(signal.SIGSTOP)
        agent.stopped = True
        below = _children(pid)
        _send(below, signal.SIGSTOP)

        def wake() -> None:
            now_ns = time.monotonic_ns()
            self.naps.append((pid, begun_ns, now_ns))
            if agent.clock is not None:
                agent.clock.sleep((now_ns - begun_ns) / 1e9)
            _send(below, signal.SIGCONT)
            self._go_on(agent)

        self._after(self._chance.uniform(0.1, self.longest_stop_s), wake)

    def cut(self) -> None:
        """Every connection to the store is closed at once."""
        with suppress(RedisError):
            self.fleet.redis.client_kill_filter(_type="normal", skipme=True)

    def store_crash(self) -> None:
        """The store dies, and comes back with its data."""
        self.fleet.store.stop(signal.SIGKILL)
        pause(self._chance.uniform(0, self.longest_outage_s / 2))
        self.fleet.store.start()

    def store_restart(self) -> None:
        """The store is restarted in order."""
        self.fleet.store.stop()
        self.fleet.store.start()

    def outage(self, outage_s: float | None = None) -> None:
        """The store accepts connections and answers nothing."""
        self.fleet.store.signal(signal.SIGSTOP)
        pause(outage_s or self._chance.uniform(0.1, self.longest_outage_s))
        self.fleet.store.signal(signal.SIGCONT)

    def away(self, outage_s: float) -> None:
        """The store is not there for so long."""
        self.fleet.store.stop(signal.SIGKILL)
        pause(outage_s)
        self.fleet.store.start()

    def wall(self) -> None:
        """An agent's wall clock jumps, back or forth."""
        agent = self._anyone()
        if agent.clock is not None:
            agent.clock.jump(self._chance.uniform(*WALL_S) - agent.clock.wall_s)

    def skew(self) -> None:
        """The store's clock jumps, back or forth."""
        self.skew_s = self._chance.choice((0, 3, 60, 600, -60))
        self.latest_skew_s = max(self.latest_skew_s, self.skew_s)
        self._set_skew()

    def _set_skew(self) -> None:
        with suppress(RedisError):
            self.fleet.redis.set(SKEW, self.skew_s)

    def _anyone(self, *, simulated: bool = False) -> Agent:
        while not (found := self._awake(simulated=simulated)) and self._later:
            self._due()
            pause(0.02)
        return self._chance.choice(found)

    def _awake(self, *, simulated: bool) -> list[Agent]:
        return [
            a for a in self.fleet.agents.values() if not a.dead() and not a.stopped and (a.simulated or not simulated)
        ]

    def _relauncher(self, agent: Agent) -> Callable[[], None]:
        pid, patience = agent.pid, time.monotonic() + LONGEST_END_S

        def relaunch() -> None:
            if agent.pid != pid:
                return  # another fault ended it, too
            if agent.dead():
                self.fleet.launch(agent)
                return
            if time.monotonic() >= patience:
                said = self.fleet.words_of(agent)
                raise AssertionError(f"{agent.name} does not end: {said}\n{agent.stacks()}")
            self._after(0.1, relaunch)

        return relaunch

    def _go_on(self, agent: Agent) -> None:
        agent.stopped = False
        agent.signal(signal.SIGCONT)

    def _after(self, wait_s: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + wait_s, act))

    def _due(self) -> None:
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for act in due:
            act()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
