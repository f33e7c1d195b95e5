"""May this call be made? One decision for each call of a running job, by the policy that the node started with.

Called by the session before a handler, and by jobs that ask ahead (`policy.ask`). A job is judged by the version that
admitted it: an agent reads its policy once, and jobs end with their agent. Must never allow what the policy leaves to a
person without that person's word, and never count a call that is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from node_agent.kernel.approvals import Approvals
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.quotas import Quotas
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from node_agent.policycalls import Calls, Subject, Verdict, judge
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json

__all__ = ["AskAhead", "Deciding", "PolicyPart"]

TOOL: Final = "tool.call"
#: Longest names in a question.
_MAX_TEXT: Final = 4096


class Deciding:
    """Policy for the calls of one boot."""

    def __init__(self, calls: Calls, node: str, places: Quotas, persons: Approvals) -> None:
        self._calls, self._node = calls, node
        self._places, self._persons = places, persons

    @property
    def version(self) -> str:
        """SHA-256 of the policy file."""
        return self._calls.version

    def decide(self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json]) -> Verdict:
        """Judge a call. Pure and total: takes no quota, asks nobody."""
        subject = Subject(caller.spec, caller.signer, caller.run.attempt, self._node)
        return judge(self._calls, subject, action, resource, _args(action, facts))

    async def permit(
        self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json], verdict: Verdict
    ) -> Callable[[], None]:
        """Carry a verdict out: have a person decide, take its quotas. Return what gives held places back.

        Raises CallError: DENIED, PENDING, QUOTA, CONFLICT (another call used the approval up), UNAVAILABLE.
        """
        if verdict.effect == "deny":
            raise CallError(ErrorCode.DENIED, verdict.reason)
        if verdict.effect == "allow":
            return await self._take(caller, verdict)
        yes = await self._persons.decided(caller, action, resource, facts, verdict)
        # First the quota: an approval is good for one call, and one that finds no room would be lost.
        release = await self._take(caller, verdict)
        try:
            used = await self._persons.use(yes)
        except BaseException:
            release()
            raise
        if not used:
            release()
            raise CallError(ErrorCode.CONFLICT, "another call of this job used the approval up; ask again")
        return release

    async def _take(self, caller: Caller, verdict: Verdict) -> Callable[[], None]:
        if not verdict.quotas:
            return _nothing
        return await self._places.take(caller.tenant, caller.attempt, verdict.quotas)


@dataclass(frozen=True, slots=True)
class AskAhead:
    """Fields of policy.ask: a call by its name, what it would be made on, and its arguments."""

    action: str
    resource: str = ""
    args: dict[str, object] = field(default_factory=dict)


class PolicyPart:
    """The calls about policy."""

    def __init__(self, around: Around) -> None:
        self._decider = around.decider

    def entries(self) -> tuple[Entry, ...]:
        """Return this part's calls."""
        return (
            Entry(
                "policy.ask",
                AskAhead,
                self._ask,
                "May I? Nothing is done, counted or asked of a person by it.",
                "{decision: allow|deny|ask, rule, reason, policy}",
            ),
        )

    def _ask(self, caller: Caller, asked: AskAhead) -> Json:
        if len(asked.action) > _MAX_TEXT or len(asked.resource) > _MAX_TEXT:
            raise CallError(ErrorCode.BAD_REQUEST, f"a name has at most {_MAX_TEXT} characters")
        args = cast("dict[str, Json]", asked.args)
        facts: dict[str, Json] = {"args": args} if asked.action == TOOL else args
        verdict = self._decider.decide(caller, asked.action, asked.resource, facts)
        return {
            "decision": verdict.effect,
            "rule": verdict.rule,
            "reason": verdict.reason,
            "policy": verdict.policy,
        }


def _args(action: str, facts: Mapping[str, Json]) -> Mapping[str, Json]:
    """What conditions see as ``args``: a tool's own arguments, and of other calls all fields."""
    if action != TOOL:
        return facts
    args = facts.get("args")
    return args if isinstance(args, dict) else {}


def _nothing() -> None:
    return None
