"""The flight recorder's writing side: a line before each action, whole or not at all, whatever happens to the disk."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node_agent.kernel import recordcheck, rooms, segments
from node_agent.kernel.errors import CallError
from node_agent.kernel.recordcheck import Known, Report
from node_agent.kernel.recorder import Recorder
from runner.cli import recordsource
from runner.signing import Signer
from runner.wire import flight
from runner.wire.calls import ErrorCode

NODE = Signer(bytes(range(32)))
FLEET = Signer(bytes(range(32, 64)))
JOB = "main-01m8q0rvgjs7zdbddn2hp670ac.1"
Opens = Callable[..., Recorder]


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Opens]:
    """Open the record below tmp_path; closed at the end."""
    made: list[Recorder] = []

    def opened(**changes: object) -> Recorder:
        options: dict[str, object] = {"node": "n1", "signer": NODE, "fleet": FLEET.public, "reserve_bytes": 0}
        made.append(Recorder(tmp_path / "flight", **(options | changes)))  # type: ignore[arg-type] # real names
        return made[-1]

    yield opened
    for one in made:
        one.close()


def looked(path: Path, **known: object) -> tuple[Report, list[recordcheck.Line]]:
    """Check the record below ``path`` with the fleet's key; return what was found and every line."""
    lines: list[recordcheck.Line] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        facts: dict[str, object] = {"opener": FLEET, "stream": ()} | known
        report = recordcheck.check(
            recordcheck.read(fd, segments.found(fd)),
            Known("n1", NODE.public, **facts),  # type: ignore[arg-type] # real names
            lines.append,
        )
    finally:
        os.close(fd)
    return report, lines


def sound(path: Path) -> list[recordcheck.Line]:
    """The record is sound; return its lines."""
    report, lines = looked(path)
    assert report.faults == []
    assert report.unchecked == []
    return lines


def test_f1_a_line_is_in_the_file_before_write_returns(opens: Opens, tmp_path: Path) -> None:
    """What write() has returned for can be read by others: nothing waits in the process."""
    record = opens()
    record.write("call", JOB, op="file.write", bytes=3, new=True, what=None)
    last = sound(tmp_path / "flight")[-1]
    assert (last["kind"], last["attempt"], last["op"], last["bytes"], last["new"], last["what"]) == (
        *("call", JOB, "file.write", 3, True, None),
    )


def test_f1_sigkill_loses_no_line(tmp_path: Path) -> None:
    """Every line whose write() returned outlives the agent's SIGKILL."""
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from node_agent.kernel.recorder import Recorder
from runner.cli import recordsource
from runner.signing import Signer
record = Recorder(Path({str(tmp_path)!r}) / "flight", node="n1", signer=Signer(bytes(range(32))),
                  fleet={FLEET.public!r}, reserve_bytes=0)
for number in range(500):
    record.write("call", {JOB!r}, number=number)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert [line["number"] for line in sound(tmp_path / "flight") if line["kind"] == "call"] == list(range(500))


VALUES = st.one_of(
    st.text(max_size=900), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(), st.lists(st.integers())
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.text(min_size=1, max_size=20), VALUES, max_size=30))
def test_f1_every_value_makes_a_line(opens: Opens, tmp_path: Path, fields: dict[str, object]) -> None:
    """Whatever a caller passes becomes one line that parses and is not too long; no call is lost to a type error."""
    record = opens()
    before = record.count
    assert record.note("call", JOB, fields)  # type: ignore[arg-type] # what a careless caller passes
    name = max(path.name for path in (tmp_path / "flight").glob("*.rec"))
    line = (tmp_path / "flight" / name).read_bytes().splitlines(keepends=True)[-1]
    assert len(line) <= flight.MAX_LINE_BYTES
    found = json.loads(flight.body_of(line)[0])
    assert (found["n"], found["kind"], found["attempt"]) == (before + 1, "call", JOB)
    record.close()


@pytest.mark.parametrize("fault", ["eio", "short", "full"])
def test_f1_without_a_record_there_is_no_action(opens: Opens, tmp_path: Path, fault: str) -> None:
    """A line that can't be written whole raises UNRECORDED, leaves nothing behind, and the chain goes on after it."""
    broken = False

    def write(fd: int, data: bytes) -> int:
        if not broken:
            return os.write(fd, data)
        if fault == "short":
            return os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC if fault == "full" else errno.EIO, "as the test says")

    record = opens(write=write)
    record.write("call", JOB, op="one")
    broken = True
    with pytest.raises(CallError) as caught:
        record.write("call", JOB, op="two")
    assert caught.value.error is ErrorCode.UNRECORDED
    assert record.failed
    assert not record.note("kill.ordered", JOB), "a kill is noted as far as it can be, and never raises"
    assert record.misses == 2
    broken = False
    assert record.heal()
    assert not record.failed
    record.write("call", JOB, op="three")
    assert [line.get("op") for line in sound(tmp_path / "flight") if line["kind"] == "call"] == ["one", "three"]


def test_attack_40_a_full_disk_is_written_on_from_the_reserve(opens: Opens, tmp_path: Path) -> None:
    """On a full disk the record frees its own reserve and goes on; only when that is used up is there no action."""
    reserve = tmp_path / "flight" / "audit.reserve"
    full = False

    def write(fd: int, data: bytes) -> int:
        if full and reserve.stat().st_size > 4 << 20:
            raise OSError(errno.ENOSPC, "the test's disk is full")
        return os.write(fd, data)

    record = opens(write=write, reserve_bytes=8 << 20)
    assert reserve.stat().st_blocks * 512 >= 8 << 20, "the reserve holds real blocks"
    full = True
    record.write("call", JOB, op="on the reserve")
    assert not record.failed
    assert sound(tmp_path / "flight")[-1]["op"] == "on the reserve"


def test_f1_a_torn_line_is_no_line_and_the_next_start_goes_on(opens: Opens, tmp_path: Path) -> None:
    """What power loss leaves of a line is skipped: the next start's file continues after the last whole one."""
    record = opens()
    record.write("call", JOB, op="whole")
    record.close()
    (file,) = (tmp_path / "flight").glob("*.rec")
    with file.open("ab") as torn:
        torn.write(b'{"n":3,"at_ms":1,"ki')
    again = opens()
    assert again.fault == ""
    again.write("call", JOB, op="after")
    assert [line["n"] for line in sound(tmp_path / "flight")] == [1, 2, 3, 4]


def test_f2_rotation_keeps_the_chain_and_says_what_it_gives_up(opens: Opens, tmp_path: Path) -> None:
    """Files rotate by size, the oldest go by a line that names their end; one that went otherwise is missed."""
    record = opens(segment_bytes=4096, keep_bytes=5 * 4096)
    for number in range(300):
        record.write("call", JOB, number=number)
    lines = sound(tmp_path / "flight")
    assert lines[-1]["n"] == record.count
    assert int(str(lines[0]["n"])) > 1
    files = sorted((tmp_path / "flight").glob("*.rec"))
    assert 2 < len(files) <= 6
    files[2].unlink()
    report, _ = looked(tmp_path / "flight")
    assert any("missing" in fault for fault in report.faults)


def test_f2_the_first_file_is_missed_if_nothing_gave_it_up(opens: Opens, tmp_path: Path) -> None:
    """A record that begins later than at its first line must say why."""
    record = opens(segment_bytes=4096)
    for number in range(60):
        record.write("call", JOB, number=number)
    min((tmp_path / "flight").glob("*.rec")).unlink()
    report, _ = looked(tmp_path / "flight")
    assert any("no line says" in fault for fault in report.faults)


def flood(record: Recorder, fields: dict[str, str], times: int) -> None:
    """Write one line many times."""
    for _ in range(times):
        record.write("call", JOB, **fields)


def test_attack_32_a_job_s_flood_does_not_push_out_the_others(opens: Opens, tmp_path: Path) -> None:
    """One attempt has bounded room in the record; over it its calls are answered SLOW_DOWN, and others go on."""
    now = [10**18]
    record = opens(clock=lambda: now[0])
    wide = {str(number): "x" * 300 for number in range(10)}
    flood(record, wide, rooms.ATTEMPT_BYTES // 3400)
    with pytest.raises(CallError) as caught:
        flood(record, wide, 900)
    assert caught.value.error is ErrorCode.SLOW_DOWN
    assert not record.failed
    record.write("call", JOB.replace("ac.1", "ad.1"), op="of a neighbour")
    record.note("kill.ordered", JOB)
    now[0] += 10**9
    record.write("call", JOB, op="a second later")
    record.forget(JOB)
    record.write("call", JOB, **wide)


def test_f1_ten_thousand_lines_a_second(opens: Opens) -> None:
    """Chain, MAC and write(2) included, 10,000 lines take less than a second of processor time."""
    record = opens()
    began_s = time.process_time()
    for number in range(10_000):
        record.note("call", JOB, {"op": "file.write", "resource": "/state/a", "sha256": "0" * 64, "bytes": number})
    assert time.process_time() - began_s < 1.0


def test_f1_what_is_synced_is_synced_by_another_thread(opens: Opens) -> None:
    """Everything written is named to be put on disk once, the file before a rotation included."""
    record = opens(segment_bytes=4096)
    for number in range(40):
        record.write("call", JOB, number=number)
    work = record.syncing()
    assert work is not None
    work()
    assert not record.dirty
    assert record.syncing() is None
    record.write("call", JOB)
    assert record.dirty


def test_a_record_that_others_can_change_is_not_written(tmp_path: Path) -> None:
    """A folder that is open to others makes the recorder fail with what to do; nothing is written there."""
    (tmp_path / "flight").mkdir(mode=0o777)
    (tmp_path / "flight").chmod(0o777)
    record = Recorder(tmp_path / "flight", node="n1", signer=NODE, fleet=None, reserve_bytes=0)
    assert "chmod 700" in record.failed
    with pytest.raises(CallError):
        record.write("call", JOB)
    assert list((tmp_path / "flight").iterdir()) == []
    (tmp_path / "flight").chmod(0o700)
    record.write("call", JOB, op="first")
    assert not record.failed
    record.close()
    report, lines = looked(tmp_path / "flight", opener=NODE)
    assert (report.faults, [line.get("op") for line in lines]) == ([], [None, "first"])


def test_f1_words_of_a_job_that_holds_a_value_are_not_written(opens: Opens, tmp_path: Path) -> None:
    """A job that was handed a secret can't have the record say it: its own words are kept as a hash and a length."""
    record, other = opens(), JOB.replace("ac.1", "ad.1")
    record.veiled.add(JOB)
    record.write("call", JOB, op="file.write", resource="/state/hunter2", sha256="0" * 64)
    record.write("call", other, op="file.write", resource="/state/plain")
    record.forget(JOB)
    data = b"".join(path.read_bytes() for path in (tmp_path / "flight").glob("*.rec"))
    assert b"hunter2" not in data
    assert b"14 characters" in data
    assert b"/state/plain" in data
    assert b"file.write" in data


def test_seeds_are_sealed_for_the_fleet_alone(opens: Opens, tmp_path: Path) -> None:
    """The node that wrote the record can't open its seeds: it can make no lines of before."""
    opens().close()
    (file,) = (tmp_path / "flight").glob("*.rec")
    first = json.loads(flight.body_of(file.read_bytes().splitlines(keepends=True)[0])[0])
    box = base64.b64decode(cast("str", first["seed"]))
    assert NODE.unsealed(box) is None
    assert len(FLEET.unsealed(box) or b"") == flight.SEED_BYTES


def test_f3_a_follower_sees_every_line_over_rotations_once_and_in_order(opens: Opens, tmp_path: Path) -> None:
    """Whoever follows reads each file to its end and goes on in the next, while the recorder rotates under him."""
    record = opens(segment_bytes=4096)
    rounds = iter(range(8))

    def sleep(_: float) -> None:
        next_round = next(rounds, None)
        if next_round is None:
            raise KeyboardInterrupt
        for number in range(25):
            record.write("call", JOB, round=next_round, number=number)

    seen: list[recordcheck.Line] = []
    faults: list[str] = []
    fd = os.open(tmp_path / "flight", os.O_RDONLY)
    with pytest.raises(KeyboardInterrupt):
        recordcheck.check(
            recordsource.following(fd, sleep), Known("n1", NODE.public, FLEET, ()), seen.append, faults.append
        )
    os.close(fd)
    assert faults == []
    assert [line["n"] for line in seen] == list(range(1, record.count + 1))
    assert record.count > 200
