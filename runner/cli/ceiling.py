"""The ceiling that `up` sets its agents: the policy file, and the modules with tasks.

Called by up.py. Must never allow a path that the operator neither named nor stands in, and never a whole machine, a
home folder or the folder that holds Ringfence's own home by default (DESIGN §9).
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.errors import UsageError
from runner.wire.errors import GrammarError
from runner.wire.grants import parse_net

__all__ = [
    "HEADER",
    "Import",
    "allowed_net",
    "allowed_paths",
    "default_path",
    "parse_import",
    "policy_text",
    "read_rules",
]

HEADER: Final = "# Written by `ringfence up` at each start. Services have a policy of their own: docs/operations.md"


@dataclass(frozen=True, slots=True)
class Import:
    """One module with tasks, and the folder to import it from (None: the agents' own environment)."""

    module: str
    folder: Path | None


def parse_import(text: str) -> Import:
    """Return the parts of ``MODULE[:DIR]``. Raises UsageError."""
    module, colon, place = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"--import takes MODULE or MODULE:DIR, not {text!r}")
    if not colon:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise UsageError(
                f"--import {text}: no such module is installed; for a file in DIR say --import {module}:DIR"
            )
        return Import(module, None)
    folder = Path(place).resolve()
    path = folder.joinpath(*module.split("."))
    if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
        raise UsageError(f"--import {text}: there is no module {module} in {folder}")
    return Import(module, folder)


def default_path(folder: Path, home: Path) -> tuple[Path | None, str]:
    """Return the current folder if jobs may be granted paths below it by default, else None and why not."""
    place = folder.resolve()
    if place == Path("/"):
        return None, "the current folder is /"
    if place in _home_folders():
        return None, f"the current folder {place} is a home folder"
    if not _is_text(place):
        return None, "the current folder's name is not UTF-8"
    if home.resolve().is_relative_to(place):
        return None, f"the current folder {place} holds Ringfence's own home {home}"
    return place, ""


def allowed_paths(named: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths of --allow in the form that policy compares. Raises UsageError for one that does not exist."""
    for path in named:
        if not path.exists():
            raise UsageError(f"--allow {path}: there is no such path")
        if not _is_text(path.resolve()):
            raise UsageError(f"--allow {path}: a path in a policy is UTF-8, this one is not")
    return tuple(path.resolve() for path in named)


def allowed_net(named: Sequence[str]) -> tuple[str, ...]:
    """Return the destinations of --allow-net in the form that policy compares. Raises UsageError for another form."""
    try:
        return tuple(f"{grant.host}:{grant.port}" for text in named for grant in parse_net(text))
    except GrammarError:
        raise UsageError("--allow-net takes HOST:PORT") from None


def read_rules(file: Path) -> tuple[str, bool]:
    """Return the text of --policy FILE, and whether it says by itself which jobs are let in. Raises UsageError."""
    try:
        text = file.read_text("utf-8")
        said = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--policy {file} can't be read: {error}") from None
    return (text if "version" in said else f"version = 1\n{text}"), "allow" in said


def policy_text(
    allow: Sequence[Path], imports: Sequence[Import], net: Sequence[str] = (), rules: str = "version = 1"
) -> str:
    """Return the policy file: any command, the tasks of ``imports``, every grant, paths below ``allow``.

    ``net``: destinations that are listed one by one, because a pattern opens no address of this machine. ``rules``:
    what else stands in it.
    """
    paths = [str(path) for path in allow]
    lines = [
        HEADER,
        rules.rstrip("\n"),
        "[[allow]]",
        'commands = ["*"]',
        f"tasks = {_toml([f'{item.module}:*' for item in imports])}",
        f"read = {_toml(paths)}",
        f"write = {_toml(paths)}",
        f"net = {_toml(['*', *net])}",
        'secrets = ["*"]',
        'tools = ["*"]',
        'mail = ["*"]',
        'agents = ["*"]',
        'watch = ["*"]',
        'state = "1G"',
        "spawn = 1000",
        "service = true",
        "unix = true",
        "reuse = true",
    ]
    return "\n".join(lines) + "\n"


def _toml(words: Sequence[str]) -> str:
    # A JSON string is a TOML basic string too, except that TOML has no surrogate escapes and wants DEL escaped.
    return json.dumps(list(words), ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_text(path: Path) -> bool:
    return str(path).isascii() or str(path) == str(path).encode("utf-8", "replace").decode("utf-8")


def _home_folders() -> set[Path]:
    found = {Path(entry.pw_dir) for entry in pwd.getpwall() if entry.pw_uid == 0 or entry.pw_uid >= 1000}
    found |= {Path(os.environ[name]) for name in ("HOME",) if os.environ.get(name)}
    return {path.resolve() for path in found if path.is_absolute()}
