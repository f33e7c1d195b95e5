"""The names of the broker's sockets, below a home's folder of sockets. Called by both ends of each."""

from __future__ import annotations

from typing import Final

__all__ = ["CONTROL", "COUNTER"]

#: Agents'.
CONTROL: Final = "broker"
#: Operators'.
COUNTER: Final = "vault"
