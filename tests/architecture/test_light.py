"""What really gets loaded, seen in fresh interpreters (docs/design.md, packages)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture import tree

HEAVY = frozenset(
    {"rq", "redis", "nacl", "pydantic", "pydantic_settings", "pyrage", "typer", "rich", "psutil", "valkey"}
)


def loaded_by(module: str) -> set[str]:
    """Return the top-level modules that importing ``module`` loads in a new isolated interpreter."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def light_modules() -> list[str]:
    """Return the modules that a guest or an application's task file may load."""
    wanted = {"runner", "runner.app", "runner.task", "runner.grants", "runner.job", "node_agent.containment"}
    below = ("runner.wire.", "runner.guest.")
    return sorted(
        module.name
        for module in tree.sources()
        if (module.name in wanted or module.name.startswith(below)) and not module.name.endswith("__main__")
    )


@pytest.mark.parametrize("module", light_modules())
def test_light_modules_load_nothing_heavy(module: str) -> None:
    """A module that guests import loads no queue, key, settings or terminal library."""
    assert loaded_by(module) & HEAVY == set()
