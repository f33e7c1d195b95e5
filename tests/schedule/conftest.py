"""Fixtures of the schedule tests: the store's client and agent starts."""

from tests.store.conftest import agent, agents, desk

__all__ = ["agent", "agents", "desk"]
