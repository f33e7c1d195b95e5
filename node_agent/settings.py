"""Settings of one node agent: from flags and RINGFENCE_* variables, frozen at start.

Called by node_agent.__main__. Must never read a file of the current folder, nor the environment at import.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from node_agent.containment.plan import Level

__all__ = ["AgentSettings"]


def _words(value: object) -> object:
    """Variables carry lists as text with commas."""
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


class AgentSettings(BaseSettings):
    """Everything an operator may set. Times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="RINGFENCE_", frozen=True, extra="ignore", env_file=None)

    home: Path
    name: str = Field(default_factory=lambda: _host_name())
    redis: str | None = None
    slots: int = Field(default=4, ge=1, le=1024)
    queues: Words = ("*",)
    labels: dict[str, str] = Field(default_factory=dict)
    #: What all jobs together may ask for; None: the host's memory, where it is counted, and its processors.
    memory_bytes: int | None = Field(default=None, ge=1 << 20)
    cpus: float | None = Field(default=None, gt=0)
    heartbeat_s: float = Field(default=5.0, ge=1.0, le=60.0)
    policy: Path | None = None
    #: What models cost (node_agent/kernel/prices.py); default HOME/prices.toml, where there is one.
    prices: Path | None = None
    tasks: Words = ()
    task_path: Words = ()
    #: The strongest level that is tried: for tests and for operators who want to see a lower one.
    max_level: Level = "A"
    result_ttl_s: int = Field(default=7 * 86_400, ge=60)

    @property
    def lease_s(self) -> float:
        """How long a claim stands without renewal: twice the heartbeat."""
        return 2 * self.heartbeat_s

    @property
    def margin_s(self) -> float:
        """How much earlier jobs are stopped, and later they are taken over: half a heartbeat."""
        return self.heartbeat_s / 2

    @property
    def node_home(self) -> Path:
        """What this agent alone writes below the home."""
        return self.home / "nodes" / self.name


def _host_name() -> str:
    name = "".join(char if char.isalnum() else "-" for char in socket.gethostname().lower()).strip("-")
    return name[:32] or "node"
