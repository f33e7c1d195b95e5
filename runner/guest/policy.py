"""May I? A job asks its node's policy ahead, waits where a person decides, and sees what its budget has left.

Called by jobs (`from runner.inside import policy`) and by ringfence-guest. Standard library and wire alone. Must never
let a decision pass for a yes: only ``allowed`` is one.

    if policy.may("tool.call", "deploy", env="prod").allowed: …
    with_approval = policy.patiently("tool.call", name="deploy", args={"env": "prod"})
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from runner.guest.calls import CallRefused, call
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json

__all__ = ["Decision", "budget", "command", "may", "patiently"]

_USAGE: Final = 2
_DENIED: Final = 1
_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What policy says of a call: ``decision`` is allow, deny or ask (a person's word is needed). No truth value."""

    decision: str
    rule: str
    reason: str
    policy: str

    @property
    def allowed(self) -> bool:
        """Whether the call would be carried out, as far as policy goes."""
        return self.decision == "allow"

    def __bool__(self) -> bool:
        raise TypeError("a decision is no truth value: look at .allowed")


def may(action: str, resource: str = "", /, **args: Json) -> Decision:
    """Return what policy says of a call; nothing is done, counted or asked of a person. Raises CallRefused."""
    found = cast("dict[str, str]", call("policy.ask", action=action, resource=resource, args=args))
    return Decision(found["decision"], found["rule"], found["reason"], found["policy"])


def patiently(op: str, /, *, timeout_s: float | None = None, **fields: Json) -> Json:
    """Make a call, and make it again as long as a person has to decide on it. Raises CallRefused.

    ``timeout_s``: give up after so many seconds, with the code pending; None: policy's own time bounds it.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            return call(op, **fields)
        except CallRefused as refused:
            over = until_s is not None and time.monotonic() >= until_s
            if refused.code != ErrorCode.PENDING or over:
                raise
            time.sleep(_AGAIN_S)


def budget() -> dict[str, Json]:
    """Return the job's budget: key, on_hit, and for each unit what is used, its bound and what is left.

    Raises CallRefused: NOT_FOUND if it has none.
    """
    return cast("dict[str, Json]", call("budget.show"))


def command(words: Sequence[str]) -> int:
    """Carry out `ringfence-guest policy may OP [RESOURCE] [JSON] | budget`; return its exit code. Raises CallRefused.

    0: allowed; 1: denied, or left to a person.
    """
    if list(words) == ["budget"]:
        sys.stdout.write(json.dumps(budget()) + "\n")
        return 0
    if not 2 <= len(words) <= 4 or words[0] != "may":
        sys.stderr.write("usage: ringfence-guest policy may OP [RESOURCE] [JSON] | policy budget\n")
        return _USAGE
    resource = words[2] if len(words) > 2 else ""
    args = json.loads(words[3]) if len(words) > 3 else {}
    found = call("policy.ask", action=words[1], resource=resource, args=args)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if cast("dict[str, str]", found)["decision"] == "allow" else _DENIED
