"""A zygote, a slot and its groups for one test, and short ways to run jobs in them. Called by the containment tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from node_agent.containment import linux
from node_agent.containment.cgroup import NodeGroups, SlotGroup
from node_agent.containment.plan import Mount, Plan, Profile, Verdict
from node_agent.containment.slots import Attempt, Slot, Zygote
from runner.wire import codec
from tests.support.wait import await_until

__all__ = ["LEVEL", "PROFILE", "Outcome", "Rig", "granted", "in_rig", "marked", "python"]

LEVEL: Literal["A", "B"] = "A" if os.geteuid() == 0 else "B"
PROFILE = Profile("main", "key-1")
TASKS = str(Path(__file__).parent / "jobs")
FIRST_UID = 1_900_000_500
#: Reads of 64 KiB that empty any pipe: none is larger than 1 MiB for an ordinary user.
MOST_READS = 16

T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did."""

    verdict: Verdict
    out: bytes
    err: bytes
    result: object = None


def python(code: str) -> list[str]:
    """Return the command that runs ``code`` in the interpreter of this environment."""
    return [sys.executable, "-I", "-B", "-c", code]


def marked(mark: str) -> list[int]:
    """Return the host's processes that carry ``mark`` in their environment or arguments; zombies carry nothing."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                if mark.encode() in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.append(int(pid))
                    break
            except OSError:
                continue
    return found


@contextmanager
def granted(path: Path, mode: Literal["read", "write"]) -> Iterator[int]:
    """Yield what the node hands to ``begin`` for a grant of ``path``: a detached mount (A) or an O_PATH descriptor."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if LEVEL == "A":
            tree = linux.open_tree("", at=fd)
            os.close(fd)
            fd = tree
            linux.mount_setattr(fd, linux.NOSUID | linux.NODEV | (linux.RDONLY if mode == "read" else 0))
        yield fd
    finally:
        os.close(fd)


class Rig:
    """One slot with everything below it."""

    def __init__(self, zygote: Zygote, slot: Slot, group: SlotGroup | None) -> None:
        self.zygote = zygote
        self.slot = slot
        self.group = group

    def plan(self, **changes: object) -> Plan:
        """Return a plan with a new attempt name and, at level A, a uid of its own."""
        number = next(_numbers)
        uid = FIRST_UID + number % 400 if LEVEL == "A" else os.geteuid()
        gid = uid if LEVEL == "A" else os.getegid()
        plan = Plan(f"main-job.{number}", "command", LEVEL, uid, gid, python_paths=(sys.base_prefix, sys.prefix))
        return replace(plan, **changes)  # type: ignore[arg-type] # each test names real fields

    async def start(
        self,
        argv: Sequence[str] = (),
        *,
        task: str = "",
        args: Sequence[object] = (),
        env: dict[str, str] | None = None,
        mounts: Sequence[tuple[Mount, int]] = (),
        profile: Profile = PROFILE,
        **changes: object,
    ) -> Attempt:
        """Begin and release a job."""
        grants = tuple(mount for mount, _ in mounts)
        plan = self.plan(mounts=grants, kind="task" if task else "command", task_paths=(TASKS,) * bool(task), **changes)
        await self.slot.prepare(profile)
        attempt = await self.slot.begin(plan, [fd for _, fd in mounts])
        what = {"task": task, "args": list(args), "kwargs": {}} if task else {"argv": list(argv)}
        payload = {"env": env or {}, "job": "main-job", "attempt": plan.attempt, "tags": {}, **what}
        await attempt.release(codec.dump(payload))
        return attempt

    async def finish(self, attempt: Attempt, limit: int = 8 << 20) -> Outcome:
        """Read the job's pipes until its verdict, then close everything of it."""
        loop = asyncio.get_running_loop()
        read: dict[int, bytes] = {attempt.stdout: b"", attempt.stderr: b""}

        def take(fd: int) -> bool:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return False
            read[fd] += data
            if not data:
                loop.remove_reader(fd)
            return bool(data)

        for fd in read:
            loop.add_reader(fd, take, fd)
        verdict = await attempt.verdict
        for fd in read:
            loop.remove_reader(fd)
            # What lay in the pipe at the verdict; the worker of a reused attempt may live on and write.
            for _ in range(MOST_READS):
                if not take(fd):
                    break
            os.close(fd)
        result = attempt.result(limit)
        attempt.close()
        await attempt.freed()
        return Outcome(verdict, read[attempt.stdout], read[attempt.stderr], codec.load(result) if result else None)

    async def run(self, argv: Sequence[str] = (), **options: object) -> Outcome:
        """Start a job and wait for its end; the options are those of `start`."""
        return await self.finish(await self.start(argv, **options))  # type: ignore[arg-type] # passed on

    async def running(self, argv: Sequence[str], **options: object) -> tuple[Attempt, str]:
        """Start a job that prints ``up`` when it stands; return it and the mark that its processes carry."""
        mark = f"rfmark{secrets.token_hex(8)}"
        attempt = await self.start(argv, env={"MARK": mark}, **options)  # type: ignore[arg-type] # passed on
        seen = b""

        def look() -> bool:
            nonlocal seen
            try:
                seen += os.read(attempt.stdout, 4096)
            except BlockingIOError:
                return False
            return b"up" in seen

        await await_until(look, "the job to say that it is up")
        return attempt, mark


def in_rig(node: str, scenario: Callable[[Rig], Awaitable[T]], *, limit_s: float = 50) -> T:
    """Run ``scenario`` with a rig of its own on a new event loop, for ``limit_s`` at most."""

    async def main() -> T:
        groups = NodeGroups.open(node)
        zygote = Zygote(level=LEVEL)
        try:
            await zygote.start()
            group = None if groups is None else groups.slot(0)
            slot = Slot(0, zygote, group, paths=(sys.base_prefix, sys.prefix, TASKS))
            try:
                return await asyncio.wait_for(_awaited(scenario(Rig(zygote, slot, group))), limit_s)
            finally:
                await slot.close()
        finally:
            await zygote.stop()
            if groups is not None:
                groups.close()

    return asyncio.run(main())


async def _awaited(thing: Awaitable[T]) -> T:
    return await thing
