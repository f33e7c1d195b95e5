"""A granted path that never answers (FUSE, NFS): the grant is refused, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from node_agent.containment.errors import GrantRefused
from node_agent.containment.openers import MOST_BUSY, MOST_STUCK, Looked, Openers
from node_agent.containment.paths import Protected, clone_mount
from tests.support import silent
from tests.support.wait import await_until

NOTHING = Protected.collect()
DEADLINE_S = 0.5
#: Stands in for an opener that waits in the kernel, for users who can mount nothing: it starts, and never answers.
DUMB = "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); end.recv(1 << 17); end.send(b'{}')"
DUMB += "; __import__('time').sleep(30)"


def with_openers(openers: Openers, scenario: Callable[[Openers], Awaitable[None]]) -> None:
    """Run a scenario, and close the openers after it."""

    async def main() -> None:
        try:
            await scenario(openers)
        finally:
            await openers.close()

    asyncio.run(main())


async def lag_of(work: Awaitable[object]) -> float:
    """Return for how long the loop stood still at most while ``work`` went on, in seconds."""
    loop = asyncio.get_running_loop()
    late, over = [0.0], False

    def tick(due_s: float) -> None:
        late.append(loop.time() - due_s)
        if not over:
            loop.call_later(0.01, tick, loop.time() + 0.01)

    tick(loop.time())
    try:
        await work
    finally:
        over = True
    return max(late)


async def refused(openers: Openers, path: Path) -> str:
    """Ask for a grant that must be refused as unenforceable; return why."""
    with pytest.raises(GrantRefused) as caught:
        await openers.open(str(path), "read")
    assert caught.value.reason == "unenforceable"
    return str(caught.value)


@silent.needed
def test_a_path_that_never_answers_is_refused_in_time(home: Path) -> None:
    """While one grant hangs, the loop runs and other grants open; it is refused, and its opener can die afterwards."""
    hung, well = home / "hung", home / "well"
    hung.mkdir()
    well.mkdir()

    async def scenario(openers: Openers) -> None:
        async def both() -> None:
            waiting = asyncio.ensure_future(refused(openers, hung))
            await await_until(lambda: 3 in server.asked, "the opener to ask the silent file system")
            looked = await openers.open(str(well), "read")
            looked.opened.close()
            assert not waiting.done(), "the other grant did not wait for this one"
            assert f"did not answer within {DEADLINE_S:g} s" in await waiting

        # This loop itself would stand still for ever, if it touched the path.
        assert await lag_of(both()) < DEADLINE_S
        stuck = openers._stuck[0]
        assert stuck.poll() is None, "SIGKILL does not end it: it waits in the kernel"

    with silent.silent(hung) as server:
        openers = Openers(NOTHING, deadline_s=DEADLINE_S)
        with_openers(openers, scenario)
    stuck = openers._stuck[0]
    assert stuck.wait(5) == -9


@silent.needed
def test_a_grant_that_falls_silent_is_cloned_and_closed_without_waiting(home: Path) -> None:
    """Once it is open, the agent's own calls on it ask the file system for nothing."""

    async def scenario(openers: Openers) -> None:
        looked = await openers.open(str(home), "read")
        before = len(server.asked)
        os.close(clone_mount(looked.opened, "read", None))
        os.close(os.dup(looked.opened.fd))
        looked.opened.close()
        assert server.asked[before:] == []

    with silent.silent(home, answering=20) as server:
        with_openers(Openers(NOTHING, deadline_s=DEADLINE_S), scenario)


def test_openers_that_do_not_answer_are_given_up() -> None:
    """Simulated, where nothing can be mounted: each is refused in time, and there is an end to their number."""
    openers = Openers(NOTHING, deadline_s=0.1, words=("-c", DUMB))

    async def scenario(openers: Openers) -> None:
        path = Path("/usr")
        said = await asyncio.gather(*(refused(openers, path) for _ in range(MOST_BUSY)))
        assert all("did not answer within 0.1 s" in each for each in said)
        looked = Looked((await _real(path)).opened, marks={"a": "b"})
        assert await openers.changed(looked) == ["(not compared: no answer in time)"]
        looked.opened.close()
        stand_ins = [process for process in openers._stuck if process.poll() is None]
        openers._stuck = [_Undead()] * MOST_STUCK  # type: ignore[list-item] # as many that SIGKILL does not end
        assert f"{MOST_STUCK} other paths of this node do not answer" in await refused(openers, path)
        openers._stuck = stand_ins

    with_openers(openers, scenario)


class _Undead:
    """A process that waits in the kernel."""

    def poll(self) -> None:
        """It still lives."""


async def _real(path: Path) -> Looked:
    openers = Openers(NOTHING)
    try:
        return await openers.open(str(path), "read")
    finally:
        await openers.close()


def test_a_dead_opener_is_replaced(home: Path) -> None:
    """An opener that ended while it was idle costs nobody a grant."""

    async def scenario(openers: Openers) -> None:
        (await openers.open(str(home), "read")).opened.close()
        process = openers._idle[0].process
        process.kill()
        await await_until(lambda: process.poll() is not None, "the opener's end")
        (await openers.open(str(home), "read")).opened.close()
        assert openers._idle[0].process is not process

    with_openers(Openers(NOTHING), scenario)


def test_what_is_refused_is_told_as_before(home: Path) -> None:
    """Over the process border reason and text of a refusal stay what they are."""
    (home / "link").symlink_to(home)
    protected = Protected.collect(private=[home / "keys"])

    async def scenario(openers: Openers) -> None:
        for path, reason, text in (
            (home / "link", "policy", "has a symlink in it"),
            (home / "none", "unenforceable", "No such file"),
            (home, "policy", f"equals, contains or lies in {home}/keys"),
            (Path("/proc"), "policy", "never granted"),
        ):
            with pytest.raises(GrantRefused, match=text) as caught:
                await openers.open(str(path), "write")
            assert caught.value.reason == reason

    with_openers(Openers(protected), scenario)
