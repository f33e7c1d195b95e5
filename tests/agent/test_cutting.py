"""The count that answers a selector's kill: jobs, each once, whichever way it was ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from redis.asyncio import Redis

from node_agent.admission import Rules
from node_agent.control import Control
from node_agent.deciding import Decider
from node_agent.lanes import Lanes
from node_agent.mail import Mail
from node_agent.operating import Operator
from node_agent.records import Notary
from node_agent.rq_store import Store
from node_agent.run import KillOrder, Proof, Run
from node_agent.sequences import Sequences
from node_agent.supervisor import Supervisor
from node_agent.turns import Claim, Dead, KillWord
from runner import orders
from runner.wire import record
from runner.wire.card import TrustedKey
from runner.wire.command import Selector
from runner.wire.envelope import Domain
from runner.wire.keys import Keys
from tests.agent import build
from tests.support.wait import await_until

KEY = build.signer()
COMMAND = orders.command("kill", Selector("tenant", "main"), None)
LANE = "main-agents"


class Stream:
    """A store's control stream with one kill in it."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self._read = False

    def register_script(self, text: str) -> object:
        """Return the mender, which finds nothing spoilt."""
        assert text

        async def mend(keys: list[str], args: list[str]) -> int:
            assert keys
            assert args
            return -1

        return mend

    async def xgroup_create(self, *stream: str, **how: object) -> None:
        """Take a group."""

    async def xreadgroup(self, _group: str, _name: str, after: dict[str, str], **how: object) -> list[object]:
        """Hand the kill out once, then never again."""
        if set(after.values()) == {"0"}:
            return []
        if self._read:
            await asyncio.Event().wait()
        self._read = True
        payload = record.dumps(COMMAND)
        fields = {b"command": payload, b"sig": KEY.sign(Domain.COMMAND, payload).encode()}
        return [(Keys().control().encode(), [(b"1-0", fields)])]

    async def xack(self, _stream: str, _group: str, entry: str) -> None:
        """Keep what was acknowledged."""
        self.acknowledged.append(entry)


class Crew:
    """One attempt that runs and is hit; ``buried``: the jobs that were ended in their lane."""

    def __init__(self, selector: str = "tenant:main") -> None:
        spec = build.job()
        self.run = Run(spec.id, 1, 0, 1, spec=spec, selectors=(selector,))
        self.buried: list[str] = []
        self.ended = False

    async def end_idle(self) -> None:
        """No worker waits."""

    def runs(self) -> tuple[Run, ...]:
        """Return the attempt."""
        return () if self.ended else (self.run,)

    def bury(self, dead: Dead) -> None:
        """Keep whose end is written."""
        self.buried.append(dead.claim.job)


class Waiting:
    """A store in whose lane one job is found by the first sweep, after the running attempt has its end."""

    swept = True

    def __init__(self, jobs: list[str], crew: Crew, *, ends: bool = False, word: bytes | None = None) -> None:
        """``word``: the kill that the store names for those in the lane; default the one that is carried out."""
        self._left, self._run, self._crew, self._ends = jobs, crew.run, crew, ends
        self._word = KillWord("cutoff", record.dumps(COMMAND) if word is None else word, "", 1)

    async def read_cutoffs(self, tenants: set[str]) -> None:
        """Know them already; ``ends``: meanwhile something else ends the attempt."""
        self._crew.ended = self._ends

    def cutoff_for(self, *_named: object) -> int:
        """Every one is hit."""
        return 1

    async def lanes(self) -> tuple[str, ...]:
        """Return the one lane."""
        return (LANE,)

    async def sweep(self, **_where: object) -> list[Dead]:
        """Hand out what is left in the lane."""
        await await_until(lambda: bool(self._run.orders), "the running attempt is killed")
        found = [Dead(Claim(job, 1, LANE), self._word) for job in self._left]
        self._left.clear()
        self._run.settle(cast("Proof", SimpleNamespace(real=False)))
        return found


class Post:
    """Keeps the answers."""

    def __init__(self) -> None:
        self.receipts: list[str] = []
        self.counts: list[int] = []

    def receipt(self, receipt: str) -> None:
        """Keep a receipt."""
        self.receipts.append(receipt)

    def done(self, command: str, count: int) -> None:
        """Keep a count."""
        assert command == COMMAND.id
        self.counts.append(count)


class Clerk:
    """Writes receipts that say only whose they are."""

    node = "n1"

    def receipt(self, run: Run, order: KillOrder, proof: Proof) -> str:
        """Return the receipt of a job."""
        assert order.command == COMMAND.id
        assert proof is run.proof
        return run.job_id


async def cut(crew: Crew, store: Waiting) -> Post:
    """Have one node carry the kill out; return what it answered."""
    stream, post = Stream(), Post()
    trusted = TrustedKey(KEY.key_id, KEY.public, ("kill",), ("*",))

    async def learn() -> None:
        """No queue stands."""

    control = Control(
        cast("Redis", stream),
        Keys(),
        cast("Store", store),
        Lanes("n1", ("*",), {}, "A"),
        cast("Supervisor", crew),
        cast("Mail", post),
        cast("Notary", Clerk()),
        cast("Rules", SimpleNamespace(node="n1", trust={KEY.key_id: trusted})),
        cast("Sequences", None),
        cast("Decider", None),
        cast("Operator", SimpleNamespace(learn=learn)),
    )
    loop = asyncio.get_running_loop().create_task(control.run())
    await await_until(lambda: bool(stream.acknowledged), "the kill is acknowledged")
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await control.close()
    return post


@pytest.mark.parametrize(("given_back", "count"), [(True, 1), (False, 2)])
def test_a_cutoff_counts_each_job_once(given_back: bool, count: int) -> None:
    """One that ran, was given back to its lane and is swept there is one job; another that waited there is a second."""

    async def scenario() -> None:
        crew = Crew()
        job = crew.run.job_id if given_back else build.job().id
        post = await cut(crew, Waiting([job], crew))
        assert crew.buried == [job]
        assert post.counts == [count]
        assert post.receipts == [crew.run.job_id]

    asyncio.run(scenario())


def test_a_job_that_another_kill_took_out_of_its_lane_is_not_counted() -> None:
    """The sweep ends it all the same; its receipt goes to who ordered that other kill."""

    async def scenario() -> None:
        crew, job = Crew(), build.job().id
        other = record.dumps(orders.command("kill", Selector("job", job), None))
        post = await cut(crew, Waiting([job], crew, word=other))
        assert (crew.buried, post.counts, post.receipts) == ([job], [1], [crew.run.job_id])

    asyncio.run(scenario())


def test_what_runs_below_a_killed_job_has_its_receipt_whoever_ends_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family may end it while the store is asked for cutoffs: it is counted and answered for all the same."""
    parent = build.job().id
    monkeypatch.setitem(globals(), "COMMAND", orders.command("kill", Selector("job", parent), None))

    async def scenario() -> None:
        crew = Crew(f"job:{parent}")
        post = await cut(crew, Waiting([], crew, ends=True))
        assert (post.counts, post.receipts) == ([1], [crew.run.job_id])

    asyncio.run(scenario())
