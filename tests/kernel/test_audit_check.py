"""Every way to doctor a flight record, really tried on its files: the checker finds each (row F2, attack 31)."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node_agent.kernel import recordcheck, segments
from node_agent.kernel.recordcheck import Anchor, Known, Report
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.recordlines import Field
from runner.signing import Signer
from runner.wire import flight, record
from runner.wire.envelope import Domain
from runner.wire.flight import FlightHead

NODE, OTHER, FLEET = (Signer(bytes([number]) * 32) for number in (1, 2, 3))
JOB = "main-01m8q0rvgjs7zdbddn2hp670ac.1"
LINES = 40


@dataclass
class Made:
    """A record of 40 lines in two files with a signed, anchored head in the middle and at the end."""

    folder: Path
    stream: list[Anchor]
    #: As an event or a receipt in the middle of the second file holds it, after the last anchor.
    held: Anchor

    @property
    def last(self) -> Path:
        return max(self.folder.glob("*.rec"))

    def check(
        self, *, key: bool = True, stream: list[Anchor] | None = None, held: bool = False, added: int = 2
    ) -> Report:
        """Check it; ``key``: with the fleet's key; ``held``: with a head that was kept elsewhere."""
        anchors = tuple(self.stream if stream is None else stream)
        heads = (self.held,) if held else ()
        known = Known("n1", NODE.public, FLEET if key else None, anchors, added, heads)
        return checked(self.folder, known)

    def lines(self) -> list[bytes]:
        return self.last.read_bytes().splitlines(keepends=True)

    def put(self, lines: list[bytes]) -> None:
        self.last.write_bytes(b"".join(lines))


def checked(folder: Path, known: Known) -> Report:
    """Check a folder's files."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        return recordcheck.check(recordcheck.read(fd, segments.found(fd)), known)
    finally:
        os.close(fd)


def sign(one: Recorder, signer: Signer = NODE, added: int = 1) -> Anchor:
    """Sign the head as the anchors do, and note it."""
    at_ms = 1_796_000_000_000 + one.count
    head = FlightHead(one.node, "b00t", one.count, one.link.hex(), at_ms)
    signature = signer.sign(Domain.HEAD, record.dumps(head))
    entry = f"{at_ms}-0"
    fields: dict[str, Field] = {
        "head": head.text,
        "boot": "b00t",
        "head_at_ms": at_ms,
        "sig": signature,
        "entry": entry,
        "added": added,
    }
    one.note(flight.HEAD, "", fields)
    return Anchor(head.count, head.hash, f"anchor {entry}", entry)


def make(folder: Path, *, signer: Signer = NODE, node: str = "n1", lines: int = LINES) -> Made:
    """Write a record, closed in the middle by a restart."""
    stream = []
    for added in (1, 2):
        one = Recorder(folder, node=node, signer=signer, fleet=FLEET.public, reserve_bytes=0)
        for number in range(lines // 2):
            one.note("call", JOB, {"op": "file.write", "number": number})
        stream.append(sign(one, signer, added))
        for number in range(3):
            one.note("job.ended", JOB, {"number": number})
        held = Anchor(one.count, one.link.hex(), "a receipt")
        one.close()
    return Made(folder, stream, held)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A fresh record, sound with everything that is known of it."""
    found = make(tmp_path / "flight")
    for key in (True, False):
        report = found.check(key=key, held=True)
        assert report.faults == []
        assert report.anchors == 3
        assert bool(report.unchecked) is not key
    return found


def test_f2_the_newest_row_is_deleted(made: Made) -> None:
    """A record without its newest line is not the one that an end or a receipt has named."""
    made.put(made.lines()[:-1])
    assert made.check(key=False).faults == [], "nothing on this host can tell: that is why heads leave it"
    assert any("cut back" in fault for fault in made.check(key=False, held=True).faults)


def test_f2_rows_are_deleted_back_behind_an_anchor(made: Made) -> None:
    """A record that ends before an anchor of the store was cut."""
    made.put(made.lines()[:-5])
    assert any("cut back" in fault for fault in made.check(key=False).faults)


def test_f2_a_row_in_the_middle_is_deleted(made: Made) -> None:
    """A gap is found, also if all later numbers are counted down."""
    lines = made.lines()
    made.put(lines[:5] + lines[6:])
    assert made.check(key=False).faults
    numbers = [json.loads(flight.body_of(line)[0])["n"] for line in lines]
    moved = [
        line.replace(b'"n":%d' % number, b'"n":%d' % (number - 1), 1)
        for line, number in zip(lines[6:], numbers[6:], strict=True)
    ]
    made.put(lines[:5] + moved)
    assert made.check(key=True).faults
    assert made.check(key=False).faults


def test_f2_a_forged_row_with_an_empty_mac(made: Made) -> None:
    """A line without the key's MAC is forged: none, a wrong one, one of another line."""
    lines = made.lines()
    body = b'{"n":%d,"at_ms":1,"kind":"job.admitted","attempt":"","forged":true}' % (
        json.loads(flight.body_of(lines[-1])[0])["n"] + 1
    )
    for mac in (b"", b"0" * 32, lines[-1][-33:-1]):
        made.put([*lines, body + b" " + mac + b"\n"])
        assert made.check(key=True).faults, mac
    report = made.check(key=False)
    assert report.faults == [] or "no line" in report.faults[0]
    assert any("might be forged" in what for what in report.unchecked), "without the key that is said"


def test_f2_a_row_is_edited(made: Made) -> None:
    """Each single changed byte of the last file is found, with the fleet's key at its line, without it by the heads."""
    data = made.last.read_bytes()
    lines = len(made.lines())
    rng = random.Random(31)
    before_head = data.index(b'"kind":"record.head"')
    for at in rng.sample(range(len(data)), 150):
        made.last.write_bytes(data[:at] + bytes([data[at] ^ rng.choice((1, 2, 4, 16, 32, 128))]) + data[at + 1 :])
        report = made.check(key=True, held=True)
        assert report.faults, (at, lines)
        in_mac = data.rfind(b" ", 0, at) > data.rfind(b"}", 0, at)
        if at < before_head and not in_mac:
            assert made.check(key=False).faults, at


STEPS = st.lists(
    st.tuples(st.sampled_from(("drop", "twice", "swap", "byte", "cut")), st.integers(0, 999), st.integers(0, 7)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_f2_no_sequence_of_changes_passes(made: Made, steps: list[tuple[str, int, int]]) -> None:
    """Whatever is dropped, doubled, moved, flipped or cut: the checker says so exactly if the bytes are others."""
    original = made.last.read_bytes()
    try:
        for what, at, bit in steps:
            lines = made.lines() or [b"\n"]
            one = at % len(lines)
            if what == "drop":
                del lines[one]
            elif what == "twice":
                lines.insert(one, lines[one])
            elif what == "swap":
                lines[one], lines[-1 - one] = lines[-1 - one], lines[one]
            elif what == "byte":
                place = at % len(lines[one])
                lines[one] = lines[one][:place] + bytes([lines[one][place] ^ (1 << bit)]) + lines[one][place + 1 :]
            else:
                lines[one] = lines[one][: at % len(lines[one])]
                del lines[one + 1 :]
            made.put(lines)
        assert bool(made.check(held=True).faults) is (made.last.read_bytes() != original)
        made.check(key=False)
    finally:
        made.last.write_bytes(original)


def test_f2_a_file_is_swapped(made: Made, tmp_path: Path) -> None:
    """Another node's file, and an older state of the same one, are no part of this record."""
    foreign = make(tmp_path / "other", signer=OTHER, node="n2")
    mine = made.last.read_bytes()
    made.last.write_bytes(foreign.last.read_bytes())
    assert made.check(key=False).faults
    made.last.write_bytes(mine[: len(mine) // 2])
    assert any("cut back" in fault for fault in made.check(key=False).faults)
    made.last.unlink()
    assert any("cut back" in fault for fault in made.check(key=False).faults)


def test_attack_31_both_the_record_and_its_anchors_are_rolled_back(made: Made) -> None:
    """Log cut on the node and anchors overwritten in the store to match: a receipt that a client keeps tells."""
    made.last.unlink()
    rolled = made.stream[:1]
    assert made.check(stream=rolled).faults == [], "files and store agree: neither can tell"
    assert any("a receipt" in fault and "cut back" in fault for fault in made.check(stream=rolled, held=True).faults)


def test_attack_31_the_stream_alone_is_cut(made: Made) -> None:
    """The record says which anchors it made: a stream without them was cut, even if nothing newer is in it."""
    assert any("not in the store" in fault for fault in made.check(stream=made.stream[:1]).faults)
    assert any("not in the store" in fault for fault in made.check(stream=[]).faults)
    assert any("does not know" in fault for fault in made.check(added=9).faults)


def test_attack_31_the_record_is_made_anew_by_who_holds_the_node_s_key(made: Made, tmp_path: Path) -> None:
    """A whole new record, rightly chained, sealed and signed, is another one than what was anchored."""
    forged = make(tmp_path / "forged")
    for path in made.folder.glob("*.rec"):
        path.write_bytes((forged.folder / path.name).read_bytes())
    alone = checked(made.folder, Known("n1", NODE.public, FLEET))
    assert alone.faults == [], "who holds the node's key can do that"
    assert any("forked" in fault for fault in made.check().faults)


def test_f2_lines_of_before_can_t_be_made_by_who_breaks_in_later(made: Made) -> None:
    """The node's key signs a new head over an edited tail; without the old MAC keys the fleet's key finds it."""
    lines = made.lines()
    edited = [line.replace(b'"number":1', b'"number":7') for line in lines[:-4]]
    link = bytes.fromhex(flight.parse_head(segments.opening_of(lines[0]))[1])
    for line in edited:
        link = flight.linked(link, flight.body_of(line)[0])
    number = json.loads(flight.body_of(edited[-1])[0])["n"]
    head = FlightHead("n1", "b00t", number, link.hex(), 5)
    fields = {"n": number + 1, "at_ms": 5, "kind": flight.HEAD, "attempt": "", "head": head.text, "boot": "b00t"}
    fields |= {"head_at_ms": 5, "sig": NODE.sign(Domain.HEAD, record.dumps(head)), "entry": ""}
    body = json.dumps(fields, separators=(",", ":")).encode()
    made.put([*edited, body + b" " + b"0" * 32 + b"\n"])
    blind = checked(made.folder, Known("n1", NODE.public))
    assert blind.faults == [], "without the fleet's key the node's own signature is all there is"
    report = checked(made.folder, Known("n1", NODE.public, FLEET))
    assert any("not written by the node" in fault for fault in report.faults)


def test_a_head_of_another_key_is_none(tmp_path: Path) -> None:
    """A head in the record that the node's key did not sign is a fault."""
    one = Recorder(tmp_path / "flight", node="n1", signer=NODE, fleet=None, reserve_bytes=0)
    one.note("call", JOB)
    sign(one, OTHER)
    one.close()
    report = checked(tmp_path / "flight", Known("n1", NODE.public))
    assert any("not signed by the node" in fault for fault in report.faults)


def test_an_export_is_checked_like_the_files(made: Made) -> None:
    """All lines in one stream are the same record."""
    data = b"".join(path.read_bytes() for path in sorted(made.folder.glob("*.rec")))
    known = Known("n1", NODE.public, FLEET, tuple(made.stream), 2)
    report = recordcheck.check(recordcheck.split(data.splitlines(keepends=True)), known)
    assert report.faults == []
    assert (report.files, report.head) == (2, made.check().head)
    half = data[: len(data) // 2]
    assert recordcheck.check(recordcheck.split(half.splitlines(keepends=True)), known).faults


def test_what_is_no_record_is_said_so(tmp_path: Path) -> None:
    """An empty folder, an empty file and noise are faults, never a crash."""
    known = Known("n1", NODE.public, FLEET)
    (tmp_path / "flight").mkdir()
    assert checked(tmp_path / "flight", known).faults == ["there is no record"]
    rng = random.Random(4)
    for data in (b"", b"\n", b"{}\n", b"{} " + b"0" * 32 + b"\n", rng.randbytes(5000), b'{"n":[]} x\n' * 9):
        (tmp_path / "flight" / "00000001.rec").write_bytes(data)
        assert checked(tmp_path / "flight", known).faults
