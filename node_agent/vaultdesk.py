"""Port: broker.client. Jobs with secrets: a line to the broker before they start, scrubbed output, and the end of it.

Called by the stage (before an attempt exists) and the supervisor (once its worker stands, and for its result). Must
never let a job with secrets start without a lease for every one of them, or read a byte of its output that the scrubber
has not passed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final, Literal

from broker.client import CONTROL, BrokerAway, BrokerClient, LeaseAsk, LeaseRefused, SecretAsk
from node_agent.containment.attempts import Attempt
from node_agent.errors import NodeError
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


def desk_of(sockets: Path, level: str) -> VaultDesk | None:
    """Return a node's line to the broker. Below level B the kernel tells no job from another, so none gets a secret."""
    if level not in ("A", "B"):
        return None
    return VaultDesk(BrokerClient(sockets / CONTROL), "A" if level == "A" else "B")


def handed(spec: JobSpec) -> bool:
    """Return whether a job is handed a value, so that what it prints has to be scrubbed."""
    return any(secret.mode in _CHANNEL_MODES for secret in spec.grants.secrets)


class VaultLine:
    """One attempt's dealings with the broker. ``far`` goes to the worker and is closed by ``sent``."""

    def __init__(self, client: BrokerClient, spec: JobSpec, number: int, level: Literal["A", "B"]) -> None:
        self._client, self._spec, self._level = client, spec, level
        self._name = ids.attempt_name(spec.id, number)
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.far = far.detach()

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
        )
        fds = attempt.place()
        try:
            await self._client.open(ask, (self._near.fileno(), *fds))
            if handed(spec):
                await self._scrub(attempt)
        except BrokerAway as error:
            raise SecretsError(RefuseReason.BROKER_UNAVAILABLE, str(error)) from None
        except LeaseRefused as error:
            raise SecretsError(RefuseReason.SECRET_DENIED, str(error)) from None
        finally:
            for fd in fds:
                os.close(fd)

    async def clean(self, attempt: Attempt) -> None:
        """Put a copy without the values in the place of an attempt's result, or the record of an error."""
        source = attempt.result_fd
        if source is None or not handed(self._spec):
            return
        target = os.memfd_create("result", os.MFD_CLOEXEC)
        try:
            await self._client.clean(self._name, source, target)
        except (BrokerAway, LeaseRefused) as error:
            os.ftruncate(target, 0)
            told = {"type": "ResultLost", "message": f"the result can't be scrubbed: {error}", "traceback": ""}
            os.pwrite(target, codec.dump({"error": told}), 0)
        attempt.replace_result(target)

    async def end(self) -> None:
        """End the lease: the channel is dead, and the scrubber forgets. Never raises."""
        await self._client.close(self._name)
        self.close()

    def sent(self) -> None:
        """The worker holds its own copy now. Idempotent."""
        if self.far >= 0:
            os.close(self.far)
            self.far = -1

    def close(self) -> None:
        """Give both ends back. Idempotent."""
        self.sent()
        self._near.close()

    async def _scrub(self, attempt: Attempt) -> None:
        """Put the scrubber between the attempt and us: nothing has been written yet."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
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
        attempt.stdout, attempt.stderr = (reader for reader, _ in pipes)


class VaultDesk:
    """A node's dealings with its broker. ``start``, then ``stop``."""

    def __init__(self, client: BrokerClient, level: Literal["A", "B"]) -> None:
        self._client = client
        self._level = level

    def start(self) -> None:
        """Open live leases again after a restart of the broker. Idempotent."""
        self._client.start()

    async def stop(self) -> None:
        """End all leases. Idempotent."""
        await self._client.stop()

    async def line(self, spec: JobSpec, number: int) -> VaultLine:
        """Return an attempt's channel. Raises SecretsError: there is no broker to connect it to."""
        if not await self._client.ping():
            raise SecretsError(
                RefuseReason.BROKER_UNAVAILABLE,
                "no vault broker answers on this node, so no job gets a secret: `ringfence broker` starts it, "
                "`ringfence vault init` makes its vault",
            )
        return VaultLine(self._client, spec, number, self._level)
