"""No worker finds in its memory what belonged to an earlier job of its mould (attack 5).

The zygote and the mould never see a payload: the worker reads it from its own channel, after the restrictions.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from tests.containment.rig import TASKS, Rig, in_rig

JOBS = 50
FIRST = secrets.token_hex(8)


class Words:
    """Words that start alike, and the second halves of those that are given away already."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def new(self) -> str:
        """Return a word that no job has seen."""
        self.given.append(secrets.token_hex(8))
        return FIRST + self.given[-1]


def test_attack_05_fifty_jobs_leave_no_word(node_name: str) -> None:
    """Arguments, environment values and argv of 50 jobs: each later worker greps its writable memory, 0 hits."""

    async def scenario(rig: Rig) -> None:
        words = Words()
        await rig.run(["true"])
        mould = rig.slot.mould_pid
        for number in range(JOBS):
            if number % 2:
                await rig.run(["true", words.new()], env={"VALUE": words.new()})
                continue
            earlier = list(words.given)
            word, value = words.new(), words.new()
            own = words.given[-2:-1]
            seen = await rig.run(task="left_tasks:carry", args=[word, FIRST, earlier, own], env={"VALUE": value})
            assert isinstance(seen.result, dict), seen
            found, mine = seen.result["ok"]
            assert mine > 0, "the search is blind to the job's own argument"
            assert found == 0, f"payload by channel: {found} words of {number} earlier jobs are in this worker's memory"
        assert rig.slot.mould_pid == mould, "the later workers came from another mould"

    in_rig(node_name, scenario)


def test_attack_05_what_the_zygote_is_told_would_be_found(node_name: str, home: Path) -> None:
    """Counter-check: a word in a path that goes through the zygote and the mould is found by every later worker."""

    async def scenario(rig: Rig) -> None:
        words = Words()
        told = home / words.new()
        told.mkdir()
        own = [secrets.token_hex(8)]
        paths = (sys.base_prefix, sys.prefix, str(told), TASKS)
        await rig.run(["true"], python_paths=paths)
        seen = await rig.run(task="left_tasks:carry", args=[FIRST + own[0], FIRST, words.given, own])
        assert isinstance(seen.result, dict), seen
        assert seen.result["ok"][0] > 0

    in_rig(node_name, scenario)
