"""The volumes of one attempt and where they are: paths are matched by component, and what was not granted is refused.

Made by the files part at an attempt's first call about files. Must never give a volume that the job's signed grants do
not name, nor one of another tenant.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs import content
from node_agent.kernel.vfs.index import Store, Where
from node_agent.kernel.vfs.nodes import Bounds
from node_agent.kernel.vfs.paths import Parts, shown, split
from node_agent.kernel.vfs.tree import Tree
from node_agent.kernel.vfs.volume import Kept, Volume
from runner.wire import codec, ids, record
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import GrammarError
from runner.wire.keys import Keys

__all__ = ["MEMORY", "ROOTS", "Mounts", "Place", "Shown", "normal"]

#: Every mount there can be.
ROOTS: Final[tuple[Parts, ...]] = (
    ("mem", "working"),
    ("mem", "episodic"),
    ("mem", "semantic"),
    ("mem", "procedural"),
    ("state",),
    ("tools",),
    ("policy",),
    ("ipc",),
)
_ABOVE: Final[tuple[Parts, ...]] = ((), ("mem",))
_NAMED: Final = ("episodic", "semantic", "procedural")
_FILE_BYTES: Final = 1 << 20
_HELD_BYTES: Final = 4 << 20
_ENTRIES: Final = 256
#: Of an attempt's own memory, and of all that one agent's name remembers.
WORKING: Final = Bounds(4 << 20, _FILE_BYTES, _ENTRIES, 4 << 20)
MEMORY: Final = Bounds(16 << 20, _FILE_BYTES, _ENTRIES, _HELD_BYTES)
#: An agent's memory ends so long after its last change, in seconds; a job's state no sooner than this.
MEMORY_TTL_S: Final = 90 * 86_400
STATE_TTL_S: Final = 7 * 86_400

#: What is shown below a read-only mount: name → document.
Shown = Callable[[Caller], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads. ``volume`` None: a directory above the mounts; ``inner``: the path inside the volume."""

    path: Parts
    volume: Volume | None
    inner: Parts = ()

    def mounted(self) -> Volume:
        """Return the volume. Raises CallError: the path is above the mounts."""
        if self.volume is None:
            raise CallError(ErrorCode.IS_A_DIRECTORY, f"{shown(self.path)} only holds mounts")
        return self.volume


class Mounts:
    """The volumes of one attempt. ``now_ms``: Unix time, for people and for the life of what is kept."""

    def __init__(
        self,
        caller: Caller,
        store: Store,
        keys: Keys,
        shown_at: Mapping[str, Shown],
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._clock, self._now_ms = clock, now_ms
        grants = caller.spec.grants
        working = Tree(WORKING, clock, now_ms)
        self._at: dict[Parts, tuple[Volume, Parts]] = {("mem", "working"): (Volume(working, caller.job), ())}
        self._missing: dict[Parts, str] = {}
        if grants.state_bytes is not None:
            self._at[("state",)] = (self._state(caller, store, keys, grants.state_bytes), ())
        else:
            self._missing[("state",)] = "a /state (--state SIZE)"
        memory = self._memory(caller, store, keys, grants.agent)
        for name in _NAMED:
            if memory is not None:
                self._at[("mem", name)] = (memory, (name,))
            else:
                self._missing[("mem", name)] = "an agent's memory (--agent NAME)"
        for name, documents in shown_at.items():
            self._at[(name,)] = (self._showing(documents(caller)), ())

    def place(self, path: str) -> Place:
        """Return where a path leads. Raises CallError: no such mount, or it was not granted."""
        parts = split(path, ROOTS)
        for root in (parts[:2], parts[:1]):
            if root in self._missing:
                raise CallError(ErrorCode.DENIED, f"this job was not granted {self._missing[root]}")
            if root in self._at:
                volume, base = self._at[root]
                return Place(parts, volume, (*base, *parts[len(root) :]))
        if parts in _ABOVE:
            return Place(parts, None)
        raise CallError(ErrorCode.NOT_FOUND, f"there is no {shown(parts)}")

    def below(self, parts: Parts) -> list[str]:
        """Return the names in a directory above the mounts, sorted."""
        return sorted({root[len(parts)] for root in self._at if root[: len(parts)] == parts})

    def _state(self, caller: Caller, store: Store, keys: Keys, state_bytes: int) -> Kept:
        spec = caller.spec
        bounds = Bounds(state_bytes, min(_FILE_BYTES, state_bytes), _ENTRIES, _HELD_BYTES)
        # The next attempt starts before not_after, and lasts at most its own time.
        left_s = max(0, spec.not_after_ms - self._now_ms()) // 1000
        life_s = max(STATE_TTL_S, left_s + math.ceil(spec.limits.timeout_s or 0))
        where = Where(
            *(keys.state(spec.id), keys.state_data(spec.id), caller.job, life_s, bounds), fence=caller.run.attempt
        )
        tree = Tree(bounds, self._clock, self._now_ms, kept=True)
        return Kept(tree, caller.job, store, where, self._clock, shared=False)

    def _memory(self, caller: Caller, store: Store, keys: Keys, agent: str | None) -> Kept | None:
        if agent is None:
            return None
        try:
            ids.check_name(agent, "agent's name")
        except GrammarError as error:
            raise CallError(ErrorCode.DENIED, str(error)) from None
        names = (keys.memory(caller.tenant, agent), keys.memory_data(caller.tenant, agent))
        where = Where(*names, caller.job, MEMORY_TTL_S, MEMORY, depth=1)
        tree = Tree(MEMORY, self._clock, self._now_ms, fixed=_NAMED, kept=True)
        return Kept(tree, caller.job, store, where, self._clock, shared=True)

    def _showing(self, documents: Mapping[str, Json]) -> Volume:
        # The node's own words, bounded by what was signed and by its policy: a bound here could only hide some of them.
        tree = Tree(Bounds(1 << 30, 1 << 30, 1 << 20, 1 << 30), self._clock, self._now_ms)
        for name in sorted(documents):
            if (name.startswith(".") and not name.strip(".")) or "/" in name:
                continue
            file = tree.make_file(tree.root, name, "", bytearray())
            content.put(tree, file, codec.dump(documents[name]) + b"\n")
        return Volume(tree, "", writable=False)


def normal(path: str) -> str:
    """Return the path as policy judges it; empty for one that the handler will refuse."""
    try:
        return shown(split(path, ROOTS))
    except CallError:
        return ""


def policy_of(caller: Caller) -> Mapping[str, Json]:
    """Return what this job may do, for /policy: its own signed words, no value of a secret is among them."""
    spec = caller.spec
    found: dict[str, object] = {"grants.json": record.encode(spec.grants), "limits.json": record.encode(spec.limits)}
    if spec.budget is not None:
        found["budget.json"] = record.encode(spec.budget)
    return found  # type: ignore[return-value] # encode gives plain JSON


def ipc_of(caller: Caller) -> Mapping[str, Json]:
    """Return the mailboxes and topics that this job may use, for /ipc."""
    return {box.name: {"name": box.name, "mode": box.mode} for box in caller.spec.grants.mail}
