"""Tables of system calls: the loop stops at the first call that does not do what it must; nothing hides an error."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from pathlib import Path

import pytest

from node_agent.containment import script
from node_agent.containment.script import ANY, Memory, StepError, row
from node_agent.containment.sysnumbers import NUMBERS


@pytest.mark.parametrize("expected", [0, ANY, 7])
def test_an_error_is_never_an_expected_result(expected: int, tmp_path: Path) -> None:
    """A call that fails ends the table under its step's name, whatever result the row waits for."""
    gone = os.fsencode(tmp_path / "none")
    after = row("after", "mkdirat", script.AT_FDCWD, os.fsencode(tmp_path / "after"), 0o700)
    with pytest.raises(StepError) as caught:
        script.run([row("first", "chdir", gone, expect=expected), after])
    assert (caught.value.step, caught.value.errno) == ("first", errno.ENOENT)
    assert "chdir" in str(caught.value)
    assert not (tmp_path / "after").exists()


def test_another_result_than_the_expected_one_ends_the_table(tmp_path: Path) -> None:
    """A descriptor with another number than the rows count on stops them, and says what came instead."""
    free = os.open("/", os.O_PATH)
    os.close(free)
    try:
        with pytest.raises(StepError, match=f"openat returned {free}"):
            script.run([script.opened("open", b"/", os.O_PATH, free + 1)])
    finally:
        os.close(free)


def test_the_last_result_is_returned(tmp_path: Path) -> None:
    """The rows are run in their order, and what the last one returned is the table's result."""
    path = tmp_path / "file"
    free = os.open("/", os.O_PATH)
    os.close(free)
    script.run(script.written("write", os.fsencode(path), b"abc", free, os.O_CREAT | os.O_EXCL))
    assert path.read_bytes() == b"abc"
    assert script.run([row("a", "getppid", expect=ANY), row("b", "getpid", expect=ANY)]) == os.getpid()
    assert script.run([]) == 0


def test_a_message_arrives_with_its_descriptors() -> None:
    """Record and descriptors come out as they were sent; what does not fit is an error."""
    memory = Memory()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    take = [row("plan", "recvmsg", far.fileno(), memory.address, script.RECEIVE_CLOEXEC, expect=ANY)]
    with near, far:
        socket.send_fds(near, [b"first"], [near.fileno(), far.fileno()])
        record, fds = memory.message(script.run(take))
        assert bytes(record) == b"first"
        assert [os.path.sameopenfile(fds[0], near.fileno()), os.path.sameopenfile(fds[1], far.fileno())] == [True, True]
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
        near.send(b"second")
        assert memory.message(script.run(take))[1] == ()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        near.send(bytes(script.RECORD_BYTES + 1))
        with pytest.raises(StepError, match="cut short"):
            memory.message(script.run(take))


def test_an_outgoing_message_carries_record_and_descriptors() -> None:
    """What was put in place once can be sent by the header's address."""
    memory = Memory()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        address = memory.outgoing(b"ready", [near.fileno()])
        script.run([row("answer", "sendmsg", near.fileno(), address, 0, expect=5)])
        record, ancillary, _, _ = far.recvmsg(100, socket.CMSG_SPACE(4))
        (fd,) = struct.unpack("i", ancillary[0][2])
        assert (record, os.path.sameopenfile(fd, near.fileno())) == (b"ready", True)
        os.close(fd)


def test_everything_but_the_kept_descriptors_is_closed() -> None:
    """The rows cover every number from 3 on once, except those to keep."""
    rows = script.close_but("descriptors", 100, 102)
    assert [found[3:5] for found in rows] == [(3, 99), (101, 101), (103, 0xFFFF_FFFF)]
    assert [found[3:5] for found in script.close_but("descriptors", 3)] == [(4, 0xFFFF_FFFF)]


@pytest.mark.parametrize("machine", sorted(NUMBERS))
def test_every_call_of_a_row_has_a_number(machine: str) -> None:
    """Each machine that jobs run on knows the calls that rows are made of by the same names."""
    folder = Path(script.__file__).parent
    named = {
        name
        for part in ("script", "outfit", "layout", "landlock", "seccomp", "worker")
        for name in re.findall(r'row\(\s*(?:"\w+"|step),\s*"(\w+)"', (folder / f"{part}.py").read_text())
    }
    assert {"openat", "mount", "seccomp", "capset"} <= named
    assert named - NUMBERS[machine].keys() == set()
