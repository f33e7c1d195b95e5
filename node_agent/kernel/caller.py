"""Who asks: the attempt that a session belongs to, as the node knows it. Nothing in here comes from the job.

Made by the channel, one for each session; handlers read it. Must never be built from a field of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from node_agent.kernel.errors import CallError
from node_agent.run import Run
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.spec import JobSpec

__all__ = ["Caller"]


@dataclass(slots=True, eq=False)
class Caller:
    """One session of one attempt.

    ``attempt``: ids.attempt_name of it. ``signer``: the id of the key that signed the job. ``push``: sends an unasked
    record (signals) on this session; never blocks, False if the process takes none. ``closing``: called once when the
    session ends, so that a part gives back what it holds for it (descriptors, handlers).
    """

    run: Run
    spec: JobSpec
    number: int
    attempt: str
    signer: str
    push: Callable[[dict[str, Json]], bool]
    closing: list[Callable[[], None]] = field(default_factory=list)

    @property
    def job(self) -> str:
        """The job's id."""
        return self.spec.id

    @property
    def tenant(self) -> str:
        """The job's tenant."""
        return self.spec.tenant

    def needs(self, granted: bool, what: str) -> None:
        """Raise CallError(DENIED) unless ``granted``; ``what`` names the grant that is missing."""
        if not granted:
            raise CallError(ErrorCode.DENIED, f"this job was not granted {what}")
