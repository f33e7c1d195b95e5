"""The path of a job: at most nine files, listed in the design page, each leading to the next (style rule 7)."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from tests.architecture import tree

HEADING = "## The path of a job"
PATH = (
    "runner/task.py",
    "runner/client.py",
    "node_agent/rq_store.py",
    "node_agent/dispatch.py",
    "node_agent/admission.py",
    "node_agent/supervisor.py",
    "node_agent/containment/zygote.py",
    "node_agent/containment/mould.py",
    "runner/guest/bootstrap.py",
)


def listed() -> list[str]:
    """Return the files in the fenced list below the heading of the design page."""
    text = (tree.ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = text[text.index(HEADING) + len(HEADING) :].partition("\n## ")[0]
    fence = re.search(r"```[a-z]*\n(.*?)```", section, re.DOTALL)
    assert fence, f"{HEADING}: no fenced list below it"
    return re.findall(r"^\s*([\w/]+\.py)\b", fence.group(1), re.MULTILINE)


def test_the_design_page_lists_the_path() -> None:
    """The page names exactly the nine files that a job passes, in order."""
    assert listed() == list(PATH)


def test_every_file_of_the_path_exists() -> None:
    """Each file of the path is there."""
    assert [name for name in PATH if not (tree.ROOT / name).is_file()] == []


def test_each_file_leads_to_the_next() -> None:
    """Each file of the path names the next one: by importing it or, across a queue or a process, in its text."""
    broken = [
        f"{name} does not name {following}"
        for name, following in pairwise(PATH)
        if not re.search(rf"\b{Path(following).stem}\b", (tree.ROOT / name).read_text(encoding="utf-8"))
    ]
    assert broken == []
