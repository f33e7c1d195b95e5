"""What an attempt gets from the host before it exists: its opened grants and its uid.

Called by the supervisor after admission; gives everything back after the proof. Must never pass on a path that was not
opened and checked once, and never give a job another running job's uid.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from node_agent.containment.errors import GrantRefused, UidsUnavailable
from node_agent.containment.idmap import Idmaps
from node_agent.containment.paths import Opened, Protected, clone_mount, open_grant, protected_names
from node_agent.containment.plan import Mount
from node_agent.containment.uids import JobUids
from node_agent.errors import NodeError
from runner.wire.grants import PathGrant
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason

__all__ = ["Stage", "StageError", "Staged"]


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
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def sent(self) -> None:
        """The worker holds its own copies now."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = ()

    def close(self) -> None:
        """Close what is still open and free the uid. Only after the proof."""
        self.sent()
        while self._undo:
            self._undo.pop()()


class Stage:
    """Opens grants for one node. ``uids`` and ``idmaps`` are None at level B, where jobs run as the agent's own uid."""

    def __init__(self, protected: Protected, uids: JobUids | None, idmaps: Idmaps | None) -> None:
        self._protected = protected
        self._uids = uids
        self._idmaps = idmaps

    async def open(self, spec: JobSpec) -> Staged:
        """Return what the attempt needs. Raises StageError with nothing left open."""
        staged = Staged(os.geteuid(), os.getegid())
        try:
            if self._uids is not None:
                lease = self._uids.acquire()
                staged._undo.append(lease.release)
                staged.uid = staged.gid = lease.uid
            for grant in spec.grants.paths:
                mount, fd = await self._mount(grant, staged.uid)
                staged.mounts += (mount,)
                staged.fds += (fd,)
        except GrantRefused as error:
            staged.close()
            reason = RefuseReason.POLICY if error.reason == "policy" else RefuseReason.UNENFORCEABLE
            raise StageError(reason, str(error)) from None
        except UidsUnavailable as error:
            staged.close()
            raise StageError(RefuseReason.UNENFORCEABLE, str(error)) from None
        except BaseException:
            staged.close()
            raise
        return staged

    async def _mount(self, grant: PathGrant, uid: int) -> tuple[Mount, int]:
        opened = open_grant(grant.path, grant.mode, protected=self._protected)
        try:
            kept = protected_names(opened) if grant.mode == "write" and not grant.all else ()
            mount = Mount(grant.path, grant.mode, opened.kind, kept)
            return mount, await self._descriptor(opened, grant, uid)
        finally:
            opened.close()

    async def _descriptor(self, opened: Opened, grant: PathGrant, uid: int) -> int:
        """Level A: a detached, id-mapped mount. Level B: the checked descriptor itself."""
        if self._idmaps is None:
            return os.dup(opened.fd)
        idmap = None
        if (opened.owner_uid, opened.owner_gid) != (uid, uid):
            idmap = await self._idmaps.get((opened.owner_uid, opened.owner_gid, uid, uid))
        return clone_mount(opened, grant.mode, idmap, job_uid=uid)
