"""What jobs that are made alike have in common, written once: all but their id, nonce, times and arguments.

Called by request, for calls with nothing but everyday options. Standard library only. Must never write other bytes than
`record.dumps` and `rows.row` do of the same job: what is signed may not depend on the way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple, cast

from runner.scripts import rows
from runner.wire import codec, record
from runner.wire.codec import Json
from runner.wire.spec import JobSpec, lane_of

__all__ = ["Draft", "Stencil"]

#: What differs from job to job, as it stands in a template. Names are ids and digits, which no text form changes.
_OPEN: Final = {
    **dict.fromkeys(("id", "nonce"), b'"%b"'),
    **dict.fromkeys(("not_before_ms", "not_after_ms", "not_after"), b"%d"),
}
_VALUES: Final = ("args", "kwargs")


class Draft(NamedTuple):
    """A job about to be signed: its bytes, its row for the store, and where it goes.

    ``spec``: one of its like, for what they have in common.
    """

    id: str
    tenant: str
    lane: str
    envelope: bytes
    row: bytes
    spec: JobSpec


class Stencil:
    """Writes jobs that are like one that was built and checked; only what that leaves open is taken on trust."""

    __slots__ = ("_envelope", "_lane", "_row", "_spec", "_tenant")

    def __init__(self, spec: JobSpec) -> None:
        """``spec`` waits for no other job, has no limit to share and nothing sealed."""
        self._spec = spec
        self._tenant = spec.tenant
        self._lane = lane_of(spec)
        bare = cast("dict[str, Json]", codec.load(record.dumps(replace(spec, args=(), kwargs={}), bare=True)))
        self._envelope = _template(dict.fromkeys(_VALUES) | bare)
        self._row = _template(cast("dict[str, Json]", rows.row(spec, spec.not_before_ms)))

    def draft(self, job_id: str, nonce: str, start_ms: int, end_ms: int, args: Json, kwargs: Json) -> Draft:
        """Return the job; ``args`` and ``kwargs`` as `values.encode` returns them. Raises CodecError: too deep."""
        name = job_id.encode()
        words = codec.dump({"args": args})[1:-1] + b"," if args else b""
        named = codec.dump({"kwargs": kwargs})[1:-1] + b"," if kwargs else b""
        envelope = self._envelope % (words, name, named, nonce.encode(), end_ms, start_ms)
        return Draft(job_id, self._tenant, self._lane, envelope, self._row % (name, end_ms), self._spec)


def _template(table: dict[str, Json]) -> bytes:
    parts = []
    for name in sorted(table):
        if name in _VALUES:
            parts.append(b"%b")
        elif name in _OPEN:
            parts.append(b'"%b":%b,' % (name.encode(), _OPEN[name]))
        else:
            parts.append(codec.dump({name: table[name]})[1:-1].replace(b"%", b"%%") + b",")
    return b"{%b}" % b"".join(parts)[:-1]
