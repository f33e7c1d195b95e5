"""The store's index into a tree that is in use: what is open stays as it was opened, the rest is the store's. Pure.

Called by kept volumes. Must never change a file that a descriptor is open on: what it writes is judged by the version
that it was opened at.
"""

from __future__ import annotations

from node_agent.kernel.vfs.index import Entry, Index
from node_agent.kernel.vfs.nodes import Directory, File
from node_agent.kernel.vfs.paths import Parts
from node_agent.kernel.vfs.tree import Tree

__all__ = ["merge"]


def merge(tree: Tree, index: Index) -> None:
    """Make the tree what the index says. Open files that it does not have any more lose their name."""
    linked = {file.path: file for file in tree.open if file.linked}
    loose = [file for file in tree.open if not file.linked]
    tree.renew()
    for path in sorted(index.entries, key=len):
        if _place(tree, path, index.entries[path], linked.get(path)):
            del linked[path]
    for path, file in linked.items():
        parent = _directory(tree, path[:-1])
        if file.version == 0 and parent is not None and path[-1] not in parent.children:
            # Not published yet: the store can't know it.
            tree.adopt(file, parent)
        else:
            file.linked, file.lost = False, True
            loose.append(file)
    for file in loose:
        tree.used_bytes += file.size
        tree.held_bytes += file.held


def _place(tree: Tree, path: Parts, entry: Entry, known: File | None) -> bool:
    """Put one entry into the tree; return whether ``known`` has its place again."""
    parent = _directory(tree, path[:-1])
    if parent is None or path[-1] in parent.children:
        return False
    if entry.directory:
        made = tree.make_directory(parent, path[-1], entry.owner)
        made.version, made.modified_ms = entry.version, entry.modified_ms
        return False
    if known is not None:
        known.outdated = known.outdated or known.version != entry.version
        tree.adopt(known, parent)
        return True
    file = tree.make_file(parent, path[-1], entry.owner, None)
    with tree.counted(file):
        file.size = entry.size
    file.version, file.modified_ms = entry.version, entry.modified_ms
    tree.ends(file, entry.ends_in_ms / 1000 if entry.ends_in_ms else None)
    return False


def _directory(tree: Tree, path: Parts) -> Directory | None:
    node: Directory = tree.root
    for part in path:
        child = node.children.get(part)
        if not isinstance(child, Directory):
            return None
        node = child
    return node
