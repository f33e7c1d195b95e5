"""Settings of the broker, from flags and RINGFENCE_BROKER_* (never from a file in the current folder).

Called by __main__. Read by hand: what validates settings elsewhere would be half of the memory that this process locks,
and code beside its keys. Must never take a setting for another, or leave one out that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.vault.errors import VaultUsageError

__all__ = ["BrokerSettings", "read"]

PREFIX: Final = "RINGFENCE_BROKER_"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """``agents``: uids whose connections are node agents, besides root and the broker's own. ``key_command``: its
    output is the host's key, instead of the vault's own file or a systemd credential. ``scrub_uid``: the user that the
    scrubber becomes, where root starts the broker. ``egress_uid``: the user of the egress process, if it is
    another than the broker's and its agents'.
    """

    home: Path
    agents: tuple[int, ...] = ()
    key_command: tuple[str, ...] = ()
    scrub_uid: int | None = None
    egress_uid: int | None = None


def read(given: Mapping[str, object], environ: Mapping[str, str]) -> BrokerSettings:
    """Return the settings: flags first, then variables; lists are JSON.

    Raises:
        VaultUsageError: names the first one that is missing, unknown or wrong.
    """
    values = dict(given)
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name not in _READERS:
            raise VaultUsageError(f"setting {variable}: there is none of this name")
        try:
            values.setdefault(name, _READERS[name](environ[variable]))
        except ValueError as error:
            raise VaultUsageError(f"setting {variable}: {error}") from None
    if "home" not in values:
        raise VaultUsageError(f"setting home: it is missing; give --home DIR or {PREFIX}HOME")
    return BrokerSettings(**values)  # type: ignore[arg-type]  # each reader returns its field's type


def _uid(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("a user's number is expected")
    return int(text)


def _uids(text: str) -> tuple[int, ...]:
    found = _list(text)
    if not all(type(item) is int and item >= 0 for item in found):
        raise ValueError("a JSON list of users' numbers is expected")
    return tuple(item for item in found if isinstance(item, int))


def _words(text: str) -> tuple[str, ...]:
    found = _list(text)
    if not found or not all(isinstance(item, str) for item in found):
        raise ValueError('a JSON list of words is expected, such as ["/usr/bin/keytool", "read"]')
    return tuple(str(item) for item in found)


def _list(text: str) -> list[object]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("a JSON list is expected")  # noqa: TRY004 - a fault of the setting's text
    return found


_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "home": Path,
    "agents": _uids,
    "key_command": _words,
    "scrub_uid": _uid,
    "egress_uid": _uid,
}
