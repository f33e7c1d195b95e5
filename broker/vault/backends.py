"""Which systems the broker serves jobs on: where its way to know a message's sender has been proved.

Called by __main__ before anything is opened. Must never let a way run that no machine has shown to work.
"""

from __future__ import annotations

from typing import Final

from broker.vault.errors import VaultError

__all__ = ["NOT_VERIFIED", "require"]

#: Written, and never run on a machine of that kind: docs/operations.md, other systems.
NOT_VERIFIED: Final = {"darwin": "macOS", "win32": "Windows"}


def require(platform: str) -> None:
    """Let Linux pass. Raises VaultError: this is another system; says what becomes of jobs with secrets."""
    if platform == "linux":
        return
    name = NOT_VERIFIED.get(platform, platform)
    raise VaultError(
        f"the broker does not serve jobs on {name}: that it tells their processes apart there is not verified; "
        f"run nodes whose jobs need secrets on Linux 5.15 or newer"
    )
