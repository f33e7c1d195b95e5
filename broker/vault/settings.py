"""Settings of the broker, from flags and RINGFENCE_BROKER_* (never from a file in the current folder).

Called by __main__.
"""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["BrokerSettings"]


class BrokerSettings(BaseSettings):
    """``agents``: uids whose connections are node agents, besides root and the broker's own. ``key_command``: its
    output is the host's key, instead of the vault's own file or a systemd credential. ``scrub_uid``: the user that the
    scrubber becomes, where root starts the broker.
    """

    model_config = SettingsConfigDict(env_prefix="RINGFENCE_BROKER_", frozen=True, extra="forbid")

    home: Path
    agents: tuple[int, ...] = ()
    key_command: tuple[str, ...] = ()
    scrub_uid: int | None = None
