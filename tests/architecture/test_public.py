"""What others build on changes only on purpose: names in ``runner.__all__``, wire records, reasons, keys (STYLE 41)."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from enum import Enum
from pathlib import Path

import runner
import runner.wire

SNAPSHOT = Path(__file__).with_name("public.txt")


def public() -> list[str]:
    """Return one line per public name, sorted."""
    lines = [f"runner.{name}" for name in runner.__all__]
    for found in pkgutil.iter_modules(runner.wire.__path__):
        module = importlib.import_module(f"runner.wire.{found.name}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            lines.append(f"wire.{found.name}.{name}{_shape(value)}")
    return sorted(lines)


def _shape(value: object) -> str:
    """Return a record's fields or an enum's values."""
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        return f"({', '.join(field.name for field in dataclasses.fields(value))})"
    if isinstance(value, type) and issubclass(value, Enum):
        return f"({', '.join(str(member.value) for member in value)})"
    return ""


def test_public_names_change_only_on_purpose() -> None:
    """The snapshot is what the code offers; after a wanted change: python -m tests.architecture.test_public."""
    assert public() == SNAPSHOT.read_text("utf-8").splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public()) + "\n", "utf-8")
