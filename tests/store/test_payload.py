"""The payload of a job hash: one signed envelope, bounded, and nothing that names code (attacks 25, 26)."""

from __future__ import annotations

import json
import time
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.scripts import payload
from runner.wire.errors import CodecError, RecordError
from tests.store.desk import Agent, Desk

BOMB_BYTES = 400_000_000


def packed(value: object) -> bytes:
    """Return a value as RQ would store it."""
    return zlib.compress(json.dumps(value).encode())


@given(st.text(max_size=2000), st.text(max_size=200))
def test_what_is_packed_is_parsed(envelope: str, signature: str) -> None:
    """The bytes that were signed come back unchanged."""
    data = payload.pack(envelope.encode("utf-8", "replace"), signature.encode("utf-8", "replace").decode())
    found = payload.parse(data)
    assert found.envelope == envelope.encode("utf-8", "replace")


@given(st.one_of(st.text(max_size=700), st.text(alphabet="ab", max_size=1900)), st.text(max_size=150))
def test_every_payload_unpacks_to_what_rq_writes(envelope: str, signature: str) -> None:
    """A payload is one zlib stream, small ones too, of the bytes that RQ's serializer makes of the same job."""
    texts = {
        "envelope": envelope.encode("utf-8", "replace").decode(),
        "sig": signature.encode("utf-8", "replace").decode(),
    }
    stock = json.dumps(["runner.jobs.run", None, [], texts]).encode()
    assert zlib.decompress(payload.pack(texts["envelope"].encode(), texts["sig"])) == stock
    texts["occurrence"] = 7  # type: ignore[assignment]  # of a schedule
    stock = json.dumps(["runner.jobs.run", None, [], texts]).encode()
    assert zlib.decompress(payload.pack(texts["envelope"].encode(), texts["sig"], 7)) == stock


@given(st.text(max_size=40), st.text(max_size=20), st.integers(0, 200), st.characters())
def test_the_short_way_reads_what_the_strict_parser_reads(envelope: str, signature: str, at: int, other: str) -> None:
    """The usual form is read without a parser; what that accepts, changed in any place, the parser reads the same."""
    usual = zlib.decompress(
        payload.pack(envelope.encode("utf-8", "replace"), signature.encode("utf-8", "replace").decode())
    )
    place = at % len(usual)
    for text in (usual, usual[:place] + other.encode("utf-8", "replace") + usual[place + 1 :]):
        quick = payload._usual(text)
        if quick is not None:
            *_, kwargs = json.loads(text)
            assert (quick.envelope.decode(), quick.signature) == (kwargs["envelope"], kwargs["sig"])
            assert payload.parse(zlib.compress(text)) == quick
            assert set(kwargs) == {"envelope", "sig"}


@pytest.mark.parametrize(
    "value",
    [
        ["os.system", None, ["id"], {}],
        ["runner.jobs.run", None, ["id"], {"envelope": "", "sig": ""}],
        ["runner.jobs.run", {"x": 1}, [], {"envelope": "", "sig": ""}],
        ["runner.jobs.run", None, [], {"envelope": "", "sig": "", "more": 1}],
        ["runner.jobs.run", None, [], {"envelope": 1, "sig": ""}],
        ["runner.jobs.run", None, [], {"envelope": ""}],
        ["runner.jobs.run", None, [], {"envelope": "", "sig": ""}, 5],
        ["runner.jobs.run", None, []],
        {"envelope": ""},
        None,
    ],
)
def test_other_forms_are_refused(value: object) -> None:
    """Another function, an instance, other arguments and other shapes are no job of ours."""
    with pytest.raises(RecordError):
        payload.parse(packed(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        b"\x80\x04N.",
        packed([]) + b"more",
        packed([])[:-3],
        zlib.compress(b'["runner.jobs.run",null,[],{"sig":"","sig":"","envelope":""}]'),
        zlib.compress(b"[" * 100 + b"]" * 100),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """No zlib, a pickle, a cut stream, bytes after it, duplicate keys and deep nesting are refused."""
    with pytest.raises((CodecError, RecordError)):
        payload.parse(data)


@pytest.mark.alone
def test_attack_25_a_bomb_costs_little() -> None:
    """400 kB that unpack to 400 MB cost a reader 10 ms (on a slow day what the cap itself costs) and 16 MB."""
    bomb = zlib.compress(bytes(BOMB_BYTES), 9)
    assert 300_000 < len(bomb) < 500_000
    with pytest.raises(CodecError, match="unpacks to more"):
        payload.parse(bomb)
    times = []
    for _ in range(20):
        before = time.perf_counter()
        with pytest.raises(CodecError):
            payload.parse(bomb)
        times.append(time.perf_counter() - before)
    tracemalloc.start()
    with pytest.raises(CodecError):
        payload.parse(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    before = time.perf_counter()
    zlib.decompressobj().decompress(bomb, payload.MAX_PAYLOAD_BYTES)
    floor = time.perf_counter() - before
    assert min(times) < max(0.010, 1.5 * floor)
    assert peak < 16_000_000


def test_attack_25_large_data_never_leaves_the_store(agent: Agent, desk: Desk) -> None:
    """A payload over the cap is claimed without its bytes, to be refused."""
    job = desk.enqueue()
    desk.redis.hset(f"rq:job:{job}", "data", b"x" * (payload.MAX_DATA_BYTES + 1))
    claim = agent.claim()
    assert (claim.oversized, claim.data) == (True, b"")


@pytest.mark.parametrize("field", ["meta", "webhooks", "success_callback_name", "stopped_callback_name", "result"])
def test_what_ours_never_carry_is_named(agent: Agent, desk: Desk, field: str) -> None:
    """A callback, a webhook, a pickled meta or result is named in the claim, so that the job is refused."""
    job = desk.enqueue()
    desk.redis.hset(f"rq:job:{job}", field, b"\x80\x04N.")
    assert agent.claim().odd == (field,)


def test_a_foreign_hash_is_named_too(agent: Agent, desk: Desk) -> None:
    """A hash written by hand, without our fields and lane, is claimed as odd and can be ended as refused."""
    desk.redis.hset("rq:job:by-hand", mapping={"data": packed(["os.system", None, ["id"], {}]), "status": "queued"})
    desk.redis.rpush("rq:queue:agents", "by-hand")
    claim = agent.claim()
    assert (claim.job, claim.seq, claim.odd) == ("by-hand", 0, ("origin",))
    with pytest.raises(RecordError):
        payload.parse(claim.data)
    assert agent.finish(claim, outcome_signature="k.s").result == "done"


def test_an_absurd_attempt_is_named(agent: Agent, desk: Desk) -> None:
    """A forged attempt number is odd and counts as the first."""
    job = desk.enqueue()
    desk.redis.hset(f"rq:job:{job}", "rf_attempt", "1e300")
    claim = agent.claim()
    assert (claim.odd, claim.attempt) == (("rf_attempt",), 1)
