"""TLS as real clients speak it, through a door to port 443 (attack 14)."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.net.fleet import netted
from tests.net.support import web
from tests.support import scratch

ADDRESS = "127.0.0.77"


@contextmanager
def tls_server(folder: Path) -> Iterator[list[str | None]]:
    """Serve one line over TLS at ADDRESS:443; yields the names that clients asked for."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=t"]
    words += ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    try:
        subprocess.run(words, check=True, capture_output=True)
        listener = socket.create_server((ADDRESS, 443))
    except (FileNotFoundError, OSError) as error:
        pytest.skip(f"no TLS server at port 443 here: {error}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    asked: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked.append(name)

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end, suppress(OSError), context.wrap_socket(end, server_side=True) as safe:
                safe.recv(4096)
                safe.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\ntls")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_attack_14_curl_gets_no_other_site_through_a_granted_address(node_tag: str) -> None:
    """curl reaches the granted address over TLS; with another site's name in the greeting it gets an alert."""
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user can't serve port 443")
    with scratch.folder() as folder, tls_server(folder) as asked, netted([f"{ADDRESS}:443"], tag=node_tag) as net:
        good = f"curl -ksS https://{ADDRESS}/"
        fronted = f"curl -ksS --connect-to ::{ADDRESS}:443 https://evil.example/"
        seen = net.run(["sh", "-c", f"{good}; echo; {fronted}; echo code $?"], [f"{ADDRESS}:443"])
        lines = seen.output.splitlines()
        assert lines[0] == "tls", seen.output
        assert "unrecognized name" in seen.output, seen.output
        assert lines[-1] != "code 0"
        assert asked == [None]
        told = [event.detail["why"] for event in seen.job.events() if event.type == "net.denied"]
        assert told == [f"{ADDRESS}:443: the TLS client asks for evil.example"]


def test_a_large_upload_waits_for_its_go_ahead(node_tag: str) -> None:
    """curl asks before it sends 3 MB (Expect: 100-continue); question, answer and body pass the door."""
    with web() as port, netted([f"127.0.0.1:{port}"], tag=node_tag) as net:
        script = "head -c 3000000 /dev/zero > /work/f; "
        script += f"curl -sS -H 'Expect: 100-continue' --data-binary @/work/f http://127.0.0.1:{port}/ | wc -c"
        seen = net.run(["sh", "-ec", script], [f"127.0.0.1:{port}"])
        assert (seen.state, seen.output.strip()) == ("finished", "3000000"), seen
