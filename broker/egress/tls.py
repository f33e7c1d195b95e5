"""TLS on either side of a connection: as the host of a proxied secret towards the job, as its client towards the host.

Called by http.py (towards the job) and keyed.py (towards the host). Must never speak to a host whose certificate was
not verified for its name, and never take the end of a connection that its peer has not announced for the end of what it
had to say.

Source: the standard library's ssl module (memory BIOs); RFC 8446 section 6.1 (close_notify).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker.egress.certs import Authority
from broker.egress.streams import CHUNK_BYTES, Streams

__all__ = ["Tls", "client_context", "server_context"]

_HTTP: Final = ["http/1.1"]
#: Where systems keep the authorities that they trust. Read before the process is confined.
_BUNDLES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


class Tls:
    """One TLS session over a connection; reads and writes like Streams."""

    def __init__(self, inner: Streams, context: ssl.SSLContext, host: str | None = None) -> None:
        """``host``: the name to verify, on the client's side; None: we are the server."""
        self._inner = inner
        #: The peer has announced its end.
        self._over = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)

    async def greet(self, early: bytes = b"") -> None:
        """Shake hands; ``early`` was read of the peer already.

        Raises:
            ssl.SSLError: the peer is not who it should be, or speaks no TLS. OSError.
        """
        self._incoming.write(early)
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                with suppress(OSError):
                    await self._flush()  # the alert says why
                raise
            else:
                await self._flush()
                return

    async def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, b"" at the announced end.

        Raises:
            OSError: the connection ended without notice, or what came is no TLS.
        """
        while True:
            # Asked for what is not there, the session raises: with a text that takes longer to make than a read.
            if not self._over and not self._incoming.pending and not self._session.pending():
                await self._flush()
                await self._fill()
            parts: list[bytes] = []
            try:
                while size > 0:
                    part = self._session.read(size)
                    if not part:
                        break
                    parts.append(part)
                    size -= len(part)
                    if not self._incoming.pending and not self._session.pending():
                        break
            except ssl.SSLWantReadError:
                if not parts:
                    await self._flush()
                    await self._fill()
                    continue
            except ssl.SSLZeroReturnError:
                self._over = True
            return parts[0] if len(parts) == 1 else b"".join(parts)

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken enough of it."""
        if data:
            self._session.write(data)
        await self._flush()

    async def leave(self) -> None:
        """Announce the end of what we send."""
        with suppress(ssl.SSLError):
            self._session.unwrap()
        await self._flush()

    def idle(self) -> bool:
        """Return whether the peer has neither sent nor ended anything since it was read last."""
        return self._inner.idle() and not self._incoming.pending and not self._session.pending()

    def abort(self) -> None:
        """Close at once; nothing more is sent."""
        self._inner.abort()

    async def _fill(self) -> None:
        data = await self._inner.read(CHUNK_BYTES)
        if not data:
            raise ConnectionAbortedError("the connection ended without notice")
        self._incoming.write(data)

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._inner.send(data)


def client_context(more: Sequence[Path]) -> ssl.SSLContext:
    """Return what hosts are verified with: this system's authorities, and those in the files ``more``.

    Raises:
        OSError: a file of ``more`` can't be read, or holds no certificate.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_HTTP)
    for path in filter(None, (ssl.get_default_verify_paths().cafile, *_BUNDLES)):
        # Folders of authorities are read on use, when no file can be opened any more.
        with suppress(OSError):
            context.load_verify_locations(path)
            break
    for file in more:
        context.load_verify_locations(file)
    return context


def server_context(authority: Authority, host: str) -> ssl.SSLContext:
    """Return what a job's clients are shown as ``host``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_HTTP)
    # The ssl module reads files only; this one is nowhere but in memory.
    file = os.memfd_create("chain", os.MFD_CLOEXEC)
    try:
        os.write(file, authority.chain(host).encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
