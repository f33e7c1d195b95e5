"""Who sent a message: what each system's way must answer, shown on the one that this is; and the parts without calls.

Nothing of macOS or Windows is verified by a run on Linux but what takes and returns values.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

import pytest

from broker.vault import backends, darwin, peer, windows
from broker.vault.darwin import Token
from broker.vault.errors import VaultError
from broker.vault.sender import MAX_MESSAGE_BYTES
from tests.support.wait import wait_until

ME = Token(501, 7, 1000)


def token(*, pid: int = 501, version: int = 7, euid: int = 1000) -> bytes:
    """Return an audit token as the kernel lays it out."""
    return struct.pack("=8I", 1, euid, 2, 3, 4, pid, 5, version)


def framed(data: bytes) -> bytes:
    """Return a message as macOS and Windows channels carry it."""
    return struct.pack("!I", len(data)) + data


def sid(*parts: int, authority: int = 15) -> bytes:
    """Return a SID as Windows lays it out."""
    return bytes([1, len(parts)]) + authority.to_bytes(6, "big") + struct.pack(f"<{len(parts)}I", *parts)


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs fork: Linux or macOS")
def test_each_message_has_its_sender() -> None:
    """Conformance: two processes on one channel are told apart, each has this user's uid, and an ended one is dead."""
    system = peer if sys.platform == "linux" else darwin
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if system is peer else socket.SOCK_STREAM)
    with near, far:
        assert system.arm(near, rights=False)
        far.send(b"own" if system is peer else framed(b"own"))
        own = system.receive(near)
        child = os.fork()
        if child == 0:
            far.send(b"other" if system is peer else framed(b"other"))
            os.read(os.pipe()[0], 1)
            os._exit(0)
        try:
            near.settimeout(10)
            near.recv(1, socket.MSG_PEEK)
            other = system.receive(near)
            assert own is not None
            assert other is not None
            assert (own.data, own.sender.pid, own.sender.uid) == (b"own", os.getpid(), os.geteuid())
            assert (other.data, other.sender.pid, other.sender.uid) == (b"other", child, os.geteuid())
            assert other.sender.pidfd is not None
            pin = other.sender.pidfd
            assert system.alive(pin)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
        wait_until(lambda: not system.alive(pin), "the sender's end to be seen")
        own.close()
        other.close()


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("aix", "aix")])
def test_other_systems_are_refused(platform: str, name: str) -> None:
    """Where it is not shown to work the broker does not start, and says where it would."""
    with pytest.raises(VaultError, match=f"on {name}: .* not verified; run .* on Linux"):
        backends.require(platform)
    backends.require("linux")


def test_macos_tokens() -> None:
    """The place of each number is the kernel's; what is cut, or names no process, is no token."""
    assert darwin.read_token(token()) == ME
    assert [darwin.read_token(raw) for raw in (b"", token()[:-1], token(pid=0), token(pid=2**32 - 1))] == [None] * 4


@pytest.mark.parametrize(
    ("before", "after", "pinned"),
    [
        (ME, ME, True),
        (ME, Token(501, 8, 1000), False),
        (ME, Token(502, 7, 1000), False),
        (ME, None, False),
        (None, ME, False),
    ],
)
def test_macos_senders_that_change_are_nobody(before: Token | None, after: Token | None, pinned: bool) -> None:
    """Another process, or another program in it, between the two looks: the message has no sender."""
    told = iter([before, after])
    near, far = socket.socketpair()
    with near, far:
        far.send(framed(b"{}") + b"\0\0")
        found = darwin.receive(near, token_of=lambda _: next(told), pin=lambda _: os.dup(0))
        assert found is not None
        assert found.data == b"{}"
        assert (found.sender.pidfd is not None) is pinned
        found.close()
        with pytest.raises(BlockingIOError):
            darwin.receive(near, token_of=lambda _: ME, pin=lambda _: None)
        far.close()
        assert darwin.pid_namespace(found.sender) is None


def test_macos_messages_have_bounds() -> None:
    """Half a message waits, one that is too long is cut, descriptors that nobody wants are closed."""
    near, far = socket.socketpair()
    with near, far:
        far.send(framed(b"abc")[:5])
        with pytest.raises(BlockingIOError):
            darwin.receive(near)
        far.send(b"bc")
        found = darwin.receive(near)
        assert found is not None
        assert (found.data, found.sender.pidfd, found.cut) == (b"abc", None, False)
        socket.send_fds(far, [framed(b"x")], [0, 1])
        stuffed = darwin.receive(near, want_fds=1)
        assert stuffed is not None
        assert (stuffed.fds, stuffed.cut) == ((), True)
        far.send(struct.pack("!I", MAX_MESSAGE_BYTES + 1))
        long = darwin.receive(near)
        assert long is not None
        assert (long.data, long.cut) == (b"", True)
    near, far = socket.socketpair()
    with near:
        far.close()
        assert darwin.receive(near) is None


def test_windows_sandboxes_and_messages() -> None:
    """An AppContainer is told from others and from users; messages come whole, or not at all."""
    one, two = windows.sandbox_of(sid(2, 11, 12)), windows.sandbox_of(sid(2, 11, 13))
    assert one is not None
    assert two is not None
    assert one != two
    user, logon, cut = sid(21, 1, 2, 500, authority=5), sid(3, 1), sid(2, 11, 12)[:-1]
    assert [windows.sandbox_of(raw) for raw in (b"", user, logon, cut, sid(2))] == [None] * 5
    assert windows.take(framed(b"abc") + b"\0") == b"abc"
    assert [windows.take(raw) for raw in (b"", b"\0\0\0", framed(b"abc")[:-1])] == [None] * 3
    with pytest.raises(ValueError, match="too long"):
        windows.take(struct.pack("!I", MAX_MESSAGE_BYTES + 1))
