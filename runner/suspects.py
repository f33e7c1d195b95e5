"""Plain arguments and variables that look like secrets: who enqueues one is warned, by its place, never by its value.

Called by request.py for every job. A help against accidents: arguments lie in the store, for all of the fleet's
operators to read. Must never refuse anything, change a job, or say a part of what it found.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

__all__ = ["PlainSecretWarning", "suspects", "warn"]

#: Names whose last word says it; ``max_tokens`` and ``key`` are ordinary arguments.
_NAME: Final = re.compile(r"(?i)(?:^|[_.-])(?:passw(?:or)?d|passphrase|secret|token|(?:api|access|private)[_-]?key)$")
#: What well-known providers begin their keys with, a private key in PEM, a password in an address or a login's header.
_VALUE: Final = re.compile(
    r"^(?:sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|hf_|npm_|AGE-SECRET-KEY-1)[\w-]{12,}"
    r"|^-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|^[a-z][a-z+.-]*://[^/@\s:]*:[^/@\s]+@"
    r"|^(?:--header=|-H)?(?i:authorization):\s*(?i:bearer|basic)\s+\S{8,}"
)
#: An option of a program with its value in the same word or in the next one.
_OPTION: Final = re.compile(r"^--(?!no-)([A-Za-z][\w-]*)(?:=(.*))?$", re.DOTALL)
_LONGEST_SHOWN: Final = 5


class PlainSecretWarning(UserWarning):
    """A job carries in the open what looks like a secret. Says where it stands, and what keeps it secret instead."""


def suspects(
    argv: Sequence[object] | None, args: Sequence[object], kwargs: Mapping[str, object], env: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the places that look like secrets: ``args/0``, ``kwargs/password``, ``env/API_KEY``, ``argv/3``."""
    found = [f"args/{at}" for at, value in enumerate(args) if _looks(value)]
    for kind, named in (("kwargs", kwargs), ("env", env)):
        found += [f"{kind}/{name}" for name, value in named.items() if _named(name, value) or _looks(value)]
    return (*found, *_words(argv or ()))


def warn(places: Sequence[str]) -> None:
    """Tell whoever called the API about these places, if there are any: the warning names the line of that call."""
    if places:
        listed = ", ".join(places[:_LONGEST_SHOWN]) + (", …" if len(places) > _LONGEST_SHOWN else "")
        warnings.warn(
            f"{listed}: looks like a secret, and the store keeps it readable: hand it over as Secret(…) or --secret, "
            f"or as Sealed(…) (docs/secrets.md)",
            PlainSecretWarning,
            stacklevel=_depth(),
        )


def _depth() -> int:
    """Return how many frames above `warn` the first one outside of this package is, as ``stacklevel`` counts."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        frame, depth = frame.f_back, depth + 1
    return depth


def _named(name: object, value: object) -> bool:
    return isinstance(value, str) and bool(value) and isinstance(name, str) and _NAME.search(name) is not None


def _looks(value: object) -> bool:
    return isinstance(value, str) and _VALUE.match(value) is not None


def _words(argv: Sequence[object]) -> Iterator[str]:
    for at, word in enumerate(argv):
        if not isinstance(word, str):
            continue
        option = _OPTION.match(word)
        beside = argv[at + 1] if at + 1 < len(argv) else ""
        if option is None:
            given = False
        elif option[2] is None:
            given = _named(option[1], beside) and not str(beside).startswith("-")
        else:
            given = _named(option[1], option[2]) or _looks(option[2])
        if given or _looks(word):
            yield f"argv/{at}"
