"""Forks node agents: ``nursery.py``, one order a line on standard input, {"pid": N} as the answer.

An order is {"words", "env", "log", "clock", "journal", "simulated"}: the agent's command line, its environment, where
it writes, the file of its clocks (clocks.py) or null, the journal of its jobs or null, and whether its sandboxes are
those of sandbox.py. Started by fleet.py; a fork costs milliseconds where an agent's own start costs a second of
processor time.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from node_agent import __main__ as agent
from node_agent import ground, slotset
from node_agent.containment import probe as host_probe
from tests.scale import clocks, sandbox, stacks
from tests.support.nursery import leave


def main() -> None:
    """Serve until the end of input."""
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(order, parent)
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: dict[str, object], parent: int) -> NoReturn:
    status = 70
    try:
        log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        leave(parent, (null, log, log), order["env"])  # type: ignore[arg-type]  # a mapping, by fleet.py
        if order["clock"] is not None:
            clocks.inject(Path(str(order["clock"])))
            clocks.skewed()
        if order["simulated"]:
            _simulate(None if order["journal"] is None else Path(str(order["journal"])))
        stacks.install()
        status = agent.main([str(word) for word in order["words"]])  # type: ignore[attr-defined]  # a list, by fleet.py
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 70
    finally:
        sys.stderr.flush()
        os._exit(status)


def _simulate(journal: Path | None) -> None:
    async def probe(*_: object, **__: object) -> object:
        return sandbox.report()

    sandbox.Zygote.journal = journal
    replaced: dict[ModuleType, dict[str, object]] = {
        host_probe: {"probe": probe},
        slotset: {"Zygote": sandbox.Zygote, "Slot": sandbox.Slot},
        # A simulated node has no groups, and shows its jobs no trees.
        ground: {"_open_groups": lambda settings: None, "_without_sockets": lambda shown: ()},
    }
    for module, names in replaced.items():
        for name, value in names.items():
            if not hasattr(module, name):
                raise AttributeError(f"{module.__name__} has no {name} any more: see what took its place")
            setattr(module, name, value)


if __name__ == "__main__":
    main()
