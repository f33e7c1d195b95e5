"""Acceptance 3 of the queue: a hundred agents on one machine, with no more work for each than for ten."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import redis
from redis.exceptions import RedisError

from runner import request
from tests.scale.fleet import TASK, Fleet, running
from tests.support.wait import pause, wait_until

FULL = os.environ.get("RINGFENCE_TEST_FULL") == "1"
#: Agents, jobs, and seconds for which they are watched idle.
FEW, MANY = ((10, 4000, 20.0), (100, 20_000, 20.0)) if FULL else ((2, 100, 0.5), (6, 300, 0.5))
SLOTS = 2
HEARTBEAT_S = 5.0
#: What calls of agents are made of; scripts use none of these commands, so each is one round trip.
CALLS = ("evalsha", "eval", "blpop", "xreadgroup", "xack", "smembers", "fcall")
#: How much more each agent may cost among ten times as many.
FLAT = 1.6
WINDOW_S = 0.1
#: Of an agent, each of which comes back by itself; one of them only when there is something to say.
CONNECTIONS = 8
#: The largest share of them all that may come back in one window.
SHARE = 0.3
AWAY_S, LONGEST_S = (3.0, 60.0) if FULL else (0.5, 20.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fleet of some size costs.

    ``*_per_job``: commands of scripts included; round trips alone; those less what the agents would have made idle.
    """

    agents: int
    commands_per_job: float
    calls_per_job: float
    own_calls_per_job: float
    idle_commands_per_s: float
    idle_cpu_ms_per_s: float
    jobs_per_s: float


@pytest.mark.alone
@pytest.mark.endurance
@pytest.mark.timeout(570)
def test_many_agents_cost_no_more_each_and_come_back_one_by_one() -> None:
    """Commands a job and processor time of an idle agent stay flat; after a store restart nobody stampedes."""
    with running(journal=False) as fleet:
        few = measured(fleet, *FEW)
        many = measured(fleet, *MANY)
        back = comeback(fleet)
    for cost in (few, many):
        print(cost)  # noqa: T201 - the figures
    print(back)  # noqa: T201 - as above
    assert many.own_calls_per_job <= 1.0
    if FULL:
        assert many.commands_per_job <= FLAT * few.commands_per_job
        assert many.idle_commands_per_s <= FLAT * few.idle_commands_per_s
        assert many.idle_cpu_ms_per_s <= FLAT * few.idle_cpu_ms_per_s
        assert back.most <= SHARE * CONNECTIONS * many.agents


def measured(fleet: Fleet, agents: int, jobs: int, idle_s: float) -> Cost:
    """Grow the fleet to so many agents, watch it idle, and have it drain so many jobs."""
    for number in range(len(fleet.agents), agents):
        fleet.start(f"n{number}", slots=SLOTS, heartbeat_s=HEARTBEAT_S, wait=False)
    fleet.wait_all_up()
    pause(1.0)
    cpu, commands = cpu_s(fleet), total(fleet.redis)
    pause(idle_s)
    idle_cpu, idle_commands = cpu_s(fleet) - cpu, total(fleet.redis) - commands
    before, done = counted(fleet.redis), fleet.redis.zcard("rq:finished:agents")
    begun = time.monotonic()
    specs = [request.build({}, task=TASK, kwargs={}) for _ in range(jobs)]
    fleet.app.client().enqueue(specs)
    wait_until(lambda: fleet.redis.zcard("rq:finished:agents") - done >= jobs, f"{jobs} jobs to finish", 400.0)
    took_s = time.monotonic() - begun
    spent = counted(fleet.redis) - before
    calls = sum(spent[name] for name in CALLS)
    return Cost(
        agents=agents,
        commands_per_job=round(sum(spent.values()) / jobs, 2),
        calls_per_job=round(calls / jobs, 3),
        own_calls_per_job=round((calls - idle_commands / idle_s * took_s) / jobs, 3),
        idle_commands_per_s=round(idle_commands / idle_s / agents, 2),
        idle_cpu_ms_per_s=round(1000 * idle_cpu / idle_s / agents, 2),
        jobs_per_s=round(jobs / took_s, 1),
    )


@dataclass(frozen=True, slots=True)
class Comeback:
    """How agents returned to a restarted store: the most new connections in WINDOW_S, all of them, seconds for all."""

    most: int
    connections: int
    loaded_s: float
    took_s: float


def comeback(fleet: Fleet) -> Comeback:
    """Take the store away for some seconds, and watch the agents come back while it loads its data and after that."""
    fleet.store.stop()
    pause(AWAY_S)
    begun = time.monotonic()
    fleet.store.start(wait=False)
    samples: list[tuple[float, int]] = []
    loaded_s = 0.0
    wanted = len(fleet.agents) * (CONNECTIONS - 1)
    with fleet.store.client() as client:
        while time.monotonic() - begun < LONGEST_S:
            with suppress(RedisError):
                connected = cast("dict[str, int]", client.info("clients"))["connected_clients"]
                arrived = cast("dict[str, int]", client.info("stats"))["total_connections_received"]
                samples.append((time.monotonic() - begun, arrived))
                if not loaded_s and not cast("dict[str, int]", client.info("persistence"))["loading"]:
                    loaded_s = samples[-1][0]
                if connected >= wanted and loaded_s:
                    break
            pause(0.01)
    assert loaded_s, "the store did not come back"
    most = max((more - some for at, some in samples for then, more in samples if 0 <= then - at <= WINDOW_S), default=0)
    return Comeback(most, samples[-1][1], round(loaded_s, 2), round(samples[-1][0], 2))


def cpu_s(fleet: Fleet) -> float:
    """Return the processor seconds of all agents."""
    ticks = 0
    for agent in fleet.agents.values():
        words = Path(f"/proc/{agent.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def counted(client: redis.Redis) -> Counter[str]:
    """Return how often each command was called, by scripts, too."""
    found = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    return Counter({name.removeprefix("cmdstat_"): stats["calls"] for name, stats in found.items()})


def total(client: redis.Redis) -> int:
    """Return how many round trips there were."""
    spent = counted(client)
    return sum(spent[name] for name in CALLS)
