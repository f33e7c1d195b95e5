"""`python -I -B -m broker.egress FD`: the egress process, on a listening control socket that it inherits.

Started by `ringfence egress` and `ringfence up`, with an empty environment. The only place of this package that
configures logging and reads flags. Must never read a byte of an agent's or a job's before it is confined.
"""

from __future__ import annotations

import argparse
import asyncio
import encodings.idna
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import stringprep
import sys
from pathlib import Path
from typing import Final

from broker.egress import dns, tls
from broker.egress.certs import SEED_BYTES, Authority
from broker.egress.confine import confine
from broker.egress.dial import Dial
from broker.egress.dns import Resolver
from broker.egress.door import BODY_BYTES, IDLE_S, REQUESTS, Caps
from broker.egress.mask import Veil
from broker.egress.service import Service
from broker.egress.visit import HEAD_TIMEOUT_S
from runner.wire import frames

__all__ = ["main"]

#: Loaded by asyncio and the standard library on first use, when no file can be read any more.
PRELOADED: Final = (encodings.idna, stringprep)
#: A text and one that is none: their forms load what encodes them.
REHEARSED: Final = ("'rehearsed ä\n".encode(), b"rehearsed \xff")
EX_CONFIG: Final = 78
#: Descriptors of one connection through a door, and those that are for everything else.
_PER_CONNECTION: Final = 2
_SPARE: Final = 256


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    parser = argparse.ArgumentParser(prog="ringfence egress")
    parser.add_argument("listener", type=int)
    parser.add_argument("--uid", type=int)
    parser.add_argument("--nameserver", action="append", default=[], metavar="ADDRESS:PORT")
    parser.add_argument("--hosts", type=Path, default=dns.HOSTS)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--head-s", type=float, default=HEAD_TIMEOUT_S)
    parser.add_argument("--most", type=int)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--body-bytes", type=int, default=BODY_BYTES)
    parser.add_argument("--ca", type=Path, action="append", default=[], metavar="FILE")
    given = parser.parse_args(arguments)
    if Path(frames.__file__).parents[2] != Path(__file__).parents[2]:
        sys.stderr.write("ringfence: egress: its packages do not come from one distribution: reinstall it\n")
        return EX_CONFIG
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    servers = [(address, int(port)) for address, _, port in (word.rpartition(":") for word in given.nameserver)]
    resolver = Resolver(servers, hosts=given.hosts)
    caps = Caps(idle_s=given.idle_s, requests=given.requests, body_bytes=given.body_bytes, head_s=given.head_s)
    # One job alone must not be able to use up what all share.
    most = given.most or max(caps.connections + 1, (min(hard, 1 << 16) - _SPARE) // _PER_CONNECTION)
    try:
        trust = tls.client_context(given.ca)
    except OSError as error:
        sys.stderr.write(f"ringfence: egress: a file of --ca is no bundle of certificates: {error}\n")
        return EX_CONFIG
    _rehearse()
    # What is loaded by now stays: no collection has to look through it while a request waits.
    gc.collect()
    gc.freeze()
    asyncio.run(_serve(socket.socket(fileno=given.listener), given.uid, resolver, trust, given.hosts, caps, most))
    return 0


def _rehearse() -> None:
    """Have everything loaded that takes a file, while files can be opened."""
    for sample in REHEARSED:
        Veil({"": sample}).whole(sample)
    tls.server_context(Authority(os.urandom(SEED_BYTES), 0), "localhost")


async def _serve(
    listener: socket.socket,
    uid: int | None,
    resolver: Resolver,
    trust: ssl.SSLContext,
    hosts: Path,
    caps: Caps,
    most: int,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Now, with the loop's own socket pair made.
    state = confine(uid, (hosts, dns.RESOLV_CONF))
    service = Service(listener, Dial(resolver), state, caps=caps, most=most, trust=trust)
    service.start()
    try:
        await stop.wait()
    finally:
        service.stop()
        await asyncio.sleep(0)


if __name__ == "__main__":
    sys.exit(main())
