"""Every file says what it is for, and packages load nothing by themselves (style rules 4, 29, 34)."""

from __future__ import annotations

import ast

from tests.architecture import tree

# Code that runs inside jobs, where sleeping is what the job does.
JOB_CODE = (
    *("tests/tasks/", "tests/e2e/programs/", "tests/security/programs/"),
    *("tests/flow_shape/jobs/", "tests/kernel/programs/"),
)
SLEEPERS = frozenset({"time.sleep", "sleep", "asyncio.sleep"})
WAITER = "tests/support/wait.py"


def lazy(module: tree.Module) -> bool:
    """Whether an ``__init__`` holds nothing but its docstring, or also names, ``__all__`` and the lazy loader."""
    body = module.tree.body[1:]
    return all(_declares(statement) for statement in body) and (not body or _lists_all(module.tree))


def test_every_file_has_a_docstring() -> None:
    """Each Python file opens with a docstring."""
    found = [module.where for module in tree.modules(*tree.PACKAGES, "examples", "tests") if not module.docstring]
    assert found == []


def test_packages_are_lazy() -> None:
    """An __init__ is a docstring, or lists __all__ and loads a name when it is asked for."""
    assert [module.where for module in tree.sources() if module.is_package and not lazy(module)] == []


def test_modules_list_what_they_offer() -> None:
    """Each module of the packages has an __all__."""
    silent = [m.where for m in tree.sources() if not m.is_package and not m.name.endswith("__main__")]
    listed = {m.where for m in tree.sources() if _lists_all(m.tree)}
    assert [where for where in silent if where not in listed] == []


def test_test_folders_are_packages() -> None:
    """Each folder of tests has an __init__, so that equal file names do not clash."""
    folders = {module.path.parent for module in tree.tests()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_test_sleeps() -> None:
    """Tests wait for conditions; only the waiting itself sleeps."""
    found = [
        f"{module.where}:{node.lineno}"
        for module in tree.tests()
        if module.where != WAITER and not module.where.startswith(JOB_CODE)
        for node in module.nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SLEEPERS and not _yields_only(node)
    ]
    assert found == []


def test_every_test_says_what_must_hold() -> None:
    """Each test function has a docstring."""
    found = [
        f"{module.where}:{node.lineno} {node.name}"
        for module in tree.tests()
        for node in module.nodes()
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert found == []


def _declares(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module in {"__future__", "typing", "importlib"}
    if isinstance(statement, ast.Import):
        return all(alias.name == "importlib" for alias in statement.names)
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) == "TYPE_CHECKING"
    if isinstance(statement, ast.FunctionDef):
        return statement.name in {"__getattr__", "__dir__"}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return False


def _lists_all(module: ast.Module) -> bool:
    targets = [t for s in module.body if isinstance(s, ast.Assign) for t in s.targets]
    targets += [s.target for s in module.body if isinstance(s, ast.AnnAssign)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _yields_only(call: ast.Call) -> bool:
    """Whether the call is ``asyncio.sleep(0)``: a turn of the loop, no time."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
