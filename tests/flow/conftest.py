"""Fixtures of these tests: those of the store's, a client and agent starts on an empty store."""

from __future__ import annotations

from tests.store.conftest import agent, agents, desk

__all__ = ["agent", "agents", "desk"]
