"""Port: runner.errors. `python -I -m node_agent`: one node agent in the foreground, or with `scheduler` a scheduler.

Started by `ringfence agent`, `ringfence scheduler`, `ringfence up` and systemd. The only place of this package that
configures logging and takes a command line. Must never start from a package that is not the distribution's, nor print a
store URL with its password.

Exit status: 0 stopped on request, 75 ended by a fault that a restart may cure, 78 a set-up that needs an operator.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from node_agent import scheduler_daemon
from node_agent.agent import serve
from node_agent.errors import NodeError
from node_agent.settings import AgentSettings
from runner.errors import RingfenceError

EX_TEMPFAIL: Final = 75
EX_CONFIG: Final = 78
_DISTRIBUTION: Final = "ringfence"
_PACKAGES: Final = ("runner", "node_agent", "broker")


def main(arguments: list[str] | None = None) -> int:
    """Run one agent until SIGTERM or SIGINT; return the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    # At level B the kernel counts descriptors in flight per user, jobs' too, against the sender's own soft limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _check_packages()
        if words[:1] == ["scheduler"]:
            return scheduler_daemon.main(words[1:])
        return asyncio.run(serve(_settings(arguments)))
    except (NodeError, RingfenceError) as error:
        sys.stderr.write(f"ringfence: agent: {error}\n")
        return EX_TEMPFAIL if error.retryable else EX_CONFIG


def _settings(arguments: list[str] | None) -> AgentSettings:
    parser = argparse.ArgumentParser(prog="ringfence agent", description="Run one node agent.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--name")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--import", dest="tasks", action="append")
    parser.add_argument("--task-path", dest="task_path", action="append")
    found = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        return AgentSettings(**found)
    except ValidationError as error:
        first = error.errors()[0]
        sys.stderr.write(f"ringfence: agent: setting {'.'.join(map(str, first['loc']))}: {first['msg']}\n")
        raise SystemExit(EX_CONFIG) from None


def _check_packages() -> None:
    """PyPI has another `broker`: run only what the distribution (or an editable install of it) brought."""
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise SystemExit(EX_CONFIG) from None
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    parents = {Path(spec.origin or "/").resolve().parent.parent for spec in specs if spec is not None}
    known = {Path(str(distribution.locate_file(""))).resolve()}
    origin = distribution.read_text("direct_url.json") or ""
    known |= {parent for parent in parents if f'"file://{parent}"' in origin}
    if not parents <= known:
        sys.stderr.write("ringfence: agent: its packages do not come from the distribution `ringfence`: reinstall it\n")
        raise SystemExit(EX_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
