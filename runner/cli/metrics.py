"""`ringfence metrics`: the numbers of the agents on this host, for Prometheus or as JSON.

Port: node_agent.local, node_agent.kernel. Called by commands.py. Must never ask an agent of another user (the socket's
own module checks that).
"""

from __future__ import annotations

from typing import Annotated

import typer

from node_agent import local
from node_agent.kernel.metrics import prometheus
from runner.cli.agent import sockets
from runner.cli.options import HomeOption, JsonOption, RedisOption
from runner.cli.output import print_json, print_line, say
from runner.cli.site import site_of
from runner.errors import UsageError
from runner.wire.codec import Json

__all__ = ["metrics"]

_ANSWER_S = 5.0


def metrics(
    context: typer.Context,
    node: Annotated[str | None, typer.Option("--node", metavar="N", help="Only this node's.")] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the numbers of the agents on this host, in the form that Prometheus reads (docs/operations.md)."""
    place = site_of(context, home, redis).home
    found: dict[str, dict[str, Json]] = {}
    paths = sockets(place)
    if node is not None and node not in {path.name for path in paths}:
        raise UsageError(f"--node: one of {', '.join(path.name for path in paths)}")
    for path in paths:
        if node is not None and path.name != node:
            continue
        try:
            answer = local.ask(path, {"op": "metrics"}, _ANSWER_S)
        except (ConnectionError, TimeoutError) as error:
            say(str(error) or f"the agent at {path} does not answer")
            continue
        numbers = answer.get("metrics")
        if isinstance(numbers, dict):
            found[str(answer.get("node", path.name))] = numbers
    if as_json:
        print_json(found)
    else:
        for line in prometheus(found).splitlines():
            print_line(line)
    if not found:
        raise typer.Exit(1)
