"""What live jobs may still have: one lease per attempt, with time, uses and manners. State only; no sockets, no clock.

Called by the desk with the time as a value. Must never give more than the rule that allowed it, let a reload of the
rules widen a live lease, or say to a job whether a name that it was not granted exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as member
from typing import Final

from broker.vault import bounds, placing
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
    on_leak: policy.OnLeak = "redact"
    version: int | None = None
    #: Where a proxied value is put.
    header: str = placing.DEFAULT
    field: str = ""
    #: For which library it is, "" if the rule does not say.
    sdk: str = ""
    #: Most that a request may send, and most requests under way; None: the egress process's own.
    body_bytes: int | None = None
    at_once: int | None = None
    #: Which requests it may go with: the rule's list, and one more for each reload that narrowed it.
    requests: tuple[tuple[str, ...], ...] = ()
    #: Uses of this lease.
    spent: int = 0

    def spend(self) -> None:
        """Count one use. Before it is had: what fails afterwards costs the job, not the secret."""
        self.spent += 1
        if self.uses_left is not None:
            self.uses_left -= 1


@dataclass(slots=True)
class Lease:
    """One attempt's right to its secrets."""

    attempt: str
    job: str
    tenant: str = ""
    #: The id of the key that signed the job.
    signer: str = ""
    grants: dict[str, Granted] = member(default_factory=dict)
    #: The ciphertexts of the job's sealed values by place.
    sealed: dict[str, str] = member(default_factory=dict)
    #: How many of them there will be.
    owed: int = 0
    #: When the attempt's first lease was opened, also by an earlier start of the broker; and whether that was this one.
    since_s: float = 0.0
    fresh: bool = True
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

    def states(self, now_s: float) -> dict[str, str]:
        """Return how each secret stands: ready, pending, expired or used-up."""
        return {name: _refusal(granted, now_s) or "ready" for name, granted in self.grants.items()}

    def take(self, name: str, now_s: float) -> tuple[Granted | None, Code]:
        """Spend one use of a secret that is handed over; (None, code) if it may not be had now."""
        granted = self.grants.get(name)
        if granted is None or granted.ask.mode == "proxy":
            return None, "denied"
        code = _refusal(granted, now_s)
        if code:
            return None, code
        granted.spend()
        return granted, ""

    def take_for(self, host: str, now_s: float, request: str = "") -> tuple[list[tuple[str, Granted]], Code]:
        """Spend one use of each secret that a request to ``host`` carries; ([], code) if it may carry nothing now.

        ``request``: its method and target. One that a single secret of the host must not go with goes with none.
        """
        found = [(name, one) for name, one in self.grants.items() if one.ask.mode == "proxy" and one.ask.host == host]
        if not found:
            return [], "denied"
        for _, one in found:
            code = _refusal(one, now_s)
            if code:
                return [], code
        for _, one in found:
            if one.requests and not bounds.fits(request, one.requests):
                return [], "not-this-request"
        for _, one in found:
            one.spend()
        return found, ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to an agent: the lease, or why there is none (``message`` is for the operator, not for the job)."""

    lease: Lease | None
    message: str = ""

    @property
    def sdks(self) -> dict[str, str]:
        """For which libraries the rules say that secrets are."""
        return {name: one.sdk for name, one in self.lease.grants.items() if one.sdk} if self.lease else {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The names that wait for a person."""
        return tuple(name for name, one in self.lease.grants.items() if one.pending) if self.lease else ()


class Leases:
    """All live leases of one broker."""

    def __init__(
        self,
        rules: Rules,
        used: Mapping[tuple[str, str], int] | None = None,
        decided: Mapping[tuple[str, str], bool] | None = None,
        since: Mapping[str, float] | None = None,
    ) -> None:
        """``used``: releases of live attempts that the record of an earlier broker start holds, by (attempt, name).

        ``decided``: where a person has said yes or no, as that record has it. ``since``: when each attempt's first
        lease was opened, by the clock that every call here is given.
        """
        self._rules = rules
        self._decided = dict(decided or {})
        self._used = dict(used or {})
        self._since = dict(since or {})
        self._live: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, attempt: str) -> Lease | None:
        """Return a live lease."""
        return self._live.get(attempt)

    def live(self, attempt: str) -> Lease:
        """Return a live lease. Raises VaultUsageError."""
        lease = self._live.get(attempt)
        if lease is None:
            raise VaultUsageError(f"{attempt} has no lease")
        return lease

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
        # A clock that was ahead belongs to an earlier start of the host.
        lease = Lease(attempt, job, since_s=min(self._since.get(attempt, now_s), now_s), seen_s=now_s)
        lease.fresh = attempt not in self._since
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
            other = _same_header(lease, ask, decision)
            if other:
                return Opened(None, f"{other} and {ask.secret} would go into one header for {ask.host}")
            if self._decided.get((attempt, ask.secret)) is not False or not decision.approve:
                lease.grants[ask.secret] = self._granted(lease, ask, decision)
        self._live[attempt] = lease
        self._since[attempt] = lease.since_s
        return Opened(lease)

    def close(self, attempt: str, *, over: bool) -> None:
        """End a lease. ``over``: so is its attempt; else what it had counts for a lease that is opened again."""
        lease = self._live.pop(attempt, None)
        if not over:
            for name, granted in lease.grants.items() if lease is not None else ():
                self._used[attempt, name] = self._used.get((attempt, name), 0) + granted.spent
            return
        self._since.pop(attempt, None)
        for kept in (self._used, self._decided):
            for key in [key for key in kept if key[0] == attempt]:
                del kept[key]

    def waits(self, attempt: str, name: str, now_s: float) -> bool:
        """Return whether a person's word is waited for."""
        lease = self._live.get(attempt)
        granted = lease.grants.get(name) if lease is not None else None
        return granted is not None and granted.pending and not _lapsed(granted, now_s)

    def deny(self, attempt: str, name: str) -> None:
        """Take a waiting secret away: it was never had, and won't be."""
        self._live[attempt].grants.pop(name, None)
        self._decided[attempt, name] = False

    def approve(self, attempt: str, name: str, now_s: float) -> None:
        """Let a waiting secret be had. Raises VaultUsageError: nothing waits under that name, or it has lapsed."""
        if not self.waits(attempt, name, now_s):
            raise VaultUsageError(f"nothing waits for approval as {attempt} {name}")
        self._live[attempt].grants[name].pending = False
        self._decided[attempt, name] = True

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
                else:
                    _narrow(granted, decision)
        return tuple(ended)

    def _granted(self, lease: Lease, ask: Ask, decision: Decision) -> Granted:
        until_s = None if decision.ttl_s is None else lease.since_s + decision.ttl_s
        uses, key = decision.uses, (lease.attempt, ask.secret)
        if uses is not None:
            uses = max(0, uses - self._used.get(key, 0))
        waits = decision.approve and not self._decided.get(key, False)
        found = Granted(ask, decision.rule, until_s, uses, waits, decision.on_leak, header=decision.header)
        found.requests = (decision.requests,) if decision.requests else ()
        found.field, found.sdk = decision.field, decision.sdk
        found.body_bytes, found.at_once = decision.body_bytes, decision.at_once
        return found


def _narrow(granted: Granted, decision: Decision) -> None:
    """Take a reloaded rule's limits over where they are less than what there is."""
    if decision.uses is not None:
        left = granted.uses_left
        granted.uses_left = decision.uses if left is None else min(left, decision.uses)
    granted.body_bytes = policy.least(granted.body_bytes, decision.body_bytes)
    granted.at_once = policy.least(granted.at_once, decision.at_once)
    if decision.requests and decision.requests not in granted.requests:
        granted.requests += (decision.requests,)


def _same_header(lease: Lease, ask: Ask, decision: Decision) -> str:
    """Return the secret of the lease that already takes the header which ``ask`` would be put into, "" if none."""
    name = placing.name_of(decision.header)
    for other, one in lease.grants.items():
        if decision.field or one.field:
            continue
        if ask.mode == "proxy" == one.ask.mode and one.ask.host == ask.host and placing.name_of(one.header) == name:
            return other
    return ""


def _refusal(granted: Granted, now_s: float) -> Code:
    if _lapsed(granted, now_s):
        return "expired"
    if granted.pending:
        return "pending"
    return "used-up" if granted.uses_left is not None and granted.uses_left <= 0 else ""


def _lapsed(granted: Granted, now_s: float) -> bool:
    return granted.until_s is not None and now_s >= granted.until_s
