"""The handle of one job: look, wait, read, pause, kill.

Called by applications. Must never load the queue's libraries before a method needs them, and never return a result that
no trusted node signed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

from runner.aio import apart, in_thread, twin
from runner.place import Place
from runner.wire import ids
from runner.wire.receipt import Outcome, PauseReceipt, Receipt
from runner.wire.spec import JobSpec
from runner.wire.values import ResultOf
from runner.wire.view import ArtifactView, EventView, JobView, ProgressView

if TYPE_CHECKING:
    from runner.client import Client
    from runner.results import End

__all__ = ["Job"]

R = TypeVar("R")

#: How long one look of a waiting async call blocks its thread.
_GLANCE_S = 0.001


class Job(Generic[R]):
    """One job. Two handles with the same id are the same job; making one asks nothing of the store."""

    __slots__ = ("_hints", "_place", "_spec", "id")

    def __init__(
        self,
        place: Place,
        job_id: str,
        spec: JobSpec | None = None,
        hints: Mapping[str, type[object]] | None = None,
    ) -> None:
        """``spec``: what this process enqueued, or one of its like; ``hints``: classes that the result may be built of.

        Raises GrammarError for a bad id.
        """
        self.id = ids.check_job_id(job_id)
        self._hints = hints
        self._place = place
        self._spec = spec

    @property
    def tenant(self) -> str:
        """The tenant that the job belongs to."""
        return ids.tenant_of(self.id)

    @property
    def output(self) -> ResultOf:
        """What the job will have returned, as an argument of another job, which then waits for this one."""
        return ResultOf(self.id)

    def status(self) -> JobView:
        """Return how the job stands now. Raises JobNotFoundError, StoreError."""
        from runner import listing

        return listing.view(self._client(), self.id, self._spec)

    def result(self, timeout: float | None = None, types: Iterable[type[object]] = ()) -> R:
        """Wait for the end and return the value; None of a command. ``timeout`` in seconds, None = as long as it takes.

        Dataclasses and enums arrive as plain values unless the task's annotation, or ``types``, names their class.

        Raises:
            JobFailed, JobKilled, JobRefused, JobExpired, JobLost: with reason and signed evidence.
            ResultTimeoutError, JobNotFoundError, UnverifiedResultError, StoreError.
        """
        from runner import results

        return cast("R", results.value(self._client(), self.id, self._spec, timeout, types, self._hints))

    def outcome(self, timeout: float | None = None) -> Outcome:
        """Wait for the end and return the outcome that the node signed, whatever it is. Raises as `result` does."""
        from runner import results

        return results.wait(self._client(), self.id, self._spec, timeout).outcome

    def logs(self, follow: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield (1 or 2, bytes) of the captured output; ``follow``: until the job has ended."""
        from runner import results

        return results.logs(self._client(), self.id, follow)

    def events(self, follow: bool = False) -> Iterator[EventView]:
        """Yield the job's events in order; ``follow``: until it has ended."""
        from runner import listing

        return listing.events(self._client(), tenant=ids.tenant_of(self.id), job_id=self.id, follow=follow)

    def progress(self) -> ProgressView | None:
        """Return what the job last said of how far it is; None if it said nothing. Raises StoreError."""
        from runner import artifacts

        return artifacts.progress(self._client(), self.id)

    def artifacts(self) -> tuple[ArtifactView, ...]:
        """Return what the job has given by name so far, for 7 days after the last one. Raises StoreError."""
        from runner import artifacts

        return artifacts.artifacts(self._client(), self.id)

    def artifact(self, name: str) -> bytes:
        """Return the bytes of one artifact, checked against what its node signed. Raises ArtifactError, StoreError."""
        from runner import artifacts

        return artifacts.read(self._client(), self.id, name)

    def kill(self, reason: str = "", grace: float = 0.0, force: bool = False, wait: float = 15.0) -> Receipt:
        """Kill every process of the job and all jobs that it started; return its node's receipt.

        ``unconfirmed`` if none came in ``wait`` s.

        ``grace``: seconds between SIGTERM and SIGKILL. ``force``: no grace even if one runs already.
        """
        from runner import control

        order = control.Order(reason=reason, grace_s=grace, force=force, wait_s=wait)
        return control.kill_job(self._client(), self.id, order)

    def kill_tree(self, reason: str = "", grace: float = 0.0, force: bool = False, wait: float = 15.0) -> list[Receipt]:
        """Kill the job as `kill` does; return its receipt, and one for each job that it started, on any node."""
        from runner import control

        order = control.Order(reason=reason, grace_s=grace, force=force, wait_s=wait)
        return control.kill_tree(self._client(), self.id, order)

    def pause(self, reason: str = "", wait: float = 15.0) -> PauseReceipt:
        """Let no process of the running job run until `resume`; return the node's receipt.

        The job keeps its slot and its memory; its time limit stands still, at most until its not_after. Pausing it
        again is no error. Raises StoreError.
        """
        from runner import pausing

        return pausing.pause_job(self._client(), "pause", self.id, reason=reason, wait_s=wait)

    def resume(self, reason: str = "", wait: float = 15.0) -> PauseReceipt:
        """Let a paused job go on; return the node's receipt. Raises StoreError."""
        from runner import pausing

        return pausing.pause_job(self._client(), "resume", self.id, reason=reason, wait_s=wait)

    def signal(self, name: str, reason: str = "", wait: float = 15.0) -> Receipt | PauseReceipt:
        """Send a signal (KILL STOP CONT INT TERM USR1 USR2 POLICY TRUST BUDGET LOOP DRIFT); return the node's receipt.

        Of one that kills it is that of `kill`. Raises StoreError, UsageError: no such signal.
        """
        from runner import signalling

        known = signalling.name_of(name)
        return signalling.signal_job(self._client(), known, self.id, reason=reason, wait_s=wait)

    def decide(
        self, secret: str, approved: bool, attempt: int | None = None, reason: str = "", wait: float = 15.0
    ) -> PauseReceipt:
        """Say yes or no to a secret that the job waits for; return the receipt of its node.

        It counts for one attempt, by default the present one; this key has to be trusted to operate. Raises StoreError,
        JobNotFoundError, GrammarError.
        """
        from runner import approving

        now = self.status().attempt if attempt is None else attempt
        return approving.decide(self._client(), approved, self.id, now, secret, reason=reason, wait_s=wait)

    def answer(self, approved: bool, ask: str | None = None, reason: str = "", wait: float = 15.0) -> PauseReceipt:
        """Say yes or no to a call that policy leaves to a person: the question ``ask``, or the only one that waits.

        A yes lets one call through. Outcome ``stored``: nobody waits for it at the moment, the next attempt gets it.
        This key has to be trusted to operate. Raises UsageError, StoreError.
        """
        from runner import waiting

        op: Literal["approve", "deny"] = "approve" if approved else "deny"
        return waiting.answer_ask(self._client(), op, self.id, ask, reason=reason, wait_s=wait)

    def budget_key(self) -> str | None:
        """Return the key of the budget that the job was signed with. Raises JobNotFoundError, StoreError."""
        from runner import waiting

        return waiting.budget_of(self._client(), self.id)

    def retry(self, force: bool = False) -> Job[R]:
        """Run an ended job again as a new one with the same arguments, grants and limits; return the new handle.

        It carries the tag ``retry_of`` and is made once; ``force``: again, and also one that finished, was killed or
        was to run at most once. Only the key that signed the job can.

        Raises:
            UsageError: it has not ended, or needs ``force``. EnqueueError, JobNotFoundError, UnverifiedResultError,
            StoreError.
        """
        from runner import repeating

        spec = repeating.repeat(self._client(), self.id, force=force)
        return Job(self._place, spec.id, spec, self._hints)

    aretry = twin(retry)
    adecide = twin(decide)
    astatus = twin(status)
    aprogress = twin(progress)
    aartifacts = twin(artifacts)
    aartifact = twin(artifact)
    akill = twin(kill)
    akill_tree = twin(kill_tree)
    apause = twin(pause)
    asignal = twin(signal)
    aresume = twin(resume)
    aanswer = twin(answer)
    abudget_key = twin(budget_key)

    async def aresult(self, timeout: float | None = None, types: Iterable[type[object]] = ()) -> R:
        """`result` without blocking the event loop; may be cancelled."""
        from runner import results

        return cast("R", results.value_of(await self._end(timeout), types, self._hints))

    async def aoutcome(self, timeout: float | None = None) -> Outcome:
        """`outcome` without blocking the event loop; may be cancelled."""
        return (await self._end(timeout)).outcome

    async def alogs(self, follow: bool = False) -> AsyncIterator[tuple[int, bytes]]:
        """`logs` without blocking the event loop."""
        async for part in apart(await in_thread(self.logs, follow)):
            yield part

    async def aevents(self, follow: bool = False) -> AsyncIterator[EventView]:
        """`events` without blocking the event loop."""
        async for event in apart(await in_thread(self.events, follow)):
            yield event

    async def _end(self, timeout: float | None) -> End:
        """Wait for the end; only looks at the job itself take a thread, and then for a moment."""
        from runner import lookout, results

        client = await in_thread(self._client)
        waiter = results.Waiter(client, self.id, self._spec, timeout)
        while (end := await in_thread(waiter.step, _GLANCE_S)) is None:
            await lookout.ended(client, self.id, waiter.left_s)
        return end

    def _client(self) -> Client:
        from runner.client import connect

        return connect(self._place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<job {self.id}>"
