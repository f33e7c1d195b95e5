"""What live jobs may still have: one lease per attempt, with time, uses and manners. State only; no sockets, no clock.

Called by the desk with the time as a value. Must never give more than the rule that allowed it, let a reload of the
rules widen a live lease, or say to a job whether a name that it was not granted exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.vault import rules as policy
from broker.vault.errors import VaultUsageError
from broker.vault.rules import Ask, Decision, Rules

__all__ = ["BURST", "MAX_BAD", "MAX_LEASES", "RATE_PER_S", "Code", "Granted", "Lease", "Leases", "Opened"]

#: Requests that one job may make at once, and per second after that.
BURST: Final = 200
RATE_PER_S: Final = 1000.0
#: Wrong requests after which a job's channel is closed.
MAX_BAD: Final = 50
MAX_LEASES: Final = 20_000
MAX_SECRETS: Final = 64

#: A refusal as a job sees it. `denied` also stands for a name that does not exist.
Code = str


@dataclass(slots=True)
class Granted:
    """One secret of one lease. ``until_s`` and ``uses_left``: None = as long as the lease, as often as asked.

    ``version``: what was the newest when the lease was opened; a later one is for later attempts.
    """

    ask: Ask
    rule: str
    until_s: float | None
    uses_left: int | None
    pending: bool
    version: int | None = None


@dataclass(slots=True)
class Lease:
    """One attempt's right to its secrets."""

    attempt: str
    job: str
    grants: dict[str, Granted] = field(default_factory=dict)
    bad: int = 0
    tokens: float = BURST
    seen_s: float = 0.0

    def admit(self, now_s: float) -> bool:
        """Take one request from the job's allowance; False = too fast."""
        self.tokens = min(BURST, self.tokens + (now_s - self.seen_s) * RATE_PER_S)
        self.seen_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def take(self, name: str, now_s: float) -> tuple[Granted | None, Code]:
        """Spend one use of a secret that is handed over; (None, code) if it may not be had now."""
        granted = self.grants.get(name)
        if granted is None or granted.ask.mode == "proxy":
            return None, "denied"
        code = _refusal(granted, now_s)
        if code:
            return None, code
        if granted.uses_left is not None:
            # Spent first: what fails afterwards costs the job, not the secret.
            granted.uses_left -= 1
        return granted, ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to an agent: the lease, or why there is none (``message`` is for the operator, not for the job)."""

    lease: Lease | None
    message: str = ""

    @property
    def pending(self) -> tuple[str, ...]:
        """The names that wait for a person."""
        return tuple(name for name, one in self.lease.grants.items() if one.pending) if self.lease else ()


class Leases:
    """All live leases of one broker."""

    def __init__(self, rules: Rules, used: Mapping[tuple[str, str], int] | None = None) -> None:
        """``used``: releases of live attempts that the record of an earlier broker start holds, by (attempt, name)."""
        self._rules = rules
        self._used = dict(used or {})
        self._live: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, attempt: str) -> Lease | None:
        """Return a live lease."""
        return self._live.get(attempt)

    def all(self) -> tuple[Lease, ...]:
        """Return every live lease."""
        return tuple(self._live.values())

    def open(self, attempt: str, job: str, asks: Iterable[Ask], known: Collection[str], now_s: float) -> Opened:
        """Judge an attempt's secrets: all of them are granted, or none.

        Raises:
            VaultUsageError: the attempt has a lease, asks for too much, or there are too many leases.
        """
        wanted = tuple(asks)
        if attempt in self._live:
            raise VaultUsageError(f"{attempt} has a lease already")
        if len(self._live) >= MAX_LEASES or len(wanted) > MAX_SECRETS:
            raise VaultUsageError("too many leases, or too many secrets for one job")
        lease = Lease(attempt, job, seen_s=now_s)
        for ask in wanted:
            decision = policy.decide(self._rules, ask)
            if not decision.allowed:
                return Opened(None, decision.message)
            if ask.secret not in known:
                return Opened(
                    None, f"no secret {ask.secret} lies in this host's vault: `ringfence vault set {ask.secret}`"
                )
            if ask.secret in lease.grants:
                return Opened(None, f"{ask.secret} is asked for twice")
            lease.grants[ask.secret] = self._granted(attempt, ask, decision, now_s)
        self._live[attempt] = lease
        return Opened(lease)

    def close(self, attempt: str) -> Lease | None:
        """End a lease; returns it if it was live."""
        for key in [key for key in self._used if key[0] == attempt]:
            del self._used[key]
        return self._live.pop(attempt, None)

    def approve(self, attempt: str, name: str, now_s: float) -> None:
        """Let a waiting secret be had. Raises VaultUsageError: nothing waits under that name, or it has lapsed."""
        lease = self._live.get(attempt)
        granted = lease.grants.get(name) if lease is not None else None
        if granted is None or not granted.pending or _lapsed(granted, now_s):
            raise VaultUsageError(f"nothing waits for approval as {attempt} {name}")
        granted.pending = False

    def reload(self, rules: Rules) -> tuple[tuple[str, str], ...]:
        """Take new rules: live grants that they no longer allow end, others only narrow; returns what ended."""
        self._rules = rules
        ended = []
        for lease in self._live.values():
            for name, granted in list(lease.grants.items()):
                decision = policy.decide(rules, granted.ask)
                if not decision.allowed:
                    del lease.grants[name]
                    ended.append((lease.attempt, name))
                elif decision.uses is not None:
                    left = granted.uses_left
                    granted.uses_left = decision.uses if left is None else min(left, decision.uses)
        return tuple(ended)

    def _granted(self, attempt: str, ask: Ask, decision: Decision, now_s: float) -> Granted:
        until_s = None if decision.ttl_s is None else now_s + decision.ttl_s
        uses = decision.uses
        if uses is not None:
            uses = max(0, uses - self._used.get((attempt, ask.secret), 0))
        return Granted(ask, decision.rule, until_s, uses, decision.approve)


def _refusal(granted: Granted, now_s: float) -> Code:
    if _lapsed(granted, now_s):
        return "expired"
    if granted.pending:
        return "pending"
    return "used-up" if granted.uses_left is not None and granted.uses_left <= 0 else ""


def _lapsed(granted: Granted, now_s: float) -> bool:
    return granted.until_s is not None and now_s >= granted.until_s
