"""Files and functions stay small enough to be read in one go (style rule 5)."""

from __future__ import annotations

import ast

from tests.architecture import tree

LONGEST_SOURCE = 400
LONGEST_TEST = 500
LONGEST_FUNCTION = 60


def too_long(found: tuple[tree.Module, ...], limit: int) -> list[str]:
    """Return the files over the limit, with their size."""
    return [f"{module.where}: {module.lines} lines" for module in found if module.lines > limit]


def test_source_files_are_short() -> None:
    """No source file is longer than 400 lines."""
    assert too_long(tree.modules(*tree.PACKAGES, "examples"), LONGEST_SOURCE) == []


def test_test_files_are_short() -> None:
    """No test file is longer than 500 lines."""
    assert too_long(tree.tests(), LONGEST_TEST) == []


def test_scripts_for_the_store_are_short() -> None:
    """No Lua script is longer than a source file may be."""
    scripts = [path for path in tree.tracked() if path.suffix == ".lua"]
    counted = [(path, path.read_text(encoding="utf-8").count("\n")) for path in scripts]
    assert [f"{path}: {lines} lines" for path, lines in counted if lines > LONGEST_SOURCE] == []


def test_functions_are_short() -> None:
    """No function is longer than 60 lines, docstring included."""
    found = [
        f"{module.where}:{node.lineno} {node.name}: {length} lines"
        for module in tree.modules(*tree.PACKAGES, "examples", "tests")
        for node in module.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert found == []
