"""Port: runner.signing. Is a flight record what its node wrote? Every way to change it that can be seen, is.

Called by `ringfence audit` with the files of one node, and with what is known of it elsewhere. Must never change a
file, stop at the first fault where others follow, or call checked what could not be: ``Report.unchecked`` says it.

What finds what: the hash chain and the heads that the node signed, any change, gap or swap up to the last such head;
the fleet's key, forged lines also after it, and lines of before that were made anew by who holds the node's key; heads
that were kept elsewhere (the store's anchors, receipts, events), a record that was cut back to an earlier end.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from node_agent.kernel import segments
from node_agent.kernel.segments import Segment
from runner import signing
from runner.signing import Signer
from runner.wire import flight, record
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.flight import FlightHead

__all__ = ["Anchor", "Known", "Line", "Report", "check", "read", "split"]

Line = dict[str, object]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A head of the record that was kept elsewhere; ``where`` names the place for people. ``entry``: its id there."""

    count: int
    hash: str
    where: str
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beside the files. ``node``, ``public``: whose record it must be, as its card says.

    ``opener``: opens the seeds (the fleet's key). ``stream``: the store's anchors, None if it was not asked;
    ``added``: how many it has ever taken, by its own count.
    """

    node: str
    public: str
    opener: Signer | None = None
    stream: tuple[Anchor, ...] | None = None
    added: int = 0
    heads: tuple[Anchor, ...] = ()


@dataclass(slots=True)
class Report:
    """What was found. The record is sound if ``faults`` is empty."""

    count: int = 0
    head: str = ""
    first: int = 0
    files: int = 0
    anchors: int = 0
    faults: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    #: Since which line no head is signed: the hash chain alone does not tell forged lines there.
    signed_upto: int = 0


def read(folder: int, found: Sequence[Segment]) -> Iterator[tuple[Segment, Iterable[bytes]]]:
    """Yield each file with its lines."""
    for segment in found:
        fd = os.open(segments.name_of(segment.number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            yield segment, segments.lines_of(fd)
        finally:
            os.close(fd)


def split(data: Iterable[bytes]) -> Iterator[tuple[Segment, Iterable[bytes]]]:
    """Yield the files of an export, which is all their lines in one."""
    number, lines = 0, list[bytes]()
    for line in data:
        if segments.opening_of(line):
            if lines:
                yield Segment(number, 0, segments.opening_of(lines[0])), lines
            with suppress(WireError, ValueError, TypeError):
                number = int(str(flight.parsed(flight.body_of(line)[0]).get("file")))
            lines = []
        lines.append(line)
    if lines:
        yield Segment(number, 0, segments.opening_of(lines[0])), lines


def check(
    files: Iterable[tuple[Segment, Iterable[bytes]]],
    known: Known,
    each: Callable[[Line], object] = lambda _: None,
    fault: Callable[[str], object] = lambda _: None,
) -> Report:
    """Walk a whole record. ``each`` gets every line that fits the ones before it, ``fault`` what is wrong, at once."""
    walk = _Walk(known, each, fault)
    for segment, lines in files:
        walk.file(segment, lines)
    return walk.end()


class _Walk:
    def __init__(self, known: Known, each: Callable[[Line], object], fault: Callable[[str], object]) -> None:
        self._known, self._each, self._tell = known, each, fault
        self._report = Report()
        self._before = self._link = flight.GENESIS
        self._key: bytes | None = None
        self._number = 0
        #: Heads to be met on the way, by count: (hash, where).
        self._wanted: dict[int, list[Anchor]] = {}
        for anchor in (*known.heads, *(known.stream or ())):
            self._wanted.setdefault(anchor.count, []).append(anchor)
        self._entries: dict[str, tuple[int, str, int]] = {}
        self._dropped: set[int] = set()
        self._added = 0

    def file(self, segment: Segment, lines: Iterable[bytes]) -> None:
        report, name = self._report, segments.name_of(segment.number)
        if not segment.before:
            self._fault(f"{name} does not begin as a record of flight does")
            return
        count, digest = flight.parse_head(segment.before)
        if not self._number:
            report.first, report.count, self._link = count + 1, count, bytes.fromhex(digest)
        elif segment.number != self._number + 1:
            self._fault(f"the files between {segments.name_of(self._number)} and {name} are missing")
            report.count, self._link = count, bytes.fromhex(digest)
        elif (report.count, self._link.hex()) != (count, digest):
            where = f"line {report.count} of {segments.name_of(self._number)}"
            self._fault(f"{name} goes on after line {count}, but not after {where}: the end before it was changed")
            report.count, self._link = count, bytes.fromhex(digest)
        self._number = segment.number
        report.files += 1
        for position, line in enumerate(lines):
            if not line.endswith(b"\n"):
                break
            if not self._line(name, line, first=position == 0):
                return

    def end(self) -> Report:
        report, known = self._report, self._known
        report.head = flight.head_text(report.count, self._link)
        if not report.files:
            self._fault("there is no record")
        if self._number and report.first > 1 and report.first - 1 not in self._dropped:
            self._fault(f"the record begins at line {report.first}, and no line says that older files were given up")
        for anchors in self._wanted.values():
            for anchor in anchors:
                if anchor.count >= report.first:
                    end = f"the record ends at {report.count}: it was cut back"
                    if anchor.count <= report.count:
                        end = "which is not reached behind a fault that stands above"
                    self._fault(f"{anchor.where} holds line {anchor.count}, {end}")
        self._check_stream()
        if known.opener is None:
            upto = f"{report.count - report.signed_upto} lines after the last signed head"
            report.unchecked.append(f"the lines' MACs, for want of the fleet's key: {upto} might be forged")
        if known.stream is None:
            report.unchecked.append("the anchors in the store")
        return report

    def _check_stream(self) -> None:
        """Every anchor that the record says it made must stand in the store, as long as the store keeps them."""
        known = self._known
        if known.stream is None:
            return
        if known.stream and not known.added:
            self._report.unchecked.append("how many anchors the store has taken: before Redis 7 it does not count them")
        # One more may be of an agent that died before it could note it.
        if known.added > self._added + 1:
            more = known.added - self._added
            self._fault(f"the store has taken {more} anchors that the record does not know: it was cut back")
        if known.stream:
            held = max(anchor.count for anchor in known.stream)
            if self._report.signed_upto > held:
                what = f"lines {held + 1} to {self._report.signed_upto} against the store: it has no anchor of them"
                self._report.unchecked.append(what)
        elif self._report.signed_upto:
            self._report.unchecked.append("anything against the store: it holds no anchor of this record")
        if not self._entries:
            return
        newest_ms = max(at_ms for _, _, at_ms in self._entries.values())
        kept_ms = newest_ms - int(flight.KEEP_ANCHORS_S * 1000)
        present = {anchor.entry for anchor in known.stream}
        missing = [entry for entry, (_, _, at_ms) in self._entries.items() if entry not in present and at_ms > kept_ms]
        if missing:
            self._fault(f"{len(missing)} anchors of the record are not in the store: its stream was cut or made anew")

    def _line(self, name: str, line: bytes, *, first: bool) -> bool:
        report = self._report
        number = report.count + 1
        try:
            body, mac = flight.body_of(line)
            fields = flight.parsed(body)
        except WireError:
            self._fault(f"{name}: line {number} is no line of a flight record")
            return False
        if fields["n"] != number or len(line) > flight.MAX_LINE_BYTES:
            self._fault(f"{name}: line {number} says that it is line {fields['n']}")
            return False
        self._before, self._link = self._link, flight.linked(self._link, body)
        report.count = number
        if first and not self._opened(name, fields):
            return False
        if self._key is not None:
            if not hmac.compare_digest(flight.mac(self._key, self._link), mac):
                self._fault(f"{name}: line {number} was not written by the node, or was changed since")
                self._key = None
            else:
                self._key = flight.evolve(self._key)
        self._meet(number)
        self._own(name, fields)
        self._each(fields)
        return True

    def _opened(self, name: str, fields: Line) -> bool:
        known = self._known
        if fields.get("node") != known.node or fields.get("signer") != known.public:
            self._fault(f"{name} is of another node, or of another key of it: {fields.get('node')}")
            return False
        if fields.get("fault"):
            self._fault(f"{name}: the agent found at its start: {fields['fault']}")
        self._key = None
        if known.opener is not None:
            try:
                seed = known.opener.unsealed(base64.b64decode(str(fields.get("seed", ""))))
            except ValueError:
                seed = None
            self._key = seed
            if seed is None:
                self._report.unchecked.append(f"the MACs of {name}: its seed is not sealed for this key")
        return True

    def _own(self, name: str, fields: Line) -> None:
        """Look into the record's own lines: a head that was signed before, a file that was given up."""
        if fields.get("kind") == flight.DROPPED:
            count, _ = _head_of(fields.get("upto"))
            self._dropped.add(count)
        if fields.get("kind") != flight.HEAD:
            return
        count, digest = _head_of(fields.get("head"))
        at_ms, boot = fields.get("head_at_ms"), fields.get("boot")
        here = (self._report.count - 1, self._before.hex())
        if (count, digest) != here or not isinstance(at_ms, int) or not isinstance(boot, str):
            self._fault(f"{name}: the head in line {self._report.count} is not that of the lines before it")
            return
        payload = record.dumps(FlightHead(self._known.node, boot, count, digest, at_ms))
        if not signing.verify(self._known.public, Domain.HEAD, payload, str(fields.get("sig", ""))):
            self._fault(f"{name}: the head in line {self._report.count} is not signed by the node")
            return
        self._report.signed_upto = count
        if entry := str(fields.get("entry", "")):
            self._entries[entry] = (count, digest, at_ms)
            added = fields.get("added")
            self._added = added if isinstance(added, int) else self._added

    def _meet(self, number: int) -> None:
        for anchor in self._wanted.pop(number, ()):
            if anchor.hash != self._link.hex():
                self._fault(f"{anchor.where} holds another line {number} than the record: forked or rolled back")
            else:
                self._report.anchors += 1

    def _fault(self, text: str) -> None:
        self._report.faults.append(text)
        self._tell(text)


def _head_of(text: object) -> tuple[int, str]:
    try:
        return flight.parse_head(str(text))
    except WireError:
        return -1, ""
