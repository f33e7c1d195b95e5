"""`ringfence-guest`: a command job's way to its node, from a shell inside it.

Called by runner/guest/bin/ringfence-guest in a new interpreter without site-packages. Must never need more than the
standard library and this package, and never print a traceback for a refused call.

    ringfence-guest call OP [JSON]          one call; prints the answer as JSON
    ringfence-guest progress VALUE [NOTE]   how far the job is, 0 to 1
    ringfence-guest artifact put NAME FILE  give a file (- for stdin) by name
    ringfence-guest PART …                  each part says its own usage

Exit codes: 0 done, 1 refused (the code and why on stderr), 2 wrong usage.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

# Started as a file: its package is named to the interpreter, because a job need not be able to look into what is above.
if not __package__:
    _folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _spec = importlib.util.spec_from_file_location("runner", f"{_folder}/__init__.py")
    if _spec is None or _spec.loader is None:
        sys.exit(f"ringfence-guest: no package in {_folder}")
    sys.modules["runner"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["runner"])

from runner.guest import progress
from runner.guest.calls import CallRefused, call

__all__ = ["main"]

REFUSED: Final = 1
USAGE: Final = 2
#: Parts with subcommands of their own: a module below runner.guest with ``command(words) -> exit code``.
_PARTS: Final = frozenset({"files", "jobs", "mail", "policy", "signals", "tools"})


class _UsageError(Exception):
    pass


def main(words: Sequence[str]) -> int:
    """Carry out one command line; return its exit code."""
    try:
        return _run(list(words))
    except (CallRefused, OSError) as error:
        return _said(error, REFUSED)
    except json.JSONDecodeError as error:
        return _said(ValueError(f"no JSON: {error}"), USAGE)
    except _UsageError as error:
        return _said(error, USAGE)


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    own: dict[str, Callable[[list[str]], int]] = {"call": _call, "progress": _progress, "artifact": _artifact}
    if name in own:
        return own[name](words[1:])
    if name in _PARTS:
        command: Callable[[list[str]], int] = importlib.import_module(f"runner.guest.{name}").command
        return command(words[1:])
    known = ", ".join(sorted({*own, *_PARTS}))
    raise _UsageError(f"usage: ringfence-guest {{{known}}} …, each says its own; `call OP JSON` makes any call")


def _said(error: Exception, code: int) -> int:
    sys.stderr.write(f"ringfence-guest: {error}\n")
    return code


def _call(words: list[str]) -> int:
    if len(words) not in (1, 2):
        raise _UsageError("usage: ringfence-guest call OP [JSON]")
    try:
        fields = json.loads(words[1]) if len(words) > 1 else {}
    except ValueError as error:
        raise _UsageError(f"the fields are no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _UsageError("the fields are a JSON object")
    sys.stdout.write(json.dumps(call(words[0], **fields)) + "\n")
    return 0


def _progress(words: list[str]) -> int:
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        raise _UsageError("usage: ringfence-guest progress VALUE [NOTE], with a value of 0 to 1") from None
    progress.set(value, " ".join(words[1:]))
    return 0


def _artifact(words: list[str]) -> int:
    if len(words) != 3 or words[0] != "put":
        raise _UsageError("usage: ringfence-guest artifact put NAME FILE (- for stdin)")
    held = progress.Artifact(words[1])
    file = sys.stdin.buffer if words[2] == "-" else open(words[2], "rb")  # noqa: SIM115 - closed by the exit
    while piece := file.read(progress.PIECE_BYTES):
        held.write(piece)
    sys.stdout.write(held.end() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
