"""A kill whose proof does not come: said aloud, the slot kept, and taken up again when the proof is there."""

from __future__ import annotations

import asyncio

import pytest

from node_agent.containment.cgroup import GroupEvents
from node_agent.containment.errors import SpawnError
from node_agent.containment.slots import Slot
from tests.containment.rig import PROFILE, Rig, in_rig


class StuckGroup:
    """A group in which something stays alive until ``release``: stands for a process in an uninterruptible wait."""

    join_paths: tuple[str, ...] = ()
    job_fd: int | None = None

    def __init__(self) -> None:
        self.stuck = True

    def release(self) -> None:
        """Let the group become empty."""
        self.stuck = False

    def set_limits(self, **limits: object) -> None:
        """Take any limit."""

    def reset(self) -> None:
        """Count nothing."""

    def calm(self) -> None:
        """Nothing was hurried."""

    def kill(self) -> None:
        """Kill nothing."""

    def count(self) -> int:
        """One process, always."""
        return 1

    def populated(self) -> bool:
        """Whether something is left."""
        return self.stuck

    def events(self) -> GroupEvents:
        """Nothing happened."""
        return GroupEvents()


def test_a_kill_without_proof_is_unconfirmed_and_keeps_the_slot(
    node_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the time for the proof the verdict says so, the slot takes no work, and heals with the late proof."""
    monkeypatch.setattr("node_agent.containment.attempts.PROOF_TIMEOUT_S", 0.3)

    async def scenario(rig: Rig) -> None:
        group = StuckGroup()
        slot = Slot(1, rig.zygote, group)  # type: ignore[arg-type] # the part of a group that a slot uses
        stuck = Rig(rig.zygote, slot, None)
        attempt, _ = await stuck.running(["sh", "-c", "echo up; sleep 30"])
        attempt.kill()
        verdict = (await stuck.finish(attempt)).verdict
        assert (verdict.kind, verdict.proved, slot.healthy) == ("killed", False, False)
        assert verdict.kill_ms >= 300
        with pytest.raises(SpawnError):
            await slot.prepare(PROFILE)
        assert slot.proved is not None
        assert not slot.proved.done()
        group.release()
        await asyncio.wait_for(slot.proved, 5)
        assert slot.healthy
        assert (await stuck.run(["true"])).verdict.code == 0
        await slot.close()

    in_rig(node_name, scenario)
