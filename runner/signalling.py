"""Signals from afar: one signed command for jobs that run now, and the receipts that answer it.

Called by job handles and `ringfence signal`. Must never report a signal as delivered or applied without a receipt for
exactly this command, signed by the node that holds the job. KILL, POLICY and TRUST are kills (control.py), which can't
be lost; STOP and CONT a pause and a resume (pausing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from runner import control, orders, pausing
from runner.client import Client
from runner.errors import UsageError
from runner.wire import ids
from runner.wire.command import Selector
from runner.wire.receipt import PauseReceipt, Receipt
from runner.wire.signals import FATAL, MAX_WHY, SignalName

__all__ = ["chosen", "name_of", "signal_job", "signal_many"]


def name_of(text: str) -> SignalName:
    """Return a signal by its name, with or without SIG. Raises UsageError."""
    try:
        return SignalName(text.upper().removeprefix("SIG"))
    except ValueError:
        raise UsageError(f"no signal {text[:32]!r}; there are {', '.join(SignalName)}") from None


def signal_job(
    client: Client, name: SignalName, job_id: str, *, reason: str = "", wait_s: float = 15.0
) -> Receipt | PauseReceipt:
    """Send a signal to one job; return the receipt of the node that holds it. Raises StoreError, GrammarError."""
    if name in FATAL:
        return control.kill_job(client, job_id, _kill(name, reason, wait_s))
    if name in (SignalName.STOP, SignalName.CONT):
        op: pausing.Op = "pause" if name is SignalName.STOP else "resume"
        return pausing.pause_job(client, op, job_id, reason=reason, wait_s=wait_s)
    chosen = Selector("job", ids.check_job_id(job_id))
    command = orders.command("signal", chosen, None, reason=_short(reason), signal=name)
    return pausing.answered(client, command, job_id, wait_s)


def signal_many(
    client: Client, name: SignalName, chosen: Selector, tenant: str | None, *, reason: str = "", wait_s: float = 15.0
) -> list[Receipt] | list[PauseReceipt]:
    """Send a signal to every job of a selector: a kill hits what was enqueued up to now, all else what runs now.

    ``tenant`` keeps it to that tenant's jobs. Raises StoreError, UsageError.
    """
    if name in FATAL:
        return control.kill_many(client, chosen, tenant, _kill(name, reason, wait_s))
    if name in (SignalName.STOP, SignalName.CONT):
        op: pausing.Op = "pause" if name is SignalName.STOP else "resume"
        return pausing.pause_many(client, op, chosen, tenant, reason=reason, wait_s=wait_s)
    if tenant is not None:
        orders.selector("tenant", tenant)
    tenants = None if tenant is None else (tenant,)
    command = orders.command("signal", chosen, tenants, reason=_short(reason), signal=name)
    return pausing.answered_by_all(client, command, wait_s)


def chosen(named: Mapping[str, str | None], tenant: str | None) -> Selector:
    """Return the one selector that has a value, else the tenant's, else that of every job. Raises UsageError."""
    for kind, value in named.items():
        if value is not None:
            return orders.selector(cast("orders.SelectorKind", kind), value)
    return orders.selector("all") if tenant is None else orders.selector("tenant", tenant)


def _kill(name: SignalName, reason: str, wait_s: float) -> control.Order:
    return control.Order(reason=reason, wait_s=wait_s, signal=None if name is SignalName.KILL else name)


def _short(reason: str) -> str:
    if len(reason) > MAX_WHY:
        raise UsageError(f"the reason of a signal has at most {MAX_WHY} characters")
    return reason
