"""What a job prints reaches the agent without the values it was handed, in whatever pieces, however slow the reader."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.wait import wait_until

VALUE = b"canary-value-0123456789"
#: One whose rule ends the job.
DIRE = b"canary-dire-0123456789"
#: The uid that it takes on where that is possible.
SCRUB_UID = 1_900_000_990


class Scrub:
    """The scrubber's process with the broker's end of its socket."""

    def __init__(self) -> None:
        self.line, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(10)
        words = [sys.executable, "-I", "-B", "-m", "broker.scrub", str(far.fileno())]
        if os.geteuid() == 0:
            words.append(str(SCRUB_UID))
        self.process = subprocess.Popen(words, pass_fds=[far.fileno()], env={})
        far.close()

    def say(self, *fds: int, **record: object) -> None:
        """Send one order."""
        socket.send_fds(self.line, [json.dumps(record).encode()], list(fds))

    def hear(self) -> dict[str, Any]:
        """Return what it says."""
        found: dict[str, Any] = json.loads(self.line.recv(65536))
        return found

    def streams(self, attempt: str) -> tuple[int, int, int, int]:
        """Put it between a job and an agent; returns the job's two write ends and the agent's two read ends."""
        *ends, alarm = self.alarmed(attempt)
        os.close(alarm)
        out, err, agent_out, agent_err = ends
        return out, err, agent_out, agent_err

    def alarmed(self, attempt: str) -> list[int]:
        """Like `streams`, with the agent's end of the alarm as the fifth."""
        pairs = [os.pipe() for _ in range(5)]
        (out_read, out), (err_read, err), (agent_out, to_out), (agent_err, to_err), (heard, alarm) = pairs
        self.say(out_read, err_read, to_out, to_err, alarm, op="streams", attempt=attempt)
        for fd in (out_read, err_read, to_out, to_err, alarm):
            os.close(fd)
        return [out, err, agent_out, agent_err, heard]


@pytest.fixture
def scrub() -> Iterator[Scrub]:
    """A scrubber that knows one value of one attempt."""
    made = Scrub()
    made.say(op="value", attempt="a.1", name="KEY", value=base64.b64encode(VALUE).decode(), kill=False)
    made.say(op="value", attempt="a.1", name="DIRE", value=base64.b64encode(DIRE).decode(), kill=True)
    yield made
    made.line.close()
    assert made.process.wait(10) == 0


def read_all(fd: int) -> bytes:
    """Return a pipe's bytes to its end."""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_both_streams_are_clean(scrub: Scrub) -> None:
    """Both streams lose the value, also split over writes, and the broker is told that something was masked."""
    out, err, agent_out, agent_err = scrub.streams("a.1")
    os.write(out, b"key: " + VALUE[:7])
    os.write(out, VALUE[7:] + b"\n")
    os.write(err, base64.b64encode(VALUE) + b" plain\n")
    os.close(out)
    os.close(err)
    assert read_all(agent_out) == b"key: [secret:KEY]\n"
    text = read_all(agent_err)
    assert b"[secret:KEY]" in text
    assert text.endswith(b" plain\n")
    assert [scrub.hear(), scrub.hear()] == [{"leak": "a.1", "hits": 1, "names": ["KEY"]}] * 2


def test_the_agent_hears_of_each_secret_once(scrub: Scrub) -> None:
    """Before the masked bytes come: its name and whether the job is to end, never the value."""
    out, err, agent_out, agent_err, heard = scrub.alarmed("a.1")
    os.write(out, VALUE + b"\n" + DIRE + b"\n" + VALUE + b"." * 400)
    assert os.read(agent_out, 14) == b"[secret:KEY]\n["
    told = os.read(heard, 4096)
    assert sorted(told.splitlines()) == [b'{"name": "DIRE", "kill": true}', b'{"name": "KEY", "kill": false}']
    for fd in (out, err):
        os.close(fd)
    assert read_all(heard) == b""
    for fd in (agent_out, agent_err):
        read_all(fd)


def test_another_jobs_stream_is_left_alone(scrub: Scrub) -> None:
    """Only the values of the attempt itself are looked for."""
    out, err, agent_out, agent_err = scrub.streams("b.1")
    os.write(out, VALUE)
    os.close(out)
    os.close(err)
    assert read_all(agent_out) == VALUE
    assert read_all(agent_err) == b""


def test_a_slow_reader_holds_up_its_own_job_alone(scrub: Scrub) -> None:
    """A megabyte that nobody reads waits in the job's pipe; another stream passes meanwhile; then all of it comes."""
    size = 1 << 20
    out, err, agent_out, agent_err = scrub.streams("a.1")
    writer = threading.Thread(target=_write_all, args=(out, b"x" * size))
    writer.start()
    second, second_err, agent_second, agent_second_err = scrub.streams("a.1")
    os.write(second, b"quick\n")
    os.close(second)
    assert read_all(agent_second) == b"quick\n"
    assert writer.is_alive()
    assert len(read_all(agent_out)) == size
    writer.join(10)
    for fd in (err, second_err, agent_err, agent_second_err):
        os.close(fd)


def test_an_agent_that_goes_away(scrub: Scrub) -> None:
    """When nobody reads any more the job's pipe breaks, and the scrubber goes on."""
    out, err, agent_out, agent_err = scrub.streams("a.1")
    os.close(agent_out)

    def broken() -> bool:
        try:
            os.write(out, b"x" * 4096)
        except BrokenPipeError:
            return True
        return False

    wait_until(broken, "the job's pipe breaks")
    for fd in (out, err, agent_err):
        os.close(fd)
    test_another_jobs_stream_is_left_alone(scrub)


def test_results(scrub: Scrub) -> None:
    """A result's file is copied without the value; one that is no file is answered with an error."""
    source, target = os.memfd_create("in"), os.memfd_create("out")
    os.write(source, b'{"ok":"' + VALUE + b'"}')
    scrub.say(source, target, op="file", attempt="a.1", id=7)
    assert scrub.hear() == {"file": 7, "leaked": {"KEY": False}}
    assert os.pread(target, 100, 0) == b'{"ok":"[secret:KEY]"}'
    read_end, write_end = os.pipe()
    scrub.say(read_end, target, op="file", attempt="a.1", id=8)
    assert scrub.hear()["err"]
    for fd in (source, target, read_end, write_end):
        os.close(fd)


def test_forgotten_values_are_gone(scrub: Scrub) -> None:
    """After `forget` a stream of that attempt is passed as it is."""
    scrub.say(op="forget", attempt="a.1")
    out, err, agent_out, agent_err = scrub.streams("a.1")
    os.write(out, VALUE)
    os.close(out)
    os.close(err)
    assert read_all(agent_out) == VALUE
    os.close(agent_err)


def test_attack_07_the_scrubber_is_confined(scrub: Scrub) -> None:
    """It has no capability, no new privileges, a filter, and under root a user of its own."""
    test_another_jobs_stream_is_left_alone(scrub)
    with open(f"/proc/{scrub.process.pid}/status", encoding="ascii") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    if os.geteuid() == 0:
        assert status["Uid"].split() == [str(SCRUB_UID)] * 4


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.close(fd)
