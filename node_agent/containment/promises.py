"""What a node keeps at its level, promise by promise: one list for `doctor`, the node record, admission and the docs.

Called by host.py (a report's own list) and the docs' table. Pure. Must never call a promise kept that the level's tests
(tests/ladder) do not show, nor one that depends on what this host was not seen to have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Facts", "Promise", "promises"]

VIEW: Final = ("A", "B")
_GROUP_FIX: Final = "a writable cgroup with this controller"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a host. ``totals``: of pids, memory, cpu by cgroup; ``own_uid``: jobs have one each."""

    level: str
    own_uid: bool = False
    totals: frozenset[str] = frozenset()
    freeze: bool = False
    landlock_abi: int = 0

    @property
    def view(self) -> bool:
        """Whether jobs have namespaces and a file tree of their own."""
        return self.level in VIEW


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise. ``how``: what keeps it, or why it is not kept. ``asked``: a job that asks for it is then refused."""

    name: str
    kept: bool
    how: str
    asked: bool = False


def promises(facts: Facts) -> tuple[Promise, ...]:
    """Return every promise for a host with these facts; none is kept without a level."""
    if facts.level not in ("A", "B", "C", "D", "E", "F"):
        return tuple(Promise(name, False, "no job runs on this host", asked) for name, (_, asked) in _LIST.items())
    return tuple(Promise(name, *decide(facts), asked) for name, (decide, asked) in _LIST.items())


_Decision = tuple[bool, str]


def _kill(facts: Facts) -> _Decision:
    return {
        "A": (True, "pid namespace, and cgroup.kill where there is one"),
        "B": (True, "pid namespace"),
        "C": (True, "cgroup.kill until the group is empty"),
        "D": (True, "kill(-1) as the job's own uid until no task has it"),
        "E": (False, "best effort: every descendant is killed, without a bound against a fork bomb"),
        "F": (False, "best effort as at E, and the job could stop its mould first"),
    }[facts.level]


def _hidden(facts: Facts) -> _Decision:
    return (True, "own pid namespace and /proc") if facts.view else (False, "the host's processes can be listed")


def _apart(facts: Facts) -> _Decision:
    if facts.view:
        return True, "pid namespace, Landlock where there is one"
    if facts.own_uid:
        return True, "a uid of its own"
    if facts.level != "F" and facts.landlock_abi >= 6:
        return True, "Landlock keeps signals and ptrace inside"
    return False, "agent and jobs share a uid, and nothing keeps them apart"


def _files(facts: Facts) -> _Decision:
    if facts.view:
        return True, "a file tree of its own"
    if facts.landlock_abi:
        return True, f"Landlock {facts.landlock_abi} (names, modes and times of files stay visible)"
    return False, "only the permissions of files: there is no view and no Landlock"


def _net_none(facts: Facts) -> _Decision:
    return True, "an empty network namespace" if facts.view else "no socket can be made (seccomp)"


def _net_to(facts: Facts) -> _Decision:
    return (True, "the mould's listener and the egress process") if facts.view else (False, "needs a network namespace")


def _paths(facts: Facts, *, write: bool) -> _Decision:
    if facts.view:
        return True, "mounts"
    if facts.own_uid:
        return False, "without id maps the job's own uid would not have the owner's rights"
    if facts.level == "F" or not facts.landlock_abi:
        return False, "needs a view or Landlock"
    return True, "Landlock; only as PATH:all where it holds files that stay read-only" if write else "Landlock"


def _secrets(facts: Facts) -> _Decision:
    if facts.view:
        return True, "a channel of the job's own; the broker asks the kernel who speaks on it"
    return False, "the broker can't tell a job from others without a pid namespace"


def _service(facts: Facts) -> _Decision:
    if facts.view:
        return True, "the mould's listener and the broker"
    return False, "needs a network namespace"


def _by_group(facts: Facts, name: str) -> _Decision:
    if name in facts.totals and facts.level in ("A", "B", "C"):
        return True, "cgroup"
    return False, f"needs {_GROUP_FIX}"


def _pids(facts: Facts) -> _Decision:
    by_group = _by_group(facts, "pids")
    if by_group[0]:
        return by_group
    if facts.level == "B":
        return True, "RLIMIT_NPROC in the job's own user namespace"
    if facts.own_uid and not facts.view:
        return True, "RLIMIT_NPROC of the job's own uid"
    return False, "needs a cgroup, a user namespace or a uid of the job's own"


def _disk(facts: Facts) -> _Decision:
    return (True, "a tmpfs of that size") if facts.view else (False, "the workspace is a plain folder")


def _no_exec(facts: Facts) -> _Decision:
    if facts.view:
        return True, "noexec mounts, and no files in memory (seccomp)"
    return False, "there is no view whose mounts could be noexec"


def _unix(facts: Facts) -> _Decision:
    if facts.view:
        return True, "the job's own view and net namespace (policy: unix = true)"
    return False, "without a view every socket of the host could be reached"


def _reuse(facts: Facts) -> _Decision:
    if facts.view and facts.level in ("A", "B"):
        return True, "one job after the other, alone in one worker (seccomp); memory and modules stay"
    return False, "a worker without a sandbox of its own serves one job; leave reuse out"


def _pause(facts: Facts) -> _Decision:
    if facts.freeze and facts.level in ("A", "B", "C"):
        return True, "cgroup.freeze"
    return True, "SIGSTOP to all of it, again until nothing runs"


def _share(facts: Facts) -> _Decision:
    if _by_group(facts, "cpu")[0]:
        return True, "a tenth of the default cpu weight"
    return False, "no cpu controller: jobs get nice 19 and at most 128 processes"


def _quotas(facts: Facts) -> _Decision:
    if facts.level == "B":
        return True, "limits of the job's user namespace (inotify, namespaces)"
    if facts.own_uid:
        return True, "a uid of its own"
    return False, "the kernel's limits per user are shared with the agent"


def _clean(facts: Facts) -> _Decision:
    if facts.view:
        return True, "every place that it can write is its own, and ends with it"
    if facts.landlock_abi:
        return True, "only its workspace can be written, no ipc object can be made; the workspace is removed"
    return False, "folders that everybody may write (/tmp, /dev/shm) keep what it leaves there"


def _always(how: str) -> Callable[[Facts], _Decision]:
    return lambda _: (True, how)


#: Name → (decision, whether a job can ask for it).
_LIST: Final[dict[str, tuple[Callable[[Facts], _Decision], bool]]] = {
    "kill is certain": (_kill, False),
    "ends with its agent": (_always("the mould's lifeline and deadline"), False),
    "apart from agent and neighbours": (_apart, False),
    "host processes hidden": (_hidden, False),
    "files": (_files, False),
    "read": (lambda facts: _paths(facts, write=False), True),
    "write": (lambda facts: _paths(facts, write=True), True),
    "net none": (_net_none, True),
    "net HOST:PORT": (_net_to, True),
    "secrets": (_secrets, True),
    "memory": (lambda facts: _by_group(facts, "memory"), True),
    "cpu": (lambda facts: _by_group(facts, "cpu"), True),
    "pids": (_pids, True),
    "disk": (_disk, True),
    "no exec": (_no_exec, True),
    "service": (_service, True),
    "unix": (_unix, True),
    "reuse": (_reuse, True),
    "files, wall, output, result": (_always("rlimit and the agent"), False),
    "fair share of the cpu": (_share, False),
    "user quotas": (_quotas, False),
    "pause": (_pause, False),
    "no new rights": (_always("no capability, no_new_privs, seccomp, closed descriptors, empty environment"), False),
    "nothing left behind": (_clean, False),
}
