"""Texts of the project hold for everyone: nothing in them names the machine on which they were written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.architecture import tree

PUBLIC_REGISTRIES = tuple(".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org")))
SYSTEM_FOLDERS = frozenset(map(Path, ("/", "/usr", "/usr/local", "/opt", "/tmp", "/root", "/home")))
LOCKS = sorted((tree.ROOT / "requirements").glob("*.txt"))


def forbidden() -> list[str]:
    """Return what no text may hold: registries' hosts, those this machine is set to use, and its own folders."""
    settings = [value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))]
    hosts = {urlsplit(word).hostname for value in settings for word in value.split() if "://" in word}
    folders = {tree.ROOT, tree.ROOT.parent, Path(sys.prefix), Path(sys.base_prefix)} - SYSTEM_FOLDERS
    # A folder of one short name (a checkout in /src) would match words that mean something else.
    deep = [f"{folder}/" for folder in folders if len(folder.parts) > 2]
    return sorted({*PUBLIC_REGISTRIES, *filter(None, hosts), *deep})


def test_no_text_names_a_registry_or_a_machine() -> None:
    """No tracked text file holds the host of a package registry or a folder of a developer's machine."""
    found = []
    for path in tree.tracked():
        text = _text(path)
        found += [f"{path.relative_to(tree.ROOT)}: {word}" for word in forbidden() if word in text]
    assert found == []


def test_locks_hold_hashes_and_no_index() -> None:
    """Every locked requirement is pinned and hashed; no lock names an index, a host or a path."""
    assert LOCKS
    for path in LOCKS:
        text = path.read_text(encoding="utf-8")
        entries = re.split(r"\n(?=[A-Za-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
        loose = [
            entry for entry in entries if not re.match(r"[a-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry, re.S)
        ]
        assert loose == []
        assert not re.search(r"://|^-|@ ", text, re.MULTILINE)


def _text(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data[:8192] else data.decode("utf-8", errors="replace")
