"""What a volume consists of: files and directories with their place, size, version, owner and end. State only.

Made and changed by tree.py alone; the volumes read them. Must never hold a path of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from node_agent.kernel.vfs.paths import Parts

__all__ = ["ENTRY_BYTES", "Bounds", "Directory", "File", "Node"]

#: What one entry counts besides its bytes, so that empty files are bounded, too.
ENTRY_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a volume may hold. ``total_bytes``: of all files, ENTRY_BYTES for each entry; ``held_bytes``: in memory."""

    total_bytes: int
    file_bytes: int
    entries: int
    held_bytes: int


@dataclass(slots=True, eq=False)
class Directory:
    """A directory. ``version``: of the store's index, 0 where it is not kept there."""

    name: str
    parent: Directory | None
    owner: str
    modified_ms: int
    version: int = 0
    fixed: bool = False
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def path(self) -> Parts:
        """Where it is now."""
        return _path(self)


@dataclass(slots=True, eq=False)
class File:
    """A file; open descriptors share it, so that it outlives its name.

    ``content``: None where only the store has it. ``version``: of what the store has, 0: it has nothing of it.
    ``rewritten``: the content differs from the store's otherwise than by ``tail``, what was appended. ``changes``
    grows with each change. ``linked``: it has a name still; ``lost``: somebody else took it away; ``outdated``:
    somebody else changed it since it was opened. ``token``, ``sent``: of a publication whose answer is not known, and
    how much of the tail it held. ``expires_s``: by the tree's clock.
    """

    name: str
    parent: Directory
    owner: str
    modified_ms: int
    content: bytearray | None
    size: int = 0
    version: int = 0
    expires_s: float | None = None
    opens: int = 0
    linked: bool = True
    lost: bool = False
    outdated: bool = False
    rewritten: bool = False
    tail: bytearray = field(default_factory=bytearray)
    changes: int = 0
    token: str = ""
    sent: int = 0

    @property
    def dirty(self) -> bool:
        """Whether the store does not have what this file holds."""
        return self.rewritten or bool(self.tail)

    @property
    def held(self) -> int:
        """The bytes that it takes in memory."""
        return len(self.tail) + (len(self.content) if self.content is not None else 0)

    @property
    def path(self) -> Parts:
        """Where it is now, or was when it lost its name."""
        return _path(self)


Node: TypeAlias = File | Directory


def _path(node: Node) -> Parts:
    found: list[str] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        found.append(at.name)
        at = at.parent
    return tuple(reversed(found))
