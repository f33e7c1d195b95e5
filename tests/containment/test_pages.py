"""What every fork pays for: modules with work of their own at a fork, and code that it has to ask the kernel for."""

from __future__ import annotations

import subprocess
import sys

#: Each has the interpreter run code of its own after every fork, or brings libraries that few tasks need.
HEAVY = ("asyncio", "concurrent", "decimal", "logging", "multiprocessing", "random", "ssl", "threading", "uuid")
LOADED = """
import importlib, sys
from node_agent.containment import worker, zygote
for name in zygote._PRELOADED:
    importlib.import_module(name)
worker.make_kit()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
MAPPED = """
import os, re
from node_agent.containment import pages
def spans():
    lines = open("/proc/self/maps").read().splitlines()
    return [line.split(None, 5) for line in lines if re.search(r"python3|libpython", line) and " r-xp " in line]
def text():
    with open("/proc/self/mem", "rb") as memory:
        for span, *_ in spans():
            start, end = (int(each, 16) for each in span.split("-"))
            memory.seek(start)
            yield memory.read(end - start)
def own():
    form = r"(?m)^[0-9a-f]+-[0-9a-f]+ r-xp .*python3.*\\n(?:[A-Z].*\\n)*?Anonymous: +(\\d+) kB"
    return sum(map(int, re.findall(form, open("/proc/self/smaps").read())))
before, owned = [*text()], own()
pages.keep_code_mapped()
assert [*text()] == before, "the code is another one"
print(owned, own())
"""


def told(code: str) -> list[str]:
    """Run ``code`` as the zygote runs and return the words that it prints."""
    run = subprocess.run([sys.executable, "-I", "-B", "-c", code], capture_output=True, text=True, check=False, env={})
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_no_module_does_work_of_its_own_at_a_fork() -> None:
    """The zygote loads none of them, so no worker pays for what its task does not use."""
    loaded = told(LOADED)
    assert "runner" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_the_interpreters_code_gets_a_page_of_its_own_and_stays_as_it_is() -> None:
    """One page of it belongs to this process afterwards, and no byte has changed."""
    before, after = map(int, told(MAPPED))
    assert (before, after > 0) == (0, True)
