"""`python -I -m broker.vault --home DIR`: one host's broker in the foreground.

Started by `ringfence broker`, `ringfence up` and systemd. The only place of this package that configures logging and
reads flags.

Exit status: 0 stopped on request, 75 another process has the vault open, 78 a set-up that needs an operator.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Final

from broker.vault import backends
from broker.vault.errors import VaultError
from broker.vault.service import serve
from broker.vault.settings import read

EX_TEMPFAIL: Final = 75
EX_CONFIG: Final = 78


def main(arguments: list[str] | None = None) -> int:
    """Run the broker until SIGTERM or SIGINT; return the exit status."""
    parser = argparse.ArgumentParser(prog="ringfence broker", description="Hand secrets to this host's jobs.")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--scrub-uid", dest="scrub_uid", type=int)
    parser.add_argument("--egress-uid", dest="egress_uid", type=int)
    given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        backends.require(sys.platform)
        settings = read(given, os.environ)
        agents = frozenset({0, os.geteuid(), *settings.agents})
        egress = agents if settings.egress_uid is None else frozenset({settings.egress_uid})
        serve(settings.home, agents, settings.key_command, settings.scrub_uid, egress)
    except VaultError as error:
        sys.stderr.write(f"ringfence: broker: {error}\n")
        return EX_TEMPFAIL if error.retryable else EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
