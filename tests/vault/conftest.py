"""Brokers that the tests of the desk share, or have to themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pytest

from tests.support import scratch
from tests.vault.stand import Stand

VALUES = {"KEY": b"canary-one", "OTHER": b"canary-two"}
LEVELS: list[Literal["A", "B"]] = ["A", "B"] if os.geteuid() == 0 else ["B"]


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """A broker with two secrets that any job may have, for the tests that change nothing of it."""
    yield from _started()


@pytest.fixture
def own() -> Iterator[Stand]:
    """The same for one test alone."""
    yield from _started()


def _started() -> Iterator[Stand]:
    with scratch.folder() as home:
        made = Stand(home, VALUES)
        made.start()
        yield made
        if made.process is not None and made.process.poll() is None:
            assert made.stop() == 0


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Literal["A", "B"]:
    """Each level that this user can make."""
    found: Literal["A", "B"] = request.param
    return found
