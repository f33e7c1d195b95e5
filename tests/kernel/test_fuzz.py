"""Whatever bytes a job sends, the node answers in the known form or ends the session, and serves the next one."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterable
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.kernel import reference
from runner.guest.calls import Session
from runner.wire import record
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.errors import RecordError
from tests.kernel.line import Line, entries, in_line, talk

OPS = [entry.op for entry in entries(lambda: None) if entry.op != "test.wait"]  # type: ignore[arg-type, return-value] # only the names
CODES = {code.value for code in ErrorCode}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries(
    {"n": st.integers(0, 5) | JSON, "op": st.sampled_from(OPS) | JSON},
    optional={"text": st.text(max_size=20) | JSON, "times": st.integers(-3, 5) | JSON, "extra": JSON},
)


def encoded(value: object) -> bytes:
    """JSON as another library would write it, NaN and all."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


RECORDS = st.binary(min_size=1, max_size=200) | CALLS.map(encoded) | JSON.map(encoded)


def spoken(line: Line, records: Iterable[bytes]) -> None:
    """Send the records on one session after the other; look at every answer."""
    session: Session | None = None
    for data in records:
        if session is None or session.fileno() < 0:
            session = Session(line.attempt.far.fileno())
        with socket.socket(fileno=session.fileno()) as held:
            held.settimeout(10)
            held.send(data)
            answer = held.recv(MAX_CALL_BYTES)
            if answer and "signal" in json.loads(answer):
                answer = held.recv(MAX_CALL_BYTES)
            found = json.loads(answer)
            held.detach()
        assert found.keys() in ({"n", "ok"}, {"n", "err", "why"})
        assert found.get("err") is None or found["err"] in CODES
        if found.get("err") in (ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_OP):
            # It may have been ended by that.
            session.close()
    if session is not None:
        session.close()
    with Session(line.attempt.far.fileno()) as after:
        assert after.call("test.tidy") is True


@settings(max_examples=60)
@given(st.lists(RECORDS, min_size=1, max_size=6))
def test_no_record_crashes_or_hangs_the_node(records: list[bytes]) -> None:
    """Each gets one answer of the known form; afterwards a call is carried out as ever."""

    async def scenario(line: Line) -> None:
        await talk(lambda: spoken(line, records))
        assert not line.channel._run.stopping

    in_line(scenario)


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=80) | st.sampled_from([b"\x14", b"\x12"]), min_size=1, max_size=6))
def test_no_word_on_the_channel_crashes_the_node(words: list[bytes]) -> None:
    """The channel goes on or is ended; nothing else happens to anybody."""

    async def scenario(line: Line) -> None:
        def process() -> None:
            for word in words:
                try:
                    line.attempt.far.send(word)
                except OSError:
                    return

        await talk(process)
        assert not line.channel._run.stopping
        assert all(detail == {"what": "an unknown word on the channel"} for _, detail in line.told)

    in_line(scenario)


TABLE = reference.table()
LEAF = st.text(max_size=8) | st.integers() | st.none() | st.lists(st.text(max_size=4), max_size=2) | st.booleans()


def asks(op: str) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
    """Fields of one call, of any types, now and then one that it does not have."""
    names = [field.name for field in dataclasses.fields(cast("Any", TABLE[op].ask))]
    return st.tuples(st.just(op), st.fixed_dictionaries({}, optional=dict.fromkeys([*names, "other"], LEAF)))


@settings(max_examples=150)
@given(st.sampled_from(sorted(TABLE)).flatmap(asks))
def test_every_call_of_the_table_reads_any_fields_or_refuses_them(asked: tuple[str, dict[str, object]]) -> None:
    """No field's type, however odd, is the node's fault; what policy judges a call by is always a text."""
    op, fields = asked
    entry = TABLE[op]
    try:
        ask = record.decode(entry.ask, fields)
    except RecordError:
        return
    assert entry.resource is None or isinstance(entry.resource(ask), str)
