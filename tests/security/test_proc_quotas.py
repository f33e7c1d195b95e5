"""A job at level B shares its user's kernel quotas, and can't use them up for that user (attack 39).

Stopped by rlimits of the job's own that are far below the user's: descriptors (attack 34), pending signals.
"""

from __future__ import annotations

import resource

from tests.containment.rig import Rig, in_rig, python
from tests.security.fs_tries import PRELUDE

#: Queues real-time signals to itself, which it does not take, until the kernel refuses; prints how many.
QUEUE = r"""
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
info = struct.pack("iii", signal.SIGRTMIN, 0, -1).ljust(128, b"\0")
count = 0
try:
    while count < 400_000:
        raw(129, 138, os.getpid(), signal.SIGRTMIN, info)
        count += 1
except OSError as error:
    assert error.errno == errno.EAGAIN, error
print(count, flush=True)
"""


def test_attack_39_signals_that_wait_are_few(node_name: str) -> None:
    """However many processes of a job queue signals to themselves, a quarter of their user's quota is the most."""

    async def scenario(rig: Rig) -> None:
        code = f"os.fork(); os.fork()\n{QUEUE}\nos.wait() if os.getpid() < 5 else None"
        seen = await rig.run(python(PRELUDE + code))
        counts = [int(line) for line in seen.out.split()]
        assert len(counts) >= 2, seen
        own = resource.getrlimit(resource.RLIMIT_SIGPENDING)[0]
        assert 0 < max(counts) <= own // 4, f"rlimit: {counts} of {own} signals were queued by one job"

    in_rig(node_name, scenario)
