"""RINGFENCE_* variables of the command line and the daemons, frozen at the start.

Called by the command line and daemons only; applications and guests never load it. Must never read a file of the
current folder, nor the environment at import.
"""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from runner.errors import ConfigError
from runner.wire.errors import WireError
from runner.wire.ids import DEFAULT_TENANT, check_tenant

__all__ = ["RunnerSettings", "load"]


class RunnerSettings(BaseSettings):
    """``home``: RINGFENCE_HOME; ``redis``: RINGFENCE_REDIS, over client.json; ``tenant``: RINGFENCE_TENANT."""

    model_config = SettingsConfigDict(env_prefix="RINGFENCE_", frozen=True, extra="ignore", env_file=None)

    home: Path | None = None
    redis: str | None = None
    tenant: str = DEFAULT_TENANT


def load() -> RunnerSettings:
    """Return the settings. Raises ConfigError for a bad one, naming it."""
    settings = RunnerSettings()
    if settings.home is not None and not settings.home.is_absolute():
        raise ConfigError("RINGFENCE_HOME must be an absolute path, so that it does not depend on the current folder")
    try:
        check_tenant(settings.tenant)
    except WireError as error:
        raise ConfigError(f"RINGFENCE_TENANT: {error}") from None
    return settings
