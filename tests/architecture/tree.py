"""The source tree as parsed modules. Called by the architecture tests; reads files, imports nothing of the project."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "Import", "Module", "modules", "resolve", "sources", "tests", "tracked"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("runner", "node_agent", "broker")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: the dotted target, its line, and where in the module it stands."""

    target: str
    line: int
    at_top: bool
    for_types_only: bool


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One Python file: its dotted name, path, lines and syntax tree. Parsed once, so that it is its own equal."""

    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def docstring(self) -> str:
        """The module's docstring, or nothing."""
        return ast.get_docstring(self.tree) or ""

    @property
    def where(self) -> str:
        """The path below the project's root."""
        return str(self.path.relative_to(ROOT))

    @property
    def is_package(self) -> bool:
        """Whether the file is an ``__init__``."""
        return self.path.name == "__init__.py"

    @cache  # noqa: B019  # modules live as long as the process
    def imports(self) -> tuple[Import, ...]:
        """Return every import of the file, wherever it stands."""
        return tuple(_imports(self, self.tree, at_top=True, for_types_only=False))

    @cache  # noqa: B019  # modules live as long as the process
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return every node of the tree."""
        return tuple(ast.walk(self.tree))


def modules(*folders: str) -> tuple[Module, ...]:
    """Return every Python file below the folders, in order."""
    return tuple(module for folder in folders for module in _folder(folder))


def sources() -> tuple[Module, ...]:
    """Return the files of the shipped packages."""
    return modules(*PACKAGES)


def tests() -> tuple[Module, ...]:
    """Return the files of the tests."""
    return modules("tests")


def resolve(target: str, known: dict[str, Module]) -> str | None:
    """Return the module of ours that an import of ``target`` loads last, or None for others' modules."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in known:
            return name
    return None


@cache
def tracked() -> tuple[Path, ...]:
    """Return every file that is in the repository or about to be: untracked ones count, ignored ones do not."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = (ROOT / name.decode() for name in listed.split(b"\0") if name)
    return tuple(path for path in paths if path.is_file())


@cache
def _folder(name: str) -> tuple[Module, ...]:
    return tuple(_parse(path) for path in sorted((ROOT / name).rglob("*.py")))


def _parse(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, text.count("\n"), ast.parse(text, str(path)))


def _imports(module: Module, node: ast.AST, *, at_top: bool, for_types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_top, for_types_only)
        elif isinstance(child, ast.ImportFrom):
            base = _base(module, child)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, at_top, for_types_only)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = for_types_only or _is_type_checking(child)
            yield from _imports(module, child, at_top=at_top and not inside, for_types_only=types)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts if module.is_package else parts[:-1]
    kept = kept[: len(kept) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
