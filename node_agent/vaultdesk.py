"""Port: broker.client. Jobs with secrets: a line to the broker before they start, scrubbed output, and the end of it.

Called by the stage (before an attempt exists) and the supervisor (once its worker stands, and for its result). Must
never let a job with secrets start without a lease for every one of them, or read a byte of its output that the scrubber
has not passed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from broker.client import CONTROL, BrokerAway, BrokerClient, LeaseAsk, LeaseRefused, SecretAsk
from node_agent.cancelling import end_all
from node_agent.containment.attempts import Attempt
from node_agent.errors import NodeError
from node_agent.leaks import Alarm, Leak
from runner.wire import codec, ids
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason

__all__ = ["SecretsError", "VaultDesk", "VaultLine", "desk_of", "handed"]

_CHANNEL_MODES: Final = frozenset({"get", "file", "env"})


class SecretsError(NodeError):
    """A job does not get its secrets; ``reason`` is the refusal's."""

    code = "secrets"

    def __init__(self, reason: RefuseReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


#: How often a broker that is away is asked again, in seconds.
RETRY_S: Final = 0.5


class News(Protocol):
    """Who is told: VaultNews."""

    def broker(self, *, away: bool) -> None:
        """The broker got lost, or answers again."""

    def pending(self, spec: JobSpec, number: int, names: Sequence[str]) -> None:
        """Some secrets of a lease wait for a person."""

    def leaked(self, spec: JobSpec, number: int, name: str, where: str, *, killed: bool) -> None:
        """A job's output or result held a value, which was masked."""


def desk_of(sockets: Path, level: str, news: News) -> VaultDesk | None:
    """Return a node's line to the broker. Below level B the kernel tells no job from another, so none gets a secret."""
    if level not in ("A", "B"):
        return None
    return VaultDesk(BrokerClient(sockets / CONTROL), "A" if level == "A" else "B", news)


def handed(spec: JobSpec) -> bool:
    """Return whether a job is handed a value, so that what it prints has to be scrubbed."""
    return spec.sealed is not None or any(secret.mode in _CHANNEL_MODES for secret in spec.grants.secrets)


class VaultLine:
    """One attempt's dealings with the broker. ``far`` goes to the worker and is closed by ``sent``."""

    def __init__(
        self, client: BrokerClient, spec: JobSpec, number: int, level: Literal["A", "B"], desk: VaultDesk, signer: str
    ) -> None:
        self._client, self._spec, self._level, self._desk = client, spec, level, desk
        self._number, self._signer = number, signer
        self._name = ids.attempt_name(spec.id, number)
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.far = far.detach()
        self._alarm: Alarm | None = None
        self._stop: Callable[[], None] = _nothing
        #: For which library the broker's rules say a secret is, once the lease is open.
        self.sdks: dict[str, str] = {}

    async def open(self, uid: int, attempt: Attempt) -> None:
        """Open the lease of an attempt whose worker stands.

        The attempt's output passes the scrubber from here on, if it may be handed a value.

        Raises:
            SecretsError, SpawnError: the caller kills the attempt; nothing of the job has run.
        """
        spec = self._spec
        ask = LeaseAsk(
            attempt=self._name,
            job=spec.id,
            tenant=spec.tenant,
            queue=spec.queue,
            level=self._level,
            uid=uid,
            task=spec.task,
            command=None if spec.argv is None else spec.argv[0],
            tags=dict(spec.tags),
            secrets=[SecretAsk(one.name, one.mode, one.target) for one in spec.grants.secrets],
            sealed={place: str(text) for place, text in (spec.sealed or {}).items()},
            signer=self._signer,
        )
        fds = attempt.place()
        try:
            opening = await self._client.open(ask, (self._near.fileno(), *fds))
            self.sdks = opening.sdks
            self._desk.news.pending(spec, self._number, opening.pending)
            if spec.grants.service:
                await self._serve(attempt)
            if handed(spec):
                await self._scrub(attempt)
        except BrokerAway as error:
            self._desk.lost()
            raise SecretsError(RefuseReason.BROKER_UNAVAILABLE, str(error)) from None
        except LeaseRefused as error:
            reason = RefuseReason.BAD_SIGNATURE if error.foreign else RefuseReason.SECRET_DENIED
            raise SecretsError(reason, str(error)) from None
        finally:
            for fd in fds:
                os.close(fd)

    async def proxy(self, end: int) -> None:
        """Give the broker its end of the egress process's line. Raises SecretsError."""
        try:
            await self._client.proxy(self._name, end)
        except BrokerAway as error:
            self._desk.lost()
            raise SecretsError(RefuseReason.BROKER_UNAVAILABLE, str(error)) from None
        except LeaseRefused as error:
            raise SecretsError(RefuseReason.SECRET_DENIED, str(error)) from None

    async def _serve(self, attempt: Attempt) -> None:
        ends = await attempt.door("service")
        try:
            await self._client.service(self._name, ends[0])
        finally:
            for fd in ends:
                os.close(fd)

    async def clean(self, attempt: Attempt) -> None:
        """Put a copy without the values in the place of an attempt's result, or the record of an error."""
        source = attempt.result_fd
        if source is None or not handed(self._spec):
            return
        target = os.memfd_create("result", os.MFD_CLOEXEC)
        try:
            for name, kill in (await self._client.clean(self._name, source, target)).items():
                self._leaked(Leak(name, kill), "result")
        except (BrokerAway, LeaseRefused) as error:
            os.ftruncate(target, 0)
            told = {"type": "ResultLost", "message": f"the result can't be scrubbed: {error}", "traceback": ""}
            os.pwrite(target, codec.dump({"error": told}), 0)
        attempt.replace_result(target)

    async def end(self) -> None:
        """End the lease: the channel is dead, and the scrubber forgets. Never raises."""
        await self._client.close(self._name)
        self.close()

    def watch(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when a value is found whose rule ends the job for that."""
        self._stop = stop
        if self._alarm is not None:
            self._alarm.watch(lambda leak: self._leaked(leak, "output"))

    def hear(self) -> None:
        """Take what the scrubber has said so far: all of it, once the output has ended."""
        if self._alarm is not None:
            self._alarm.hear()

    def _leaked(self, leak: Leak, where: str) -> None:
        self._desk.news.leaked(self._spec, self._number, leak.name, where, killed=leak.kill)
        if leak.kill:
            self._stop()

    def sent(self) -> None:
        """The worker holds its own copy now. Idempotent."""
        if self.far >= 0:
            os.close(self.far)
            self.far = -1

    def close(self) -> None:
        """Give both ends back. Idempotent."""
        self.sent()
        self._near.close()
        if self._alarm is not None:
            self._alarm.close()

    async def _scrub(self, attempt: Attempt) -> None:
        """Put the scrubber between the attempt and us: nothing has been written yet."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        writers = [writer for _, writer in pipes]
        try:
            await self._client.streams(self._name, (attempt.stdout, attempt.stderr, *writers))
        except BaseException:
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            for writer in writers:
                os.close(writer)
        for fd in (attempt.stdout, attempt.stderr):
            os.close(fd)
        for reader, _ in pipes:
            os.set_blocking(reader, False)
        attempt.stdout, attempt.stderr, alarm = (reader for reader, _ in pipes)
        self._alarm = Alarm(alarm)


def _nothing() -> None:
    """Nobody asked to be told."""


class VaultDesk:
    """A node's dealings with its broker. ``start``, then ``stop``.

    A job that finds no broker is refused; from then on the node leaves such jobs alone until a ping succeeds.
    """

    def __init__(self, client: BrokerClient, level: Literal["A", "B"], news: News) -> None:
        self._client = client
        self._level = level
        self.news = news
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open live leases again after a restart of the broker. Idempotent."""
        self._client.start()

    async def stop(self) -> None:
        """End all leases. Idempotent."""
        if self._looking is not None:
            await end_all((self._looking,))
        await self._client.stop()

    def lost(self) -> None:
        """A job's question got no answer: look for the broker until it answers."""
        if self._looking is None or self._looking.done():
            self.news.broker(away=True)
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def decide(self, attempt: str, name: str, *, approved: bool, by: str) -> None:
        """Hand a person's decision to the broker. Raises SecretsError: no broker, or nothing waits under that name."""
        try:
            await self._client.decide(attempt, name, approved=approved, by=by)
        except BrokerAway as error:
            raise SecretsError(RefuseReason.BROKER_UNAVAILABLE, str(error)) from None
        except LeaseRefused as error:
            raise SecretsError(RefuseReason.SECRET_DENIED, str(error)) from None

    async def _look(self) -> None:
        while not await self._client.ping():
            await asyncio.sleep(RETRY_S)
        self.news.broker(away=False)

    async def line(self, spec: JobSpec, number: int, signer: str) -> VaultLine:
        """Return an attempt's channel. ``signer``: the id of the key whose signature admitted the job.

        Raises SecretsError: there is no broker to connect it to.
        """
        if not await self._client.ping():
            self.lost()
            raise SecretsError(
                RefuseReason.BROKER_UNAVAILABLE,
                "no vault broker answers on this node, so no job gets a secret: `ringfence broker` starts it, "
                "`ringfence vault init` makes its vault",
            )
        return VaultLine(self._client, spec, number, self._level, self, signer)
