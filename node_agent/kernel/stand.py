"""Port: redis. The kernel of one boot, put together from what the boot has: store, signer, policy, recorder.

Called by node_agent/session.py. Must never leave a seam open: what a part needs and the boot does not have is no part.
"""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis

from node_agent.dependencies import Dependencies
from node_agent.kernel import approvals
from node_agent.kernel.approvals import Approvals
from node_agent.kernel.bench import Bench
from node_agent.kernel.budgets import Budgets
from node_agent.kernel.caller import Caller
from node_agent.kernel.deciding import Deciding
from node_agent.kernel.desk import Desk
from node_agent.kernel.jobevents import JobEvents
from node_agent.kernel.parking import Parking
from node_agent.kernel.quotas import Quotas
from node_agent.kernel.seams import Around, Recorder
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.words import Words
from node_agent.mail import Mail
from node_agent.pausing import Pauser
from node_agent.records import Notary
from node_agent.run import Run
from runner.wire.keys import Keys
from runner.wire.signals import SignalName

__all__ = ["Bench", "stand"]


def stand(
    bench: Bench,
    redis: Redis,
    keys: Keys,
    notary: Notary,
    mail: Mail,
    recorder: Recorder,
    runs: Callable[[], tuple[Run, ...]],
) -> Desk:
    """Return the desk of this boot; start and stop it with the boot."""
    ground = bench.ground
    calls = StoreCalls(redis, keys)
    quotas = Quotas(calls, notary.boot)
    words = Words(notary.node, ground.trust.by_id())
    pauser = Pauser(notary, mail)
    events = JobEvents(notary, mail.job_event)
    ledger = approvals.Desk(notary, mail.emit, mail.paused, recorder.about, events.tell)
    parking = Parking(calls, words)
    asked = Approvals(calls, words, ledger, pauser, parking)
    budgets = Budgets(calls, words, ledger, pauser, notary.boot, ground.prices)
    around = Around(
        redis=redis,
        keys=keys,
        node=notary.node,
        recorder=recorder,
        decider=Deciding(ground.policy.calls, notary.node, quotas, asked),
        notary=notary,
        emit=mail.emit,
        told=events.tell,
        runs=runs,
        spending=budgets,
        parks=parking.parks,
        card=ground.card,
        fleet=ground.fleet,
        loop=ground.policy.loop,
        ends=Dependencies(redis, keys, ground.trust.by_id(), ground.fleet),
        bench=bench,
    )

    def ended(caller: Caller) -> None:
        quotas.ended(caller.attempt)
        asked.ended(caller.attempt)

    around.ending.append(ended)
    around.starting.append(budgets.start)
    around.stopping.extend((quotas.stop, budgets.stop, parking.stop))
    desk = Desk(around)
    budgets.notify = lambda run, why: desk.signals.notify(run, SignalName.BUDGET, why)
    return desk
