"""The signature of a task as type checkers see it: what they must accept, and every single thing that they refuse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = Path(__file__).parent / "typed"
TIMEOUT_S = 55.0


@pytest.fixture
def snippets(tmp_path: Path) -> tuple[Path, Path]:
    """The good snippets, and the bad ones as a program (they are a text, or every check of this tree would fail)."""
    bad = tmp_path / "bad_calls.py"
    shutil.copy(TYPED / "bad.txt", bad)
    return TYPED / "good.py", bad


def wrong_lines(path: Path) -> list[int]:
    """Return the lines that are marked as wrong."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]


def told(words: Sequence[str | Path], pattern: str) -> dict[str, list[int]]:
    """Run a type checker; return the lines of its errors by file name."""
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run([*map(str, words)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[int]] = {}
    for match in re.finditer(pattern, done.stdout, re.MULTILINE):
        found.setdefault(Path(match[1]).name, set()).add(int(match[2]))
    return {name: sorted(lines) for name, lines in found.items()}


def test_mypy_accepts_every_good_call_and_refuses_every_bad_one(snippets: tuple[Path, Path], tmp_path: Path) -> None:
    """One error on each marked line and on no other."""
    config, kept = ROOT / "pyproject.toml", ROOT / ".cache"
    cache = kept / "mypy-typed" if os.access(kept, os.W_OK) else tmp_path
    words: list[str | Path] = [sys.executable, "-m", "mypy", "--cache-dir", cache, "--config-file", config]
    assert told([*words, *snippets], r"^(.+?):(\d+): error:") == {"bad_calls.py": wrong_lines(snippets[1])}


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_accepts_every_good_call_and_refuses_every_bad_one(snippets: tuple[Path, Path]) -> None:
    """The same with the other checker."""
    words: list[str | Path] = ["pyright", "--pythonpath", sys.executable]
    assert told([*words, *snippets], r"^\s*(.+?):(\d+):\d+ - error:") == {"bad_calls.py": wrong_lines(snippets[1])}
