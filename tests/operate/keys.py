"""Keys that may not operate: one lacks the right, the other is for one tenant alone. Called by this folder's tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from runner import keyring
from runner.client import Client
from runner.home import Home
from runner.signing import Signer
from tests.support.rig import Rig

__all__ = ["KILLER", "TENANT", "client_of"]

KILLER, TENANT = Signer(secrets.token_bytes(32)), Signer(secrets.token_bytes(32))


@contextmanager
def client_of(rig: Rig, signer: Signer) -> Iterator[Client]:
    """Yield a client of the rig's store that signs with this key."""
    client = Client(rig.store.url, signer, keyring.load_fleet_public(Home(rig.home)))
    try:
        yield client
    finally:
        client.close()
