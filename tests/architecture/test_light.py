"""What really gets loaded, seen in fresh interpreters (docs/design.md, packages)."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture import tree

HEAVY = frozenset(
    {"rq", "redis", "nacl", "pydantic", "pydantic_settings", "pyrage", "typer", "rich", "psutil", "valkey"}
)


# Imports each module in a process of its own that has loaded nothing yet, and prints what that brought, a line each.
LOADER = """
import os, sys
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        __import__(name)
        print(name, *{loaded.partition('.')[0] for loaded in sys.modules}, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(name + " can't be imported")
"""


def light_modules() -> list[str]:
    """Return the modules that a guest or an application's task file may load."""
    wanted = {"runner", "runner.app", "runner.task", "runner.grants", "runner.job", "node_agent.containment"}
    below = ("runner.wire.", "runner.guest.")
    return sorted(
        module.name
        for module in tree.sources()
        if (module.name in wanted or module.name.startswith(below)) and not module.name.endswith("__main__")
    )


def test_light_modules_load_nothing_heavy() -> None:
    """A module that guests import loads no queue, key, settings or terminal library."""
    names = light_modules()
    done = subprocess.run([sys.executable, "-I", "-c", LOADER, *names], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {name: set(rest) for name, *rest in map(str.split, done.stdout.splitlines())}
    assert sorted(loaded) == names
    assert {name: sorted(found & HEAVY) for name, found in loaded.items() if found & HEAVY} == {}
