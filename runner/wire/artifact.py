"""Artifacts: what a job gives to whoever looks at it later, by name.

Called by the node (stores them) and the client (reads them). Must never be a path: a name is one component, without a
leading dot, so that it can be a file's name anywhere.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MAX_ARTIFACT_BYTES", "PIECE_BYTES", "check_name", "piece_field"]

#: Most bytes of all artifacts of one job together; each also counts OVERHEAD (artifact.lua).
MAX_ARTIFACT_BYTES: Final = 8 << 20
PIECE_BYTES: Final = 32 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def check_name(name: str) -> bool:
    """Return whether ``name`` can name an artifact."""
    return _NAME.fullmatch(name) is not None


def piece_field(transfer: str, number: int) -> str:
    """Return the hash field of one piece."""
    return f"{transfer}:{number}"
