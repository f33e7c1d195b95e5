"""Reads the scripts: text and SHA-1 of each, with what they share in front.

Called by whoever runs a script (EVALSHA first, EVAL after NOSCRIPT). Must never build a script's text from data.

    script = load("enqueue")
    client.evalsha(script.sha, len(keys), *keys, *args)    # NoScriptError: client.eval(script.text, the same)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["NAMES", "Script", "load"]

NAMES: Final = (
    *("due", "enqueue", "enqueue_plain", "kill", "lease", "log", "mend", "pause", "recover", "register"),
    *("schedule", "spawn", "sweep", "turn", "unregister"),
    *("artifact", "ask", "budget", "decide", "files", "mail", "quota"),
)
#: What stands between the prelude and a script. What a part defines costs time at each call: an enqueue has the least.
_WHOLE: Final = ("doom", "hold", "waiting")
_BETWEEN: Final = {
    **dict.fromkeys(("kill", "recover"), (*_WHOLE, "limits")),
    "turn": (*_WHOLE, "limits", "points", "workers"),
    "enqueue": ("waiting", "limits", "rules"),
    "enqueue_plain": ("plain",),
    "spawn": ("doom", "waiting", "limits", "rules", "child"),
    **dict.fromkeys(("lease", "register", "unregister", "log"), ()),
    **dict.fromkeys(("artifact", "ask", "budget", "decide", "files", "mail", "quota"), ()),
}
#: Does without the prelude.
_LEAN: Final = "enqueue_plain"
#: Whose text is that of another.
_TEXT: Final = {"enqueue_plain": "enqueue", "spawn": "enqueue"}
_HOME: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its name, its whole text and the SHA-1 (hex) by which the server knows it."""

    name: str
    text: str
    sha: str


@cache
def load(name: str) -> Script:
    """Return a script by name. Raises KeyError for a name that is not one of NAMES."""
    if name not in NAMES:
        raise KeyError(name)
    shared = ("start",) if name == _LEAN else ("start", "prelude")
    parts = (*shared, *_BETWEEN.get(name, _WHOLE), _TEXT.get(name, name))
    text = "\n".join((_HOME / f"{part}.lua").read_text("utf-8") for part in parts)
    return Script(name, text, hashlib.sha1(text.encode("utf-8"), usedforsecurity=False).hexdigest())
