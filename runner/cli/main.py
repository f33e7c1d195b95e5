"""Entry of the `ringfence` command: a safe interpreter first, then the commands; errors become exit codes.

Called by the console script and by ``python -I -m runner.cli``. Must never run a command as root in an interpreter that
took modules from the environment, the user's site folder or the current folder (attack 18).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import NoReturn, Protocol, cast

__all__ = ["main"]

#: Wrong home, host or installation (sysexits.h EX_CONFIG).
EXIT_SETUP = 78
EXIT_INTERRUPTED = 130


class _Commands(Protocol):
    def run_words(self, words: list[str]) -> int: ...


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    if os.geteuid() == 0 and not sys.flags.isolated:
        os.execv(sys.executable, [sys.executable, "-I", "-m", "runner.cli", *sys.argv[1:]])  # noqa: S606 - itself
    fault = _foreign_package()
    if fault:
        sys.stderr.write(f"ringfence: {fault}\n")
        sys.exit(EXIT_SETUP)
    # The commands load only now: nothing of them may run in an unsafe interpreter.
    commands = cast("_Commands", importlib.import_module("runner.cli.commands"))
    try:
        sys.exit(commands.run_words(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away; a second complaint at exit helps nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_INTERRUPTED)


def _foreign_package() -> str | None:
    """Return what is wrong if one of our packages comes from elsewhere: PyPI has other packages of these names."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.dirname(here)
    for name in ("node_agent", "broker"):
        spec = importlib.util.find_spec(name)
        found = os.path.dirname(os.path.abspath(spec.origin)) if spec and spec.origin else "nowhere"
        if found != os.path.join(root, name):
            return f"package {name} comes from {found}, not from {root}: reinstall it"
    return None
