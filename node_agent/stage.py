"""What an attempt gets from the host before it exists: its opened grants and its uid.

Called by the supervisor after admission; gives everything back after the proof. Must never pass on a path that was not
opened and checked once, and never give a job another running job's uid.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from node_agent.containment import landlock, plants
from node_agent.containment.attempts import Attempt
from node_agent.containment.errors import DoorError, GrantRefused, LeaseError, SpawnError, UidsUnavailable
from node_agent.containment.idmap import Idmaps
from node_agent.containment.openers import Looked, Openers
from node_agent.containment.paths import Opened, Protected, clone_mount
from node_agent.containment.plan import Mount
from node_agent.containment.uids import JobUids
from node_agent.egress import Door, Egress
from node_agent.errors import EgressError, EgressMissingError, NodeError
from node_agent.keyline import KeyLine
from node_agent.routes import routes_of
from node_agent.vaultdesk import SecretsError, VaultDesk, VaultLine
from runner.wire import ids
from runner.wire.grants import PathGrant
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason

__all__ = ["Stage", "StageError", "Staged", "told"]

MOST_TOLD_CHARACTERS = 2000
#: Where every job may write, and so may what is granted below.
OWN_PLACES = ("/work", "/tmp", "/dev/shm")  # noqa: S108 - places of the job's own view


class StageError(NodeError):
    """A grant that this host does not give; ``reason`` is the refusal's."""

    code = "stage"

    def __init__(self, reason: RefuseReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Staged:
    """Mounts with one descriptor each, in order, and the uid; ``close`` gives all back and is idempotent."""

    uid: int
    gid: int
    mounts: tuple[Mount, ...] = ()
    fds: tuple[int, ...] = ()
    #: The write grants whose plants are compared after the attempt.
    looked: tuple[Looked, ...] = ()
    #: Opens the attempt's door, for a job with net grants.
    connect: Callable[[Attempt], Awaitable[Door]] | None = None
    #: The attempt's channel to the broker, for a job with secrets.
    line: VaultLine | None = None
    #: The certificate that stands for the hosts of its proxied secrets, in PEM.
    authority: str = ""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def sdks(self) -> dict[str, str]:
        """For which libraries the vault's rules say that proxied secrets are."""
        return {} if self.line is None else self.line.sdks

    @property
    def plan_fds(self) -> tuple[int, ...]:
        """What the worker gets besides its pipes: the broker's channel first, then one for each mount."""
        return self.fds if self.line is None else (self.line.far, *self.fds)

    def sent(self) -> None:
        """The worker holds its own copies now."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = ()
        if self.line is not None:
            self.line.sent()

    async def connected(self, attempt: Attempt) -> None:
        """Give a job with net grants the one thing it can reach, and one with secrets its lease, before it runs.

        Raises:
            DoorError: the egress process did not take it. LeaseError: the broker did not. The attempt is proved gone
                and closed.
        """
        if self.connect is None and self.line is None:
            return
        door: Door | None = None
        try:
            if self.line is not None:
                await self.line.open(self.uid, attempt)
            if self.connect is not None:
                door = await self.connect(attempt)
        except BaseException as error:
            attempt.kill()
            await attempt.proved
            os.close(attempt.stdout)
            os.close(attempt.stderr)
            attempt.close()
            if isinstance(error, EgressError | SpawnError):
                raise DoorError(str(error)) from None
            if isinstance(error, SecretsError):
                raise LeaseError(error.reason.value, str(error)) from None
            raise
        if door is not None:
            attempt.proved.add_done_callback(lambda _: door.close())

    async def cleaned(self, attempt: Attempt) -> None:
        """Take the values out of a result before it is read."""
        if self.line is not None:
            await self.line.clean(attempt)

    async def ended(self) -> None:
        """The attempt is proved gone: its lease is over. Idempotent."""
        line, self.line = self.line, None
        if line is not None:
            await line.end()

    def give(self) -> Callable[[], None]:
        """Hand over what is to be freed once the worker is proved gone, to who sees that; ``close`` leaves it alone."""
        undo, self._undo = self._undo, []

        def free() -> None:
            while undo:
                undo.pop()()

        return free

    def close(self) -> None:
        """Close what is still open and free the uid. Only after the proof."""
        self.sent()
        if self.line is not None:
            self.line.close()
        while self._undo:
            self._undo.pop()()


class Stage:
    """Opens grants for one node. ``uids`` and ``idmaps`` are None at level B, where jobs run as the agent's own uid."""

    def __init__(
        self,
        protected: Protected,
        uids: JobUids | None,
        idmaps: Idmaps | None,
        *,
        egress: Egress | None = None,
        vault: VaultDesk | None = None,
        landlocked: bool | None = None,
        view: bool = True,
    ) -> None:
        """``landlocked``: whether Landlock keeps jobs from the FIFOs of read grants; default as this host is.

        Without ``egress`` no job gets net grants. ``view``: jobs have a file tree of their own, in which files below a
        write grant can be made read-only.
        """
        self._egress = egress
        self._vault = vault
        self._openers = Openers(protected)
        self._uids = uids
        self._idmaps = idmaps
        self._landlocked = landlock.abi() > 0 if landlocked is None else landlocked
        self._view = view
        self._live: list[Looked] = []

    async def open(self, spec: JobSpec, attempt: int = 1, net: Sequence[str] = (), signer: str = "") -> Staged:
        """Return what the attempt needs. Raises StageError with nothing left open.

        ``net``: the network destinations that the policy rule lists which allowed the job. ``signer``: the id of the
        key that signed it.
        """
        staged = Staged(os.geteuid(), os.getegid())
        try:
            if spec.needs_broker and self._vault is not None:
                staged.line = await self._vault.line(spec, attempt, signer)
            if spec.grants.reach:
                staged.connect = await self._net(spec, attempt, net, staged)
            if self._uids is not None:
                lease = self._uids.acquire()
                staged._undo.append(lease.release)
                staged.uid = staged.gid = lease.uid
            for grant in spec.grants.paths:
                mount, fd = await self._mount(grant, staged, spec.grants.paths)
                staged.mounts += (mount,)
                staged.fds += (fd,)
        except GrantRefused as error:
            staged.close()
            reason = RefuseReason.POLICY if error.reason == "policy" else RefuseReason.UNENFORCEABLE
            raise StageError(reason, str(error)) from None
        except EgressError as error:
            staged.close()
            raise StageError(error.reason, str(error)) from None
        except SecretsError as error:
            staged.close()
            raise StageError(error.reason, str(error)) from None
        except UidsUnavailable as error:
            staged.close()
            raise StageError(RefuseReason.UNENFORCEABLE, str(error)) from None
        except BaseException:
            staged.close()
            raise
        return staged

    async def planted(self, staged: Staged) -> list[str]:
        """Return what the operator's tools may run by now, of what an attempt added, changed or removed (attack 8).

        Call it after the proof and before the attempt's ``close``.
        """
        found: list[str] = []
        for looked in staged.looked:
            found += [f"{looked.opened.path}/{path}" for path in await self._openers.changed(looked)]
        return found

    async def close(self) -> None:
        """End the processes that open paths. Idempotent."""
        await self._openers.close()

    async def _net(
        self, spec: JobSpec, number: int, listed: Sequence[str], staged: Staged
    ) -> Callable[[Attempt], Awaitable[Door]]:
        egress = self._egress
        if egress is None:
            raise EgressMissingError("this node was started without an egress process, so no job gets HOST:PORT")
        rules = await egress.check(spec.grants.net, listed, spec.grants.keyed, routes_of(spec.grants))
        name = ids.attempt_name(spec.id, number)
        keys = KeyLine(staged.line.proxy) if rules.keyed and staged.line is not None else None
        if keys is not None:
            staged.authority = keys.authority.pem

        async def connect(attempt: Attempt) -> Door:
            return await egress.open(name, rules, *await attempt.door(), keys)

        return connect

    async def _mount(self, grant: PathGrant, staged: Staged, grants: Sequence[PathGrant]) -> tuple[Mount, int]:
        code = grant.mode == "write" and not grant.all
        quiet = grant.mode == "read" and not (self._landlocked and not _below_writable(grant, grants))
        looked = await self._openers.open(grant.path, grant.mode, code=code, quiet=quiet)
        opened = looked.opened
        watched = code and opened.kind == "dir"
        if watched:
            self._watch(looked, staged)
        try:
            kept = tuple(looked.kept) if code else ()
            if kept and not self._view:
                message = f"{grant.path} holds {kept[0]}, which can't be kept read-only without a view"
                raise GrantRefused("unenforceable", f"{message}; grant {grant.path}:all, or use a node of level A or B")
            mount = Mount(grant.path, grant.mode, opened.kind, kept, tuple(looked.kept[name] for name in kept))
            return mount, await self._descriptor(opened, grant, staged.uid)
        finally:
            if not watched:
                opened.close()

    def _watch(self, looked: Looked, staged: Staged) -> None:
        """Keep the grant open and its marks known until the attempt is over."""
        for other in self._live:
            looked.marks = plants.older(looked.opened.path, looked.marks, other.opened.path, other.marks)
        self._live.append(looked)
        staged.looked += (looked,)

        def forget() -> None:
            self._live.remove(looked)
            looked.opened.close()

        staged._undo.append(forget)

    async def _descriptor(self, opened: Opened, grant: PathGrant, uid: int) -> int:
        """Level A: a detached, id-mapped mount. Level B: the checked descriptor itself."""
        if self._idmaps is None:
            return os.dup(opened.fd)
        idmap = None
        if (opened.owner_uid, opened.owner_gid) != (uid, uid):
            idmap = await self._idmaps.get((opened.owner_uid, opened.owner_gid, uid, uid))
        return clone_mount(opened, grant.mode, idmap, job_uid=uid)


def told(paths: Sequence[str]) -> dict[str, str | int | float | bool]:
    """Return the detail of the event that names ``paths``: the first ones, and how many there are."""
    return {"count": len(paths), "paths": ", ".join(paths)[:MOST_TOLD_CHARACTERS]}


def _below_writable(grant: PathGrant, grants: Sequence[PathGrant]) -> bool:
    """Whether the job may write to what is around this grant: Landlock's rules hold for everything below a path."""
    around = [*OWN_PLACES, *(other.path for other in grants if other.mode == "write")]
    return any(grant.path == place or grant.path.startswith(f"{place}/") for place in around)
