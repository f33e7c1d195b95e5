"""Names, sizes, grants, states and channel records: grammar and laws."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.wire import frames, grants, ids, states
from runner.wire.errors import CodecError, GrammarError, WireError
from runner.wire.frames import Op
from runner.wire.grants import Grants, NetGrant, PathGrant, SecretGrant
from runner.wire.keys import Keys
from runner.wire.states import END_STATES, MOVES, RQ_STATUS, FailReason, RefuseReason, State

TENANTS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=32)
SAFE = set(string.ascii_letters + string.digits + "_.-")


@given(TENANTS, st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10), st.integers(0, 999))
def test_job_ids_come_apart_again(tenant: str, stamp: int, random: bytes, attempt: int) -> None:
    """Tenant and attempt can be read off every id that can be made."""
    job_id = f"{tenant}-{ids.ulid(stamp, random)}"
    assert ids.check_job_id(job_id) == job_id
    assert ids.tenant_of(job_id) == tenant
    assert ids.split_attempt(ids.attempt_name(job_id, attempt)) == (job_id, attempt)
    assert set(job_id) <= SAFE


@given(st.integers(0, 2**48 - 2), st.binary(min_size=10, max_size=10), st.binary(min_size=10, max_size=10))
def test_ids_sort_by_time(stamp: int, one: bytes, two: bytes) -> None:
    """A later millisecond gives a greater id."""
    assert ids.ulid(stamp, one) < ids.ulid(stamp + 1, two)


def test_fresh_ids_differ() -> None:
    """Nothing repeats."""
    assert len({ids.new_job_id("a") for _ in range(1000)}) == 1000
    assert len({ids.new_nonce() for _ in range(1000)} | {ids.new_boot() for _ in range(1000)}) == 2000
    with pytest.raises(GrammarError):
        ids.new_job_id("Not ok")


@given(st.text(max_size=60))
def test_any_text_is_a_safe_name_or_refused(text: str) -> None:
    """What passes has no separator of keys, paths or terminals in it."""
    checks = (ids.check_job_id, ids.check_tenant, ids.check_node, lambda found: ids.check_name(found, "queue"))
    for check in checks:
        try:
            assert set(check(text)) <= SAFE
        except GrammarError:
            continue


@pytest.mark.parametrize(
    "text",
    [
        *("", "main", "main-", "-x", "main-x"),
        "a" * 33 + "-" + "0" * 26,
        *(f"main-{rest}" for rest in ("8" + "0" * 25, "u" * 26, "0" * 26 + "\n", "0" * 25 + "O")),
        "Main-" + "0" * 26,
    ],
)
def test_bad_job_ids(text: str) -> None:
    """Wrong lengths, alphabets, overflow and line ends are no ids."""
    with pytest.raises(GrammarError):
        ids.check_job_id(text)
    for attempt in (text, f"{text}.1", "main-" + "0" * 26 + ".x", "main-" + "0" * 26 + ".²"):
        with pytest.raises(GrammarError):
            ids.split_attempt(attempt)


@given(st.integers(1, 2**63 - 1))
def test_sizes_come_back(count: int) -> None:
    """The shortest exact form reads back as the same number."""
    assert grants.parse_bytes(grants.format_bytes(count)) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5G", "1P", "G", "1 G", "1e9", "٣M", "0x10", "1K1", "9" * 19, "9999999T"]
)
def test_bad_sizes(text: str) -> None:
    """Only positive whole numbers with one unit are sizes."""
    with pytest.raises(GrammarError):
        grants.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("2k", 2048), ("512M", 512 << 20), ("1GiB", 1 << 30), ("1TB", 1 << 40)]
)
def test_good_sizes(text: str, count: int) -> None:
    """Units are powers of 1024, in either case, with or without B."""
    assert grants.parse_bytes(text) == count


@given(st.text(max_size=30))
def test_any_net_text_is_a_grant_or_refused(text: str) -> None:
    """What passes names one host and one port."""
    try:
        found = grants.parse_net(text)
    except GrammarError:
        return
    assert text == "none" or (len(found) == 1 and 1 <= found[0].port <= 65535)


@pytest.mark.parametrize(
    "text", ["a", "a:", ":1", "a:0", "a:65536", "a:-1", "a b:1", "a:1:2", "a/b:1", "a:1\n", "a:\uff11"]
)
def test_bad_net_grants(text: str) -> None:
    """A grant is exactly HOST:PORT."""
    with pytest.raises(GrammarError):
        grants.parse_net(text)


def test_good_net_grants() -> None:
    """Names are lower case, literal IPv6 stands in brackets, none is nothing."""
    assert grants.parse_net("none") == ()
    assert grants.parse_net("API.Example.com:443") == (NetGrant("api.example.com", 443),)
    assert grants.parse_net("[::1]:80") == (NetGrant("[::1]", 80),)


@pytest.mark.parametrize("path", ["", "x", "/a/", "/a/../b", "/a//b", "//a", "/a\0b", "/a/.", "~/x"])
def test_bad_paths(path: str) -> None:
    """A granted path has one spelling only."""
    with pytest.raises(GrammarError):
        PathGrant(path, "read")


def test_nothing_is_granted_by_default() -> None:
    """Empty grants hold nothing."""
    empty = Grants()
    assert not any((empty.paths, empty.net, empty.secrets, empty.tools))
    assert SecretGrant("x").mode == "proxy"


@given(st.sampled_from(State), st.sampled_from(State))
def test_an_end_is_final(old: State, new: State) -> None:
    """No move leaves an end state, and every other state can still reach one."""
    if old in END_STATES:
        assert not states.may_move(old, new)
    reached, open_states = {old}, [old]
    while open_states:
        for following in MOVES[open_states.pop()] - reached:
            reached.add(following)
            open_states.append(following)
    assert reached & END_STATES


def test_a_kill_always_leads_to_an_end() -> None:
    """From killing there is no way back to work; every state that is no end can be killed or ends without."""
    assert MOVES[State.KILLING] <= END_STATES
    assert [
        state for state in State if state not in END_STATES | {State.KILLING} and State.KILLING not in MOVES[state]
    ] == []
    assert set(MOVES) == set(State) == set(RQ_STATUS)


def test_a_kill_or_a_refusal_is_never_retried() -> None:
    """Only a lost or an honestly failed attempt may run again."""
    for state in State:
        for reason in (*FailReason, *RefuseReason, None):
            if states.retryable(state, reason):
                assert state in {State.LOST, State.FAILED}
                assert state is State.LOST or reason in set(FailReason)
    assert not states.retryable(State.FAILED, FailReason.SECCOMP)
    assert not states.retryable(State.FAILED, FailReason.NODE_FAULT)


@given(st.binary(max_size=200_000))
def test_payloads_come_back_from_their_chunks(payload: bytes) -> None:
    """Chunks carry all bytes in order, exactly the last one releases, and each fits into a record."""
    records = list(frames.chunks(payload))
    assert all(len(found) <= frames.MAX_RECORD_BYTES for found in records)
    found = [frames.unpack(item) for item in records]
    assert b"".join(body for _, body in found) == payload
    assert [op for op, _ in found] == [Op.PAYLOAD] * (len(found) - 1) + [Op.RELEASE]


@given(st.binary(max_size=80))
def test_any_record_is_known_or_refused(data: bytes) -> None:
    """Unknown ops, empty and oversized records raise CodecError."""
    try:
        op, body = frames.unpack(data)
    except CodecError:
        assert not data or data[0] not in set(Op)
        return
    assert frames.pack(op, body) == data


def test_records_are_bounded() -> None:
    """Neither side handles more than MAX_RECORD_BYTES."""
    with pytest.raises(CodecError):
        frames.pack(Op.PLAN, b"x" * frames.MAX_RECORD_BYTES)
    with pytest.raises(CodecError):
        frames.unpack(b"\x01" * (frames.MAX_RECORD_BYTES + 1))


def test_a_tagged_table_keeps_every_key_in_one_slot() -> None:
    """On a cluster all keys carry the same hash tag, ours and RQ's."""
    keys = Keys.tagged("x")
    found = [keys.seq(), keys.job("j"), keys.queue("q"), keys.events(None), keys.cutoffs("t"), keys.log("j")]
    assert all(key.startswith("{x}r") for key in found)


def test_errors_carry_code_and_path() -> None:
    """Each error of the wire has a stable code, is not retryable, and puts the path first."""
    error = GrammarError("bad", path="a.b")
    assert (str(error), error.code, error.retryable) == ("a.b: bad", "grammar", False)
    assert isinstance(error, WireError)
