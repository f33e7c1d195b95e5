"""The file of the vault's policy: read by descriptor, and only if nobody else could have written it.

Called by the broker (start, SIGHUP, reload) and by `ringfence vault explain`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from broker.vault import rules
from broker.vault.errors import RulesError, UnsafeVaultError
from broker.vault.rules import Rules

__all__ = ["RULES_FILE", "load_rules"]

#: Below the home.
RULES_FILE: Final = "vault-policy.toml"
_MAX_RULES_BYTES: Final = 1 << 20
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def load_rules(path: Path) -> Rules:
    """Return the rules of a file; none if it is missing, so that nothing is given.

    Raises:
        RulesError. UnsafeVaultError: others could have written it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return Rules()
    except OSError as error:
        fix = f"make it the vault owner's own: chown --reference=HOME/vault {path}"
        raise UnsafeVaultError(f"{path} can't be read ({error.strerror}): {fix}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in {0, os.geteuid()} or info.st_mode & _OTHERS_WRITE:
            raise UnsafeVaultError(f"{path} can be written by others: chown it to root and run `chmod go-w {path}`")
        data = file.read(_MAX_RULES_BYTES + 1)
    if len(data) > _MAX_RULES_BYTES:
        raise RulesError(f"{path} is larger than {_MAX_RULES_BYTES} bytes")
    return rules.parse(data.decode("utf-8", "strict"))
