"""One store and two agents for all tests of this folder; each test leaves both undrained and idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner import keyring
from runner.home import Home
from tests.operate.keys import KILLER, TENANT
from tests.support.rig import Rig, rigged


@pytest.fixture(scope="package")
def pair() -> Iterator[Rig]:
    """Agents ``a`` and ``b`` with two slots each, which trust the keys of keys.py; ``b`` hears RQ's stop command."""
    with rigged() as rig:
        keyring.trust(Home(rig.home), KILLER.public, may=("enqueue", "kill"), tenants=("*",))
        keyring.trust(Home(rig.home), TENANT.public, may=("enqueue", "kill", "operate"), tenants=("acme",))
        rig.start("a")
        policy = rig.home / "policy.toml"
        policy.write_text(policy.read_text().replace("version = 1", "version = 1\nrq_stop = true", 1))
        rig.start("b")
        rig.app.nodes()
        yield rig
        rig.app.close()
