"""Measures the system calls of the toolchain programs, beside what the filter says to each: the base of the allow list.

    python -m tests.toolchains.census [PROGRAM...]

Runs the programs of this folder outside of any sandbox, under strace, and prints a table by call: how many programs
make it, which, and the decision of node_agent/containment/syscalls.py; then what measured.txt lacks. Needs strace. Must
only be run by hand: it is no test, and the programs run with this user's rights in a folder of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from node_agent.containment import syscalls
from tests.toolchains import goods

__all__ = ["MEASURED", "main", "measured"]

PROGRAM_S = 300
MEASURED = Path(__file__).with_name("measured.txt")
#: By program: the words it takes, the goods folder put in for {}.
WORDS = {
    "git.sh": "{}/repository",
    "pip.sh": "{}/wheels",
    "npm.sh": "{}/ringed-1.0.0.tgz",
    "parts.py": "unix",
    "others.sh": "unix",
}
CALL = re.compile(r"^[0-9]+ +([a-z_0-9]+)\(", re.MULTILINE)


def measured() -> set[str]:
    """Return the calls that the last census saw, by its file; the first line says on what system."""
    return set(MEASURED.read_text(encoding="ascii").split("\n", 1)[1].split())


def decision(name: str) -> str:
    """Return what the filter says to a call, in one word."""
    if name in syscalls.ALLOWED:
        return "allowed"
    if name in syscalls.DENIED:
        return "EPERM"
    return "ENOSYS" if name in syscalls.ABSENT else "checked"


def calls_of(program: Path, given: Path) -> set[str]:
    """Run one program and return the names of all calls that it and its children made."""
    shell = ["bash"] if program.suffix == ".sh" else [sys.executable, "-B"]
    words = [sys.executable] if program.name == "pytest.sh" else WORDS.get(program.name, "").format(given).split()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        place = Path(folder, "place")
        place.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(place), "TMPDIR": str(place), "LANG": "C.UTF-8"}
        trace = ["strace", "-f", "-qq", "-o", str(log), "--"]
        done = subprocess.run(
            [*trace, *shell, str(program), *words],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROGRAM_S,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{program.name} failed outside of any sandbox:\n{done.stderr.decode(errors='replace')}")
        return set(CALL.findall(log.read_text(errors="replace")))


def main(chosen: list[str]) -> None:
    """Print the table."""
    if shutil.which("strace") is None:
        sys.exit("the census needs strace: install it and run this again")
    made_by: defaultdict[str, list[str]] = defaultdict(list)
    programs = [
        path for path in sorted(goods.PROGRAMS.iterdir()) if path.suffix in (".py", ".sh") and path.stem != "__init__"
    ]
    with tempfile.TemporaryDirectory() as folder:
        goods.make(Path(folder))
        for program in programs:
            if not chosen or program.name in chosen:
                for name in calls_of(program, Path(folder)):
                    made_by[name].append(program.stem)
    for name, found in sorted(made_by.items()):
        print(f"{name:24} {decision(name):8} {len(found):2} {' '.join(found)}")  # noqa: T201 - its purpose
    new = sorted(set(made_by) - measured())
    print(f"{len(made_by)} calls; not in {MEASURED.name}: {' '.join(new) or 'none'}")  # noqa: T201 - a tool


if __name__ == "__main__":
    main(sys.argv[1:])
