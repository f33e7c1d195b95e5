"""An operator's line to a running broker.

Called by the command line. Must never talk to a socket that is neither root's nor of its own user.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from broker.vault import peer
from broker.vault.errors import VaultBusyError, VaultError, VaultUsageError
from broker.vault.sockets import COUNTER

__all__ = ["COUNTER", "ask"]

ANSWER_S: Final = 30.0


def ask(path: Path, order: Mapping[str, object], *, wait_s: float = ANSWER_S) -> Mapping[str, object]:
    """Have the broker do something; returns what it says within ``wait_s``.

    Raises:
        VaultUsageError, VaultError: its own words. VaultBusyError: something has the vault open that is no broker.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(wait_s)
        # The broker asks the kernel who we are, for every message.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            line.connect(str(path))
            if peer.peer_uid(line) not in {0, os.geteuid()}:
                raise VaultError(f"{path} is served by user {peer.peer_uid(line)}: that is no broker of this home")
            line.send(json.dumps(dict(order)).encode())
            reply = json.loads(line.recv(1 << 20) or b"{}")
        except FileNotFoundError:
            raise VaultBusyError("the vault is open in another command: try again") from None
        except (OSError, ValueError) as error:
            raise VaultError(f"the broker does not answer on {path} ({type(error).__name__})") from None
    if not reply.get("ok"):
        kind = VaultUsageError if reply.get("err") == "usage" else VaultError
        raise kind(str(reply.get("message") or reply.get("err") or "no answer"))
    return dict(reply)
