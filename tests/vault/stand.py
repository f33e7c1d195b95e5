"""A broker on a home of its own, and jobs that ask it, without an agent."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from broker.client import BrokerClient, LeaseAsk, SecretAsk
from broker.vault.keystore import Keystore, create
from tests.support.wait import wait_until
from tests.vault.programs import asker

OPEN_TO_ALL = """
version = 1
[[allow]]
secrets = ["*"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
modes = ["get", "proxy"]
hosts = ["*"]
"""
JOB_UID = 1_900_000_500


class Stand:
    """A home with a vault, and the broker's process."""

    #: Words for the broker's command line.
    options: tuple[str, ...] = ()

    def __init__(self, home: Path, secrets: dict[str, bytes], rules: str = OPEN_TO_ALL) -> None:
        home.chmod(0o700)
        self.home = home
        create(home / "vault")
        with Keystore(home / "vault") as store:
            for name, value in secrets.items():
                store.put(name, value)
        self.write_rules(rules)
        self.process: subprocess.Popen[bytes] | None = None

    def write_rules(self, text: str) -> None:
        """Replace the broker's rules; it reads them at its start and on SIGHUP."""
        (self.home / "vault-policy.toml").write_text(text)
        (self.home / "vault-policy.toml").chmod(0o600)

    def start(self) -> None:
        """Start the broker; returns when it serves."""
        with (self.home / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-m", "broker.vault", "--home", str(self.home), *self.options], stderr=log
            )
        wait_until(self._serves, "the broker serves")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the broker; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        return self.process.wait(10)

    def client(self) -> BrokerClient:
        """Return a node agent's line to it."""
        return BrokerClient(self.home / "s" / "broker")

    def operator(self, **order: object) -> dict[str, Any]:
        """Say one thing on the operator's socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(5)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            line.connect(str(self.home / "s" / "vault"))
            line.send(json.dumps(order).encode())
            reply: dict[str, Any] = json.loads(line.recv(1 << 17))
            return reply

    def record(self) -> str:
        """Return the text of the record."""
        return (self.home / "vault" / "audit.log").read_text()

    def _serves(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError((self.home / "broker.log").read_text())
        try:
            return bool(self.operator(op="status")["ok"])
        except (OSError, ValueError):
            return False


class Job:
    """One attempt: a process with its end of a channel."""

    def __init__(self, name: str, level: Literal["A", "B"], uid: int = JOB_UID) -> None:
        self.name, self.level = name, level
        self.uid = uid if level == "A" else os.geteuid()
        self.broker_end, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-I", asker.__file__, str(far.fileno())]
        self.process = subprocess.Popen(
            words + (["--apart"] if level == "B" else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[far.fileno()],
            user=self.uid if level == "A" else None,
            group=self.uid if level == "A" else None,
            extra_groups=[] if level == "A" else None,
        )
        self.far = far
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())
        self.fds = [self.broker_end.fileno(), os.pidfd_open(self.process.pid), os.pidfd_open(self.pid)]
        if level == "B":
            self.fds.append(os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))

    def ask(self, *secrets: SecretAsk, tenant: str = "main") -> LeaseAsk:
        """Return what an agent would say of this attempt."""
        return LeaseAsk(
            attempt=self.name,
            job=self.name.partition(".")[0],
            tenant=tenant,
            queue="agents",
            level=self.level,
            uid=self.uid,
            task="app:task",
            command=None,
            tags={},
            secrets=secrets,
        )

    def say(self, order: str) -> dict[str, Any]:
        """Have the job send something; returns the answer it got."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()
        text = self.process.stdout.readline().decode().strip()
        if text == "closed":
            return {"closed": True}
        found = json.loads(text)
        return found if isinstance(found, dict) else {"value": found}

    def get(self, name: str) -> bytes | str:
        """Return a secret's value, or the code of the refusal."""
        reply = self.say(json.dumps({"op": "get", "name": name}))
        if reply.get("ok"):
            return base64.b64decode(reply["value"])
        return str(reply.get("err") or "closed")

    def end(self) -> None:
        """End the process and close what this side holds. Idempotent."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        for fd in self.fds[1:]:
            os.close(fd)
        self.fds = self.fds[:1]
        self.broker_end.close()
        self.far.close()


def get_of(name: str) -> SecretAsk:
    """Return an ask for a value."""
    return SecretAsk(name, "get")
