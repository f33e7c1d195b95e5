"""The turn loop: nothing claimed is forgotten, nothing finished is lost, whatever the store answers."""

from __future__ import annotations

import asyncio

import pytest

from node_agent.dispatch import CROWD, Dispatcher, wake_loop
from node_agent.errors import LeaseLostError, StoreAwayError
from node_agent.turns import Claim, Dead, Finish, FinishReply, Orphan, Start, StartReply, Turn, TurnReply
from runner.wire.states import State
from tests.support.wait import await_until


class FakeStore:
    """A store in memory: hands out claims, can lose an answer after the turn took effect."""

    def __init__(self, jobs: int) -> None:
        self.waiting = [f"main-{number}" for number in range(jobs)]
        self.claimed: dict[str, Claim] = {}
        self.done: list[str] = []
        self.released: list[str] = []
        self.lose = 0
        self.lost = False
        self.turns: list[Turn] = []

    async def turn(self, turn: Turn) -> TurnReply:
        self.turns.append(turn)
        answers = []
        for finish in turn.finishes:
            known = self.claimed.pop(finish.claim.job, None)
            answers.append(FinishReply(finish.claim.job, finish.claim.attempt, "done" if known else "stale"))
            if known:
                self.done.append(finish.claim.job)
        claims = []
        for job in [job for job in self.claimed if turn.held is not None and job not in turn.held]:
            self.released.append(job)
            self.waiting.insert(0, job)
            del self.claimed[job]
        for slot in turn.free:
            if self.waiting:
                claim = Claim(self.waiting.pop(0), 1, "agents", slot)
                self.claimed[claim.job] = claim
                claims.append(claim)
        if self.lose:
            self.lose -= 1
            raise StoreAwayError("the answer was lost")
        starts = tuple(StartReply(start.claim.job, start.claim.attempt, "done") for start in turn.starts)
        return TurnReply(tuple(answers), starts, tuple(claims), lost=self.lost, more=bool(self.waiting))


class Crew:
    """Finishes every claim at once."""

    def __init__(self, dispatcher: Dispatcher, *, mark: bool = False) -> None:
        self.dispatcher = dispatcher
        self.mark = mark
        self.taken: list[str] = []
        self.known: set[str] = set()
        self.marks: list[StartReply] = []

    def take(self, claim: Claim) -> None:
        self.taken.append(claim.job)
        self.known.add(claim.job)
        if self.mark:
            self.dispatcher.mark(Start(claim))
        self.dispatcher.finish(Finish(claim, state=State.FINISHED))

    def bury(self, dead: Dead) -> None:
        raise AssertionError(dead)

    def lapse(self, claim: Claim) -> None:
        raise AssertionError(claim)

    def inherit(self, orphan: Orphan) -> None:
        raise AssertionError(orphan)

    def held(self) -> tuple[str, ...]:
        return tuple(self.known)

    def finished(self, finish: Finish, reply: FinishReply) -> None:
        self.known.discard(finish.claim.job)

    def marked(self, reply: StartReply) -> None:
        self.marks.append(reply)


async def _run(store: FakeStore, jobs: int, *, mark: bool = False) -> tuple[Crew, Dispatcher]:
    dispatcher = Dispatcher(store, 2, lambda: ("agents",), lambda: None)
    crew = Crew(dispatcher, mark=mark)
    dispatcher.serve(crew)
    task = asyncio.create_task(dispatcher.run())
    dispatcher.wake()
    try:
        await await_until(lambda: len(store.done) == jobs or task.done(), "every job is done")
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return crew, dispatcher


def test_every_job_is_done_once_and_all_slots_are_free_after() -> None:
    """Ten jobs over two slots."""
    store = FakeStore(10)
    crew, dispatcher = asyncio.run(_run(store, 10))
    assert sorted(store.done) == sorted(crew.taken)
    assert len(set(store.done)) == 10
    assert dispatcher.busy == 0


def test_a_finish_and_the_next_claim_share_one_turn() -> None:
    """At most one round trip a job once the loop runs."""
    store = FakeStore(20)
    asyncio.run(_run(store, 20))
    assert len(store.turns) <= 12


def test_claims_of_a_lost_answer_go_back_and_run() -> None:
    """The store claimed, the answer never came: the jobs are released, uncounted, and run later."""
    store = FakeStore(4)
    store.lose = 1
    crew, dispatcher = asyncio.run(_run(store, 4))
    assert sorted(set(crew.taken)) == ["main-0", "main-1", "main-2", "main-3"]
    assert sorted(store.released) == ["main-0", "main-1"]
    assert dispatcher.busy == 0


def test_finishes_of_a_lost_answer_are_sent_again() -> None:
    """A finish is sent until the store answers; the fence makes that safe."""
    store = FakeStore(2)

    async def check() -> None:
        dispatcher = Dispatcher(store, 2, lambda: ("agents",), lambda: None)
        crew = Crew(dispatcher)
        dispatcher.serve(crew)
        claim = Claim("main-9", 1, "agents", 0)
        store.claimed["main-9"] = claim
        crew.known.add("main-9")
        store.waiting.clear()
        store.lose = 2
        task = asyncio.create_task(dispatcher.run())
        dispatcher.finish(Finish(claim, state=State.FINISHED))
        await await_until(lambda: not crew.known, "the finish is answered")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(check())
    assert store.done == ["main-9"]


def test_a_start_mark_is_sent_even_if_its_end_overtakes_it() -> None:
    """Every started attempt gets its mark, at the latest in the turn of its end."""
    store = FakeStore(3)
    crew, _ = asyncio.run(_run(store, 3, mark=True))
    assert sorted(mark.job for mark in crew.marks) == ["main-0", "main-1", "main-2"]
    assert len(store.done) == 3


def test_without_a_lease_the_loop_ends() -> None:
    """A boot that others declared dead claims nothing more."""
    store = FakeStore(1)
    store.lost = True
    with pytest.raises(LeaseLostError):
        asyncio.run(_run(store, 99))


@pytest.mark.parametrize(("running", "turns"), [(CROWD + 1, 1), (CROWD, 3)])
def test_ends_share_a_turn_while_the_cores_have_work(running: int, turns: int) -> None:
    """Right after a turn an end waits for the next ones if enough others run, and for nobody if few do."""
    store = FakeStore(0)

    async def check() -> int:
        dispatcher = Dispatcher(store, running, lambda: ("agents",), lambda: None)
        crew = Crew(dispatcher)
        dispatcher.serve(crew)
        dispatcher._free.clear()
        task = asyncio.create_task(dispatcher.run())
        dispatcher.mark(Start(Claim("main-first", 1, "agents", 0)), urgent=True)
        await await_until(lambda: store.turns, "a turn")
        # It went just now, however slow this machine is.
        dispatcher._sent_s = asyncio.get_running_loop().time() + 0.2
        for number in range(3):
            claim = Claim(f"main-{number}", 1, "agents", number)
            store.claimed[claim.job] = claim
            dispatcher.finish(Finish(claim, state=State.FINISHED), free_slot=False)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await await_until(lambda: len(store.done) == 3, "all ends to be sent")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sum(bool(turn.finishes) for turn in store.turns)

    assert asyncio.run(check()) == turns


def test_a_killed_job_waits_for_no_company() -> None:
    """Somebody waits for the receipt of a kill, so its end goes in a turn of its own, however busy the node is."""
    store = FakeStore(0)

    async def check() -> bool:
        dispatcher = Dispatcher(store, CROWD + 4, lambda: ("agents",), lambda: None)
        dispatcher.serve(Crew(dispatcher))
        dispatcher._free.clear()
        dispatcher._sent_s = asyncio.get_running_loop().time() + 3600
        claim = Claim("main-0", 1, "agents", 0)
        store.claimed[claim.job] = claim
        task = asyncio.create_task(dispatcher.run())
        dispatcher.finish(Finish(claim, state=State.KILLED))
        await await_until(lambda: store.done, "the end of a killed job")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return store.done == ["main-0"]

    assert asyncio.run(check())


def test_an_end_that_comes_during_a_turn_waits_for_company() -> None:
    """The slot that it frees is filled with the next ones: no turn follows at once because one was under way."""
    store = FakeStore(CROWD + 9)

    async def check() -> int:
        dispatcher = Dispatcher(store, CROWD + 4, lambda: ("agents",), lambda: None)
        crew = Crew(dispatcher)
        answer = store.turn

        async def slow(turn: Turn) -> TurnReply:
            reply = await answer(turn)
            if len(store.turns) == 2:
                # It went just now, however slow this machine is; one more job ends before the answer is read.
                dispatcher._sent_s = asyncio.get_running_loop().time() + 0.2
                dispatcher.finish(Finish(claims[1], state=State.FINISHED))
            return reply

        store.turn = slow  # type: ignore[method-assign]  # the same, with a job that ends meanwhile
        claims: list[Claim] = []

        def take(claim: Claim) -> None:
            claims.append(claim)
            crew.known.add(claim.job)

        crew.take = take  # type: ignore[method-assign]  # jobs that go on
        dispatcher.serve(crew)
        task = asyncio.create_task(dispatcher.run())
        dispatcher.wake()
        await await_until(lambda: len(claims) == CROWD + 4, "all slots to be taken")
        dispatcher._sent_s = 0.0
        dispatcher.finish(Finish(claims[0], state=State.FINISHED))
        await await_until(lambda: len(store.turns) == 2, "its turn")
        for _ in range(5):
            await asyncio.sleep(0)
        seen = len(store.turns)
        await await_until(lambda: len(store.done) == 2, "the other end")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    assert asyncio.run(check()) == 2


def test_what_waited_for_this_start_is_taken_at_once() -> None:
    """The first turn does not wait for a first look at the lanes: here that look never ends."""
    store = FakeStore(3)

    async def check() -> None:
        dispatcher = Dispatcher(store, 2, lambda: ("agents",), lambda: None)
        dispatcher.serve(Crew(dispatcher))

        async def look(idle: bool) -> None:
            await asyncio.Event().wait()

        tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(wake_loop(look, dispatcher))]
        await await_until(lambda: len(store.done) == 3, "all jobs to be done")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())
