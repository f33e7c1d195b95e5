"""What a running job gave besides its result: artifacts, and how far it said it was.

Called by job handles and the command line. Must never return bytes that are not those a node of the fleet has signed
for, nor take a job's names for more than names.
"""

from __future__ import annotations

import hashlib

from runner import listing, results, trust
from runner.client import Client
from runner.errors import ArtifactError
from runner.wire import ids
from runner.wire import spec as specs
from runner.wire.artifact import MAX_ARTIFACT_BYTES, PIECE_BYTES, check_name, piece_field
from runner.wire.event import EventType
from runner.wire.view import ArtifactView, EventView, ProgressView

__all__ = ["artifacts", "progress", "read"]

_PREFIX = "m:"
_MOST = 2048
_LOOK = 1000
#: Pieces that are asked for at a time.
_BATCH = 32


def artifacts(client: Client, job_id: str) -> tuple[ArtifactView, ...]:
    """Return the artifacts of a job by name; what no node of the fleet signed is left out."""
    key = client.keys.artifacts(job_id)
    names = sorted(name for name in client.hash_names(key) if name.startswith(_PREFIX))[:_MOST]
    found = client.fields(key, names) if names else {}
    lane = _lane(client, job_id) if found else None
    views = (_view(client, job_id, lane, name.removeprefix(_PREFIX), data) for name, data in found.items())
    return tuple(view for view in views if view is not None)


def read(client: Client, job_id: str, name: str) -> bytes:
    """Return the bytes of one artifact. Raises ArtifactError: there is none, or it is not what its node signed."""
    key, field = client.keys.artifacts(job_id), f"{_PREFIX}{name}"
    data = client.fields(key, [field]).get(field) if check_name(name) else None
    view = None if data is None else _view(client, job_id, _lane(client, job_id), name, data)
    if view is None:
        raise ArtifactError(f"{job_id} has no artifact {name!r}; `ringfence show {job_id}` lists what it has")
    if view.bytes > MAX_ARTIFACT_BYTES or view.pieces > _MOST:
        raise ArtifactError(f"the artifact {name!r} is larger than any can be")
    pieces = [piece_field(view.transfer, number) for number in range(view.pieces)]
    body = b""
    for start in range(0, len(pieces), _BATCH):
        asked = pieces[start : start + _BATCH]
        found = client.fields(key, asked)
        body += b"".join(found.get(piece, b"")[:PIECE_BYTES] for piece in asked)
    if len(body) != view.bytes or hashlib.sha256(body).hexdigest() != view.sha256:
        raise ArtifactError(f"the artifact {name!r} is not what its node signed: read it again, it may have changed")
    return body


def progress(client: Client, job_id: str) -> ProgressView | None:
    """Return what the job last said of its progress, None if it never did or that is long ago."""
    lane = _lane(client, job_id)
    for entry in client.newest_entries(client.keys.job_events(job_id), _LOOK):
        event = listing.checked(client, entry)
        if event is None or event.type != EventType.JOB_PROGRESS or not _tells_of(client, event, job_id, lane):
            continue
        value = event.detail.get("value")
        if isinstance(value, int | float):
            return ProgressView(float(value), str(event.detail.get("note", "")), event.at, event.attempt)
    return None


def _lane(client: Client, job_id: str) -> str | None:
    """Where the job waited, if this client can check who signed it: that says which nodes may serve it."""
    spec = results.checked_spec(client, job_id)
    return None if spec is None else specs.lane_of(spec)


def _tells_of(client: Client, event: EventView, job_id: str, lane: str | None) -> bool:
    """Whether an event is of this job, by a node that may serve it."""
    if event.job != job_id:
        return False
    tenant = ids.tenant_of(job_id)
    return lane is None or any(card.node == event.node and trust.serves(card, tenant, lane) for card in client.cards())


def _view(client: Client, job_id: str, lane: str | None, name: str, data: bytes) -> ArtifactView | None:
    """Read "ATTEMPT TRANSFER PIECES SIGNATURE EVENT"; only what is signed counts."""
    parts = data.split(b" ", 4)
    if len(parts) != 5:
        return None
    event = listing.checked_word(client, parts[4], parts[3].decode("ascii", "replace"))
    if event is None or event.type != EventType.JOB_ARTIFACT or not _tells_of(client, event, job_id, lane):
        return None
    return _described(event) if event.detail.get("name") == name else None


def _described(event: EventView) -> ArtifactView | None:
    detail = event.detail
    size, pieces = detail.get("bytes"), detail.get("pieces")
    if type(size) is not int or type(pieces) is not int:
        return None
    return ArtifactView(
        name=str(detail.get("name")),
        bytes=size,
        sha256=str(detail.get("sha256")),
        at=event.at,
        attempt=event.attempt,
        node=event.node,
        pieces=pieces,
        transfer=str(detail.get("transfer")),
    )
