"""docs/cli.md and the command agree."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from runner.cli.commands import LATER, application

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
#: Options that stand at the head of the page, once for all commands.
SHARED = {"--home", "--redis", "--help"}


def options() -> dict[str, set[str]]:
    """Return the long options of each command, by the name of its section on the page."""
    found: dict[str, set[str]] = {}
    for name, command in typer.main.get_group(application).commands.items():
        every = [command, *getattr(command, "commands", {}).values()]
        words = {word for each in every for param in each.params for word in param.opts if word.startswith("--")}
        found[name] = words - SHARED
    return found


def sections() -> dict[str, str]:
    """Return the text of each section by every command in its heading."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: text for head, text in zip(parts[1::2], parts[2::2], strict=True) for name in head.split(", ")}


def test_every_command_and_option_stands_on_the_page() -> None:
    """A command or option without a line in docs/cli.md is not done."""
    page = sections()
    missing = {
        name: sorted(word for word in words if f"`{word}" not in page.get(name, ""))
        for name, words in options().items()
        if name not in page or any(f"`{word}" not in page[name] for word in words)
    }
    assert missing == {}


def test_the_page_promises_no_option_that_is_not_there() -> None:
    """An option on the page that no command takes misleads."""
    known = set().union(*options().values()) | SHARED
    named = set(re.findall(r"`(--[a-z-]+)", PAGE.read_text()))
    assert named - known - {"--json"} == set()


def test_later_commands_stand_on_the_page() -> None:
    """What is not in this version is named as such."""
    text = sections()["Not in this version"]
    assert {name for name in LATER if f"`{name}`" not in text} == set()
