"""Messages whose sender's uid is all that is asked: nothing else of the sender's gets in, and nothing is pinned."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from broker.vault import peer
from tests.net.support import own_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a line; the first one was pinned by somebody before, and is not now."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        peer.arm(near, rights=True)
        peer.arm_uid(near)
        yield near, far


def test_the_kernel_names_the_sender(pair: Pair) -> None:
    """The text, the uid, whole; then there is none, and then it is the end."""
    near, far = pair
    before = own_descriptors()
    far.send(b"x")
    assert peer.receive_uid(near) == (b"x", os.geteuid(), False)
    assert own_descriptors() == before
    with pytest.raises(BlockingIOError):
        peer.receive_uid(near)
    far.close()
    assert peer.receive_uid(near) is None


def test_what_is_longer_is_cut(pair: Pair) -> None:
    """It says so, and nothing of the rest is taken for the next message."""
    near, far = pair
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * peer.MAX_MESSAGE_BYTES)
    far.send(bytes(peer.MAX_MESSAGE_BYTES))
    far.send(bytes(peer.MAX_MESSAGE_BYTES + 1))
    far.send(bytes(2 * peer.MAX_MESSAGE_BYTES))
    far.send(b"next")
    found = [peer.receive_uid(near) for _ in range(4)]
    assert [one[2] for one in found if one] == [False, True, True, False]
    assert found[3] is not None
    assert found[3][0] == b"next"


@pytest.mark.parametrize("count", [1, 200])
def test_no_descriptor_comes_in(pair: Pair, count: int) -> None:
    """One that is sent along is refused by the kernel, or dropped by it and the message counts as cut."""
    near, far = pair
    # As on a kernel that can't refuse them at the sender.
    with suppress(OSError):
        near.setsockopt(socket.SOL_SOCKET, peer._SO_PASSRIGHTS, 1)
    before = own_descriptors()
    rights = array.array("i", [far.fileno()] * count)
    far.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    assert peer.receive_uid(near) == (b"x", os.geteuid(), True)
    assert own_descriptors() == before
    peer.arm_uid(near)
    with suppress(OSError):
        far.sendmsg([b"y"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert peer.receive_uid(near) == (b"y", os.geteuid(), True)
    assert own_descriptors() == before
