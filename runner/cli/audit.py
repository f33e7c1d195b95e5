"""`ringfence audit`: check, search, hand on and follow the flight record of the agents on this host.

Port: node_agent.kernel. Called by commands.py. Must never change a record, and never call one sound that was not held
against what is kept of it elsewhere: what could not be asked is said.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from node_agent.kernel import recordcheck, segments
from node_agent.kernel.recordcheck import Known, Line, Report
from runner.cli import recordsource
from runner.cli.options import HomeOption, JsonOption, RedisOption, moment
from runner.cli.output import print_json, print_line, say
from runner.cli.recordsource import Folder
from runner.cli.site import site_of
from runner.errors import ConfigError, UsageError
from runner.home import Home
from runner.wire import ids
from runner.wire.times import iso

__all__ = ["audit"]

_FAULTY: Final = 1
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
#: Kinds whose verdict stands in their name.
_VERDICTS: Final = {
    "job.admitted": "allow",
    "job.refused": "deny",
    "net.denied": "deny",
    "secret.approved": "allow",
    "secret.denied": "deny",
    "call": "allow",
}
#: The record's own lines, which only `--all` shows.
_OWN: Final = "record."

audit = typer.Typer(
    name="audit", help="The flight record of the agents on this host (docs/recorder.md).", no_args_is_help=True
)

NodeOption = Annotated[str | None, typer.Option("--node", metavar="N", help="Only this node's record.")]
FileOption = Annotated[Path | None, typer.Option("--file", metavar="FILE", help="An export, with --node.")]
KeyOption = Annotated[
    Path | None, typer.Option("--fleet-key", metavar="FILE", help="Opens the seeds; default HOME/keys/fleet.key.")
]
JobOption = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job's lines.")]
KindOption = Annotated[str | None, typer.Option("--kind", metavar="K", help="Only this kind, or `job.` for all of it.")]
SinceOption = Annotated[str | None, typer.Option("--since", metavar="T", help="A time with zone, or 90s, 15m, 2h, 1d.")]
VerdictOption = Annotated[str | None, typer.Option("--verdict", metavar="V", help="Only allow, deny or ask.")]


@dataclass(frozen=True, slots=True)
class _Filter:
    job: str | None
    kind: str | None
    since_ms: int
    verdict: str | None
    every: bool = False

    def takes(self, line: Line) -> bool:
        kind, attempt, at_ms = str(line.get("kind", "")), str(line.get("attempt", "")), line.get("at_ms")
        if self.kind is None and not self.every and kind.startswith(_OWN):
            return False
        named = self.kind is None or kind == self.kind or (self.kind.endswith(".") and kind.startswith(self.kind))
        mine = self.job is None or attempt == self.job or attempt.rpartition(".")[0] == self.job
        late = isinstance(at_ms, int) and at_ms >= self.since_ms
        return named and mine and late and (self.verdict is None or _verdict(line) == self.verdict)


@audit.command()
def verify(
    context: typer.Context,
    node: NodeOption = None,
    file: FileOption = None,
    fleet_key: KeyOption = None,
    anchor: Annotated[
        list[str] | None, typer.Option("--anchor", metavar="COUNT:HASH", help="A head that was noted earlier.")
    ] = None,
    receipt: Annotated[
        list[Path] | None, typer.Option("--receipt", metavar="FILE", help="A receipt, as `kill --json` prints it.")
    ] = None,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", metavar="T", help="Whose ends are heads, too; default main.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no store: says that this was not checked.")] = False,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every line, and hold the record against the heads that are kept elsewhere; exits 1 if it was changed."""
    site = site_of(context, home, redis)
    reports: dict[str, Report] = {}
    for name, walk in _records(site.home, node, file):
        public = recordsource.known_of(site.home, name)
        heads = recordsource.given(anchor or (), receipt or (), name, public)
        known = Known(name, public, recordsource.opener_of(site.home, fleet_key), heads=heads)
        faults: list[str] = []
        if not offline:
            # The heads first: what is written meanwhile lies behind them.
            app = site.app()
            known, faults = recordsource.anchors_of(app, known, tenant or (ids.DEFAULT_TENANT,))
        report = walk(known, lambda _: None, lambda _: None)
        report.faults[:0] = faults
        reports[name] = report
    if as_json:
        print_json([_as_json(name, report) for name, report in reports.items()])
    else:
        for name, report in reports.items():
            _tell(name, report)
    if any(report.faults for report in reports.values()):
        raise typer.Exit(_FAULTY)


@audit.command()
def query(
    context: typer.Context,
    job: JobOption = None,
    kind: KindOption = None,
    since: SinceOption = None,
    verdict: VerdictOption = None,
    node: NodeOption = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="The newest N.")] = 1000,
    every: Annotated[bool, typer.Option("--all", "-a", help="The record's own lines, too.")] = False,
    file: FileOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print lines, the oldest first; each is checked on the way, and a fault is said and makes it exit 1."""
    site = site_of(context, home, redis)
    chosen = _filter(job, kind, since, verdict, every=every)
    lines: list[tuple[str, Line]] = []
    faults = 0
    for name, walk in _records(site.home, node, file):
        newest: deque[Line] = deque(maxlen=limit)

        def keep(line: Line, newest: deque[Line] = newest) -> None:
            if chosen.takes(line):
                newest.append(line)

        report = walk(_lightly(site.home, name), keep, say)
        faults += len(report.faults)
        lines += [(name, line) for line in newest]
    for name, line in sorted(lines, key=lambda pair: int(str(pair[1].get("at_ms", 0))))[-limit:]:
        _show(name, line, as_json=as_json)
    if faults:
        raise typer.Exit(_FAULTY)


@audit.command()
def follow(
    context: typer.Context,
    job: JobOption = None,
    kind: KindOption = None,
    verdict: VerdictOption = None,
    node: NodeOption = None,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what is written from now on, each line checked, until Ctrl-C; the record of one node."""
    site = site_of(context, home, redis)
    folders = recordsource.nodes_of(site.home, node)
    if len(folders) > 1:
        raise UsageError(f"follow takes one node; --node: one of {', '.join(folder.node for folder in folders)}")
    chosen = _filter(job, kind, None, verdict, every=False)
    begun_ms = time.time_ns() // 1_000_000

    def show(line: Line) -> None:
        if chosen.takes(line) and int(str(line.get("at_ms", 0))) >= begun_ms:
            _show(folders[0].node, line, as_json=as_json)

    with folders[0].opened() as fd, contextlib.suppress(KeyboardInterrupt):
        recordcheck.check(recordsource.following(fd), _lightly(site.home, folders[0].node), show, say)


@audit.command()
def export(
    context: typer.Context,
    node: Annotated[str, typer.Option("--node", metavar="N", help="Whose record.")],
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Print a whole record as it is, to be kept and checked elsewhere: `audit verify --file FILE --node N`."""
    (folder,) = recordsource.nodes_of(site_of(context, home, redis).home, node)
    with folder.opened() as fd:
        for _, lines in recordcheck.read(fd, segments.found(fd)):
            for line in lines:
                if line.endswith(b"\n"):
                    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


_Walk = Callable[[Known, Callable[[Line], object], Callable[[str], object]], Report]


def _records(home: Home, node: str | None, file: Path | None) -> list[tuple[str, _Walk]]:
    if file is None:
        return [(folder.node, _walk_of(folder)) for folder in recordsource.nodes_of(home, node)]
    if node is None:
        raise UsageError("--file needs --node: whose record is it?")

    def walk(known: Known, each: Callable[[Line], object], fault: Callable[[str], object]) -> Report:
        try:
            with file.open("rb") as lines:
                return recordcheck.check(recordcheck.split(lines), known, each, fault)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None

    return [(node, walk)]


def _walk_of(folder: Folder) -> _Walk:
    def walk(known: Known, each: Callable[[Line], object], fault: Callable[[str], object]) -> Report:
        try:
            with folder.opened() as fd:
                return recordcheck.check(recordcheck.read(fd, segments.found(fd)), known, each, fault)
        except OSError as error:
            raise ConfigError(
                f"{folder.path} can't be read: {error.strerror}; once more, if it was being tidied"
            ) from None

    return walk


def _lightly(home: Home, node: str) -> Known:
    """What `query` and `follow` check by: all that lies in this home."""
    return Known(node, recordsource.known_of(home, node), recordsource.opener_of(home, None))


def _filter(job: str | None, kind: str | None, since: str | None, verdict: str | None, *, every: bool) -> _Filter:
    if verdict not in {None, "allow", "deny", "ask"}:
        raise UsageError("--verdict takes allow, deny or ask")
    return _Filter(job, kind, 0 if since is None else _since_ms(since), verdict, every)


def _since_ms(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if number.isascii() and number.isdigit() and unit in _UNITS_S:
        return time.time_ns() // 1_000_000 - int(number) * _UNITS_S[unit] * 1000
    return int(moment(text, "--since", "90s, 15m, 2h, 1d or ").timestamp() * 1000)


def _verdict(line: Line) -> str:
    return str(line.get("effect") or _VERDICTS.get(str(line.get("kind")), ""))


def _show(node: str, line: Line, *, as_json: bool) -> None:
    if as_json:
        print_json({"node": node, **line})
        return
    at_ms = line.get("at_ms")
    rest = "  ".join(f"{name}={value}" for name, value in line.items() if name not in {"n", "at_ms", "kind", "attempt"})
    when = iso(at_ms) if isinstance(at_ms, int) else "-"
    print_line(f"{node}  {line['n']}  {when}  {line.get('kind')}  {line.get('attempt') or '-'}  {rest}".rstrip())


def _as_json(node: str, report: Report) -> dict[str, object]:
    return {
        "node": node,
        "sound": not report.faults,
        "lines": report.count,
        "first": report.first,
        "head": report.head,
        "files": report.files,
        "anchors": report.anchors,
        "faults": report.faults,
        "unchecked": report.unchecked,
    }


def _tell(node: str, report: Report) -> None:
    for fault in report.faults:
        print_line(f"{node}: CHANGED: {fault}")
    for what in report.unchecked:
        print_line(f"{node}: not checked: {what}")
    held = f"held against {report.anchors} heads that are kept elsewhere"
    word = "unchanged" if not report.faults else "changed"
    print_line(f"{node}: lines {report.first} to {report.count} {word}, {held}; head {report.head}")
