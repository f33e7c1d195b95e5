"""The node's tools, as a running job uses them.

Called by jobs (`from runner.inside import tools`) and by ringfence-guest. Standard library and wire alone. Must never
run anything itself: a tool runs on the node, in a sandbox of its own.

    tools.names()                                  # ["search"]
    print(tools.call("search", word="solar").text)
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from runner.guest.calls import call as ask
from runner.wire.codec import Json

__all__ = ["Answer", "call", "catalogue", "command", "names"]

_USAGE: Final = 2
_TIMED_OUT: Final = 124
_KILLED: Final = 137


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one call. ``exit_code`` None: it was ended, by its time limit if ``timed_out``."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    output: bytes
    truncated: bool
    ms: float

    @property
    def ok(self) -> bool:
        """Whether the tool exited with 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """The output as text; what is none is replaced."""
        return self.output.decode("utf-8", "replace")


def catalogue() -> list[dict[str, Json]]:
    """Return the tools that this job was granted: name, about, the JSON schema of the arguments. Raises CallRefused."""
    found = cast("dict[str, Json]", ask("tool.list"))
    return cast("list[dict[str, Json]]", found["tools"])


def names() -> list[str]:
    """Return the names of the tools that this job was granted. Raises CallRefused."""
    return [str(tool["name"]) for tool in catalogue()]


def call(name: str, /, **args: Json) -> Answer:
    """Call a tool and wait for its end. A tool that fails is an answer; raises CallRefused if none was run."""
    found = cast("dict[str, Json]", ask("tool.call", name=name, args=args))
    text = str(found["output"])
    return Answer(
        exit_code=cast("int | None", found["exit_code"]),
        signal=cast("int | None", found["signal"]),
        timed_out=bool(found["timed_out"]),
        output=base64.b64decode(text) if found["base64"] else text.encode("utf-8"),
        truncated=bool(found["truncated"]),
        ms=float(cast("float", found["ms"])),
    )


def command(words: Sequence[str]) -> int:
    """Carry out `ringfence-guest tools list | call NAME [JSON]`; return the exit code: the tool's own.

    124: its time was over; 137: it was killed. Raises CallRefused.
    """
    if list(words) == ["list"]:
        sys.stdout.write(json.dumps(catalogue(), indent=1) + "\n")
        return 0
    if len(words) not in (2, 3) or words[0] != "call":
        sys.stderr.write("usage: ringfence-guest tools list | tools call NAME [JSON]\n")
        return _USAGE
    try:
        args = json.loads(words[2] if len(words) > 2 else "{}")
        found = call(words[1], **args)
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"ringfence-guest: the arguments are a JSON object: {error}\n")
        return _USAGE
    sys.stdout.flush()
    sys.stdout.buffer.write(found.output)
    sys.stdout.buffer.flush()
    if found.exit_code is not None:
        return found.exit_code
    return _TIMED_OUT if found.timed_out else _KILLED
