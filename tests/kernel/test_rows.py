"""Every capability row of the kernel has a test with its id in the name."""

from __future__ import annotations

import re
from pathlib import Path

ROWS = {
    *(f"s{n}" for n in range(1, 6)),
    *(f"k{n}" for n in range(1, 9)),
    *(f"v{n}" for n in range(1, 6)),
    *(f"e{n}" for n in range(1, 6)),
    *(f"f{n}" for n in range(1, 4)),
    "i1",
    "i2",
    "h1",
}
IDS = re.compile(r"def test_(?:attack_[0-9]+_)?(?:rows?_)?((?:[skvefih][1-8]_)+)")


def test_each_row_has_a_test_of_its_own() -> None:
    """The id stands first, alone or among others (`test_k1_k2_…`, `test_row_s1_…`)."""
    found: set[str] = set()
    for folder in ("kernel", "e2e"):
        for file in (Path(__file__).parents[1] / folder).glob("test_*.py"):
            for ids in re.findall(
                r"def test_(?:attack_[0-9]+_)?(?:rows?_)?((?:[skvefih][1-8]_)+)", file.read_text("utf-8")
            ):
                found.update(ids.rstrip("_").split("_"))
    assert ROWS - found == set()
