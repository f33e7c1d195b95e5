"""Tasks that the e2e fleets serve. Each process ends by itself after LIFETIME_S."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import urllib.request

from runner import App, secret
from runner.wire import service

app = App()
LIFETIME_S = 60
SLEEPER = f"import time; time.sleep({LIFETIME_S})"


@app.task()
def add(left: int, right: int) -> int:
    """Return the sum."""
    sys.stdout.write("adding\n")
    return left + right


@app.task()
def leave_child(mark: str) -> int:
    """Return 7 while a background child still holds the output pipe."""
    subprocess.Popen([sys.executable, "-c", SLEEPER, mark])
    return 7


@app.task()
def use_secret(name: str, fail: bool = False) -> dict[str, str]:
    """Return a secret's hash, and the secret itself, which must not get out; or fail with it in the message."""
    value = secret(name)
    if fail:
        raise RuntimeError(f"it is {value.decode()}")
    return {"hash": hashlib.sha256(value).hexdigest(), "value": value.decode()}


@app.task()
def spend_secret(name: str, url: str) -> dict[str, str]:
    """Ask a server with a secret in hand; return what it told back and forms of the secret, which must not get out."""
    value = secret(name)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {value.decode()}"})  # noqa: S310 - a test's
    with urllib.request.urlopen(request) as answer:  # noqa: S310 - a test's own server
        told = answer.read().decode()
    forms = {f"base64+{phase}": base64.b64encode(bytes(phase) + value).decode() for phase in range(3)}
    return {"told": told, "hex": value.hex(), "json": json.dumps(value.decode()), **forms}


@app.task()
def use_sealed(token: str, more: dict[str, object]) -> dict[str, str]:
    """Return hashes of values that arrived sealed, and one of them, which must not get out."""
    raw = more["raw"]
    assert isinstance(raw, bytes)
    sys.stdout.write(f"the token is {token}\n")
    return {"token": hashlib.sha256(token.encode()).hexdigest(), "raw": hashlib.sha256(raw).hexdigest(), "value": token}


@app.task()
def use_service() -> dict[str, object]:
    """Let a program without any inherited descriptor ask the service, and an HTTP client try to."""
    host, _, port = os.environ[service.VARIABLE].partition(":")
    program = (
        "import json, os, socket, sys; from runner.wire import service\n"
        "host, port = os.environ[service.VARIABLE].split(':'); line = socket.create_connection((host, int(port)), 5)\n"
        "line.sendall(service.opening())\n"
        "for op in ('status', 'get'):\n"
        "    line.sendall(service.pack({'op': op, 'name': 'KEY'})); print(line.recv(4096)[4:].decode())\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, close_fds=True).stdout
    line = socket.create_connection((host, int(port)), 5)
    line.sendall(b"GET /get?name=KEY HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        cut = line.recv(4096)
    except ConnectionResetError:
        cut = b""
    return {"told": [json.loads(text) for text in told.splitlines()], "http": cut}


@app.task()
def explode() -> None:
    """Fail with a message."""
    raise RuntimeError("on purpose")
