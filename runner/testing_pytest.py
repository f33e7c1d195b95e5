"""A pytest plugin: a private fleet for an application's tests. Active only where it is named.

Called by pytest, with ``pytest_plugins = ["runner.testing_pytest"]`` in a conftest.py, or ``-p runner.testing_pytest``.
Must never be loaded by anything that runs in production: it imports pytest.

    @pytest.fixture(scope="session")
    def ringfence_imports():
        return ["myapp.tasks:/srv/app"]

    def test_a_task(ringfence_fleet):
        assert double.delay(21).result(timeout=30) == 42
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from runner.testing import PrivateFleet, fleet

__all__ = ["ringfence_fleet", "ringfence_imports"]


@pytest.fixture(scope="session")
def ringfence_imports() -> Sequence[str]:
    """The modules with tasks that the fleet serves, ``MODULE`` or ``MODULE:DIR``; override it."""
    return ()


@pytest.fixture(scope="session")
def ringfence_fleet(ringfence_imports: Sequence[str]) -> Iterator[PrivateFleet]:
    """One private fleet for all tests of the session; RINGFENCE_HOME names its home meanwhile."""
    with fleet(ringfence_imports) as running:
        yield running
