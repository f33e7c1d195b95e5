"""`python -I -B -m broker.scrub FD [UID]`: the scrubber, on a socket that it inherits from the broker.

Started by the broker with an empty environment. Must never read a byte of a job's before it is confined.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from typing import Final

from broker.egress.confine import confine
from broker.scrub.service import Scrubber
from broker.vault.redact import Redactor

__all__ = ["main"]

_LEAST_WORDS: Final = 2
#: A text and one that is none: what encoding their forms takes is loaded while files can still be read.
REHEARSED: Final = ("'rehearsed ä\n".encode(), b"rehearsed \xff")


def main(arguments: list[str]) -> int:
    """Serve until the broker's end of the socket closes; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    scrubber = Scrubber(socket.socket(fileno=int(arguments[1])))
    for sample in REHEARSED:
        Redactor({"": sample}).whole(sample)
    confine(int(arguments[2]) if len(arguments) > _LEAST_WORDS else None, ())
    while not scrubber.over:
        scrubber.turn()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
