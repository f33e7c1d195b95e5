"""Renders the systemd units of one host: agent, broker and egress, with the paths of this environment.

Run by `make units` or by hand with the environment's Python. Must never render a unit whose program is not there, or a
path that systemd would read as anything but that path.

    python deploy/units.py --out DIR [--home /var/lib/ringfence] [--name NODE] [--user USER]

Without --user the units are for root (level A: each daemon takes a user of its own). With --user all three run as that
user (level B), without what needs root to be set up.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent / "systemd"
DOCS = TEMPLATES.parent.parent / "docs" / "operations.md"
DEFAULT_HOME = "/var/lib/ringfence"
#: What may stand in a user's or node's name here; systemd and Ringfence are stricter or equal.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,30}")


def main(arguments: list[str] | None = None) -> int:
    """Write the units; return the exit code."""
    parser = argparse.ArgumentParser(description="Render Ringfence's systemd units.")
    parser.add_argument("--out", type=Path, required=True, help="an existing or new folder")
    parser.add_argument("--home", default=DEFAULT_HOME, help=f"the node's home (default {DEFAULT_HOME})")
    parser.add_argument("--name", help="the node's name (default: the host's)")
    parser.add_argument("--user", help="run as this user, at level B (default: root, level A)")
    given = parser.parse_args(arguments)
    program = Path(sys.prefix) / "bin" / "ringfence"
    try:
        units = render(program, given.home, name=given.name, user=given.user)
    except ValueError as error:
        sys.stderr.write(f"units: {error}\n")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    for file, text in units.items():
        (given.out / file).write_text(text, "utf-8")
        sys.stdout.write(f"{given.out / file}\n")
    return 0


def render(program: Path, home: str, *, name: str | None = None, user: str | None = None) -> dict[str, str]:
    """Return the text of each unit by its file name. Raises ValueError: names the argument that can't be."""
    if not program.is_file():
        raise ValueError(f"{program} is missing: install Ringfence into the environment that runs this")
    for what, text in (("--name", name), ("--user", user)):
        if text is not None and not NAME.fullmatch(text):
            raise ValueError(f"{what} {text!r} is no name")
    values = {
        "RINGFENCE": _word(str(program), "the environment's path"),
        "HOME": _word(home, "--home"),
        "DOCS": str(DOCS).replace("%", "%%").replace(" ", "%%20"),
        "NAME": "" if name is None else f" --name {name}",
        "USER": "" if user is None else f"User={user}\n",
        "TARGET": "multi-user.target",
    }
    return {
        path.name.removesuffix(".in"): _filled(path.read_text("utf-8"), values, root=user is None)
        for path in sorted(TEMPLATES.glob("*.in"))
    }


def _filled(text: str, values: dict[str, str], *, root: bool) -> str:
    lines = []
    for line in text.splitlines():
        if line.startswith("@ROOT@") and not root:
            continue
        lines.append(re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], line.removeprefix("@ROOT@")))
    return "\n".join(lines) + "\n"


def _word(path: str, what: str) -> str:
    """Return a path as one word of a unit file: absolute, quoted where it has to be. Source: systemd.syntax(7)."""
    if not path.startswith("/") or any(ord(letter) < ord(" ") or letter in "\"'\\$" for letter in path):
        raise ValueError(f"{what} has to be an absolute path without quotes, $ and \\: {path!r}")
    escaped = path.replace("%", "%%")
    return f'"{escaped}"' if " " in escaped else escaped


if __name__ == "__main__":
    sys.exit(main())
