"""Who goes first when memory runs out: the job, not its mould, and neither after the host's own processes.

Called by the moulds of all levels. Must never leave a worker with the score that protects its mould: a worker is born
with the score that its mould has at that moment, so the mould has theirs while it forks.

Source: proc_pid_oom_score_adj(5).
"""

from __future__ import annotations

import errno
import os
from typing import Final

from node_agent.containment.script import Table, row

__all__ = ["OOM_SCORE_ADJ", "Lent", "at_least"]

OOM_SCORE_ADJ: Final = 500
_PATH: Final = "/proc/self/oom_score_adj"
_SAFE: Final = b"0"


def at_least(score: int) -> int:
    """Raise this process's score, which needs no right, if it is lower; return what it is."""
    with open(_PATH, encoding="ascii") as file:
        found = int(file.read())
    if found < score:
        with open(_PATH, "w", encoding="ascii") as file:
            file.write(str(score))
    return max(found, score)


class Lent:
    """A mould that is safe, but while it forks."""

    def __init__(self, score: int) -> None:
        """Be safe; ``score``: of the workers. With cgroup v1 they share this process's memory limit."""
        fd = os.open(_PATH, os.O_WRONLY | os.O_CLOEXEC)
        theirs = b"%d" % score
        self._lend = Table([row("mould", "pwrite64", fd, theirs, len(theirs), 0, expect=len(theirs))])
        self._end = Table([row("mould", "pwrite64", fd, _SAFE, len(_SAFE), 0, expect=len(_SAFE))])
        self._end.run()

    @classmethod
    def of(cls, score: int) -> Lent | None:
        """Return it, or None where this process may not lower its score: then the mould goes with its job."""
        try:
            return cls(score)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            return None

    def begin(self) -> None:
        """Have the workers' score. Raises OSError."""
        self._lend.run()

    def end(self) -> None:
        """Be safe again. Raises OSError."""
        self._end.run()
