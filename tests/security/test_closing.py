"""What a job hands to the agent, or leaves behind, to be closed: none of it takes the loop's time (attacks 41, 51).

As root at level A, as an ordinary user at level B.
"""

from __future__ import annotations

import os
import socket
import time

import pytest

from runner.wire import codec
from tests.containment.rig import PROFILE, Rig, in_rig, python
from tests.support.wait import await_until

#: A socket whose last holder waits a minute in close(2), handed to the agent with a word that it reads.
LINGERS = r"""
import os, socket, struct, sys
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
try:
    while True:
        near.send(bytes(65536), socket.MSG_DONTWAIT)
except BlockingIOError:
    pass
near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
told = [struct.unpack("ii", near.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))]
channel = socket.socket(fileno=os.dup(100))
for held in ([near.fileno()], [listener.fileno(), far.fileno()]):
    try:
        socket.send_fds(channel, [b"\x14"], held)
        told.append("sent")
    except PermissionError:
        told.append("refused")
print(told)
"""
LOST_S = 5.0
#: What takes long to free, where the agent is the last to hold it.
FILLS = r"""
import os, socket, sys
kind, size = sys.argv[1], int(sys.argv[2])
if kind == "flight":
    held = os.memfd_create("x")
else:
    held = os.open(f"{kind}/big", os.O_CREAT | os.O_WRONLY)
os.write(held, bytes(size))
if kind == "flight":
    channel = socket.socket(fileno=os.dup(100))
    for data in (b"", b"\x14"):
        try:
            socket.send_fds(channel, [data], [held] if data else [])
        except PermissionError:
            pass  # Linux 6.16, once the agent has heard that the worker is ready
"""


@pytest.mark.parametrize("hurried", [False, True])
def test_attack_51_a_descriptor_that_takes_long_to_close_holds_nobody_up(node_name: str, *, hurried: bool) -> None:
    """No socket of a job lingers, and once a worker is ready its node takes no descriptor from it (Linux 6.16)."""

    async def scenario(rig: Rig) -> None:
        if hurried:
            await rig.run(["true"])
            await await_until(lambda: rig.slot.waits_for(rig.plan(), PROFILE), "a worker to stand")
            payload = {"argv": python(LINGERS), "env": {}, "job": "main-job", "attempt": 1, "tags": {}}
            attempt = rig.slot.eager(rig.plan(), codec.dump(payload))
            assert attempt is not None
        else:
            attempt = await rig.start(python(LINGERS))
        await attempt.verdict
        began_s = time.monotonic()
        while True:
            try:
                if not attempt.channel.recv(64, socket.MSG_DONTWAIT):
                    break
            except BlockingIOError:
                break
        out = (await rig.finish(attempt)).out.decode()
        assert time.monotonic() - began_s < LOST_S
        assert out.startswith("[(0, 0), ")
        if not hurried and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16):
            assert out.count("refused") == 2

    in_rig(node_name, scenario)


@pytest.mark.parametrize(
    ("kind", "size", "slow"), [("/tmp", 16 << 20, True), ("/work", 16 << 20, True), ("/tmp", 9, False)]
)
def test_attack_41_what_a_job_left_in_memory_is_freed_away_from_the_loop(
    node_name: str, kind: str, size: int, *, slow: bool
) -> None:
    """The agent holds a job's own file systems last: the files in them go in a thread, if there is much in them."""

    async def scenario(rig: Rig) -> None:
        attempt = await rig.start([*python(FILLS), kind, str(size)])
        assert (await rig.finish(attempt)).verdict.code == 0
        assert (attempt.closing is not None) == slow
        await attempt.freed()

    in_rig(node_name, scenario)


def test_attack_41_what_a_hurried_job_put_into_its_channel_is_closed_away_from_the_loop(node_name: str) -> None:
    """Before its READY was heard a job can hand over anything, also behind an empty record."""

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        for argv, slow in (([*python(FILLS), "flight", "9"], True), (["true"], False)):
            await await_until(lambda: rig.slot.waits_for(rig.plan(), PROFILE), "a worker to stand")
            payload = {"argv": argv, "env": {}, "job": "main-job", "attempt": 1, "tags": {}}
            attempt = rig.slot.eager(rig.plan(), codec.dump(payload))
            assert attempt is not None
            assert (await rig.finish(attempt)).verdict.code == 0
            assert (attempt.closing is not None) == slow
            await attempt.freed()

    in_rig(node_name, scenario)
