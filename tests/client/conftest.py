"""A fleet on paper for each test."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.client.paper import Fleet, on_paper
from tests.support.valkey import Valkey


@pytest.fixture
def fleet(valkey: Valkey) -> Iterator[Fleet]:
    """A home with keys, an app and an empty store."""
    with on_paper(valkey) as made:
        yield made


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """A second thread, for calls that wait while the test goes on."""
    with ThreadPoolExecutor(4) as pool:
        yield pool
