"""Random jobs that come and go on one tree: a change under any of them is told by the one that is left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.containment import plants

ROOTS = ("/a", "/a/b", "/a/b/c")
FILES = tuple(f"{root}/.envrc" for root in ROOTS)

Step = tuple[str, str, str, int]
#: What happens, to which path, the new text, and which job.
steps = st.lists(
    st.tuples(
        st.sampled_from(("start", "end", "write")),
        st.sampled_from(ROOTS),
        st.sampled_from(("", "old", "new", "evil")),
        st.integers(0, 5),
    ),
    max_size=30,
)


class Tree:
    """Files with one word each, and jobs that hold grants; "" is no file."""

    def __init__(self) -> None:
        self.files = dict.fromkeys(FILES, "old")
        self.live: list[tuple[str, dict[str, str], dict[str, str]]] = []

    def start(self, root: str) -> None:
        """A job begins: its marks as the stage takes them, and what the model says that they must be."""
        marks = self.marks(root)
        for other, known, _ in self.live:
            marks = plants.older(root, marks, other, known)
        truth = {path: self.files[path] for path in FILES if path.startswith(f"{root}/")}
        for other, _, first in self.live:
            truth |= {path: value for path, value in first.items() if path in truth and path.startswith(f"{other}/")}
        self.live.append((root, marks, truth))

    def end(self, number: int) -> tuple[set[str], set[str]]:
        """A job ends: what it has told of it, and what has changed since the first of those beside it began."""
        root, marks, truth = self.live.pop(number % len(self.live))
        now = self.marks(root)
        told = {f"{root}/{path}" for path in marks.keys() | now.keys() if marks.get(path) != now.get(path)}
        return told, {path for path, value in truth.items() if self.files[path] != value}

    def marks(self, root: str) -> dict[str, str]:
        """What is found below a grant."""
        return {
            path[len(root) + 1 :]: text for path, text in self.files.items() if text and path.startswith(f"{root}/")
        }


@settings(max_examples=200)
@given(steps)
def test_attack_08_no_order_of_jobs_hides_a_change(found: list[Step]) -> None:
    """Whoever ends tells exactly what differs from the time when the oldest job began that was alive beside it."""
    tree = Tree()
    for what, root, text, number in [*found, *[("end", "/a", "", 0)] * len(found)]:
        if what == "start":
            tree.start(root)
        elif what == "write" and tree.live:
            tree.files[f"{root}/.envrc"] = text
        elif what == "end" and tree.live:
            told, changed = tree.end(number)
            assert told == changed
