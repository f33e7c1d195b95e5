"""One session of calls: what is answered, what ends it, and what it can never hold."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from node_agent.kernel import reference
from node_agent.kernel import session as sessions
from node_agent.kernel.session import MAX_IN_FLIGHT
from runner.guest.calls import CallRefused, Session
from runner.wire import record
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.errors import WireError
from tests.kernel.line import Line, in_line, talk
from tests.support.wait import await_until

T = TypeVar("T")


def told(work: Callable[[Session], T]) -> tuple[T, Line]:
    """What a process of the job gets from ``work`` with a session, and the line as it then is."""

    async def scenario(line: Line) -> tuple[T, Line]:
        def process() -> T:
            with Session(line.attempt.far.fileno()) as session:
                return work(session)

        return await talk(process), line

    return in_line(scenario)


def code_of(session: Session, op: str, **fields: object) -> str:
    """The code that a call is refused with."""
    with pytest.raises(CallRefused) as caught:
        session.call(op, **fields)  # type: ignore[arg-type] # the tests' own fields
    return caught.value.code


def raw(session: Session, data: bytes) -> list[dict[str, object]]:
    """Send one record as it is; return all that comes until the node ends the session, or one answer."""
    with socket.socket(fileno=session.fileno()) as held:
        held.settimeout(5)
        held.send(data)
        found = []
        while answer := held.recv(MAX_CALL_BYTES):
            found.append(json.loads(answer))
        held.detach()
    return found


def test_k2_every_call_of_the_table_is_carried_out_and_answered_once() -> None:
    """Each call gets the answer of its own handler, in order, and nothing else."""

    def work(session: Session) -> list[object]:
        return [session.call("test.nothing"), session.call("test.echo", text="ab", times=2), session.call("test.tidy")]

    assert told(work)[0] == [None, "abab", True]


@pytest.mark.parametrize(
    ("op", "fields", "code"),
    [
        ("test.refuse", {"text": "x"}, ErrorCode.NOT_FOUND),
        ("test.echo", {"text": 1}, ErrorCode.BAD_REQUEST),
        ("test.echo", {}, ErrorCode.BAD_REQUEST),
        ("test.echo", {"text": "a", "more": 1}, ErrorCode.BAD_REQUEST),
        ("test.echo", {"text": "x" * 60_000, "times": 2}, ErrorCode.TOO_LARGE),
        ("test.fail", {}, ErrorCode.FAULT),
        ("test.odd", {}, ErrorCode.FAULT),
    ],
)
def test_k3_each_refusal_has_one_code_of_the_one_list(op: str, fields: dict[str, object], code: ErrorCode) -> None:
    """A refused call has its code, and the session goes on."""

    def work(session: Session) -> tuple[str, object]:
        return code_of(session, op, **fields), session.call("test.tidy")

    found, line = told(work)
    assert found == (code, True)
    assert line.told == []


def test_k6_a_part_that_fails_harms_neither_the_node_nor_the_session() -> None:
    """The job is told that the node failed, without a word of what failed, and calls on."""

    def work(session: Session) -> tuple[str, object]:
        with pytest.raises(CallRefused) as caught:
            session.call("test.fail")
        return caught.value.why, session.call("test.echo", text="still here")

    why, after = told(work)[0]
    assert after == "still here"
    assert "own fault" not in why


def test_k1_who_calls_is_what_the_node_knows_and_no_field_of_the_request() -> None:
    """A field that claims to be somebody is no field of any call."""

    def work(session: Session) -> tuple[object, str]:
        return session.call("test.who"), code_of(session, "test.who", job="main-other", caller_ring=0)

    (who, code), line = told(work)
    assert who == [line.caller.job, 1]
    assert code == ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"null",
        b'{"op":"test.nothing"}',
        b'{"n":-1,"op":"test.nothing"}',
        b'{"n":true,"op":"test.nothing"}',
        b'{"n":1,"n":2,"op":"test.nothing"}',
        b'{"n":1}',
        b'{"n":1,"op":"test.nosuch"}',
        b'{"n":1,"op":["test.nothing"]}',
        b'{"n":1,"op":"test.echo","text":' + b"[" * 40 + b"]" * 40 + b"}",
        b"\xff\xfe",
        b'{"n":1,"op":"test.echo","text":"' + b"x" * MAX_CALL_BYTES + b'"}',
    ],
)
def test_what_is_no_call_is_answered_and_ends_the_session(data: bytes) -> None:
    """One answer with a code, the end, and one event."""
    answers, line = told(lambda session: raw(session, data))
    assert [answer["err"] for answer in answers] in ([ErrorCode.BAD_REQUEST], [ErrorCode.UNKNOWN_OP])
    assert len(line.told) == 1


def test_no_more_than_three_violations_of_an_attempt_are_told() -> None:
    """A job can't fill its stream with them."""

    async def scenario(line: Line) -> int:
        def process() -> None:
            for _ in range(10):
                with Session(line.attempt.far.fileno()) as session:
                    code_of(session, "no.such")

        await talk(process)
        return len(line.told)

    assert in_line(scenario) == 3


def test_no_record_no_action() -> None:
    """A call that acts is recorded before, with its arguments as a hash; without a record it does not happen."""

    async def scenario(line: Line) -> None:
        def process() -> tuple[object, str]:
            with Session(line.attempt.far.fileno()) as session:
                first = session.call("test.act", text="canary")
                line.recorder.broken = True
                return first, code_of(session, "test.act", text="again")

        assert await talk(process) == ("canary", ErrorCode.UNRECORDED)
        (kind, attempt, fields) = line.recorder.lines[0]
        assert (kind, attempt, fields["op"]) == ("call", line.caller.attempt, "test.act")
        assert "canary" not in repr(fields)
        assert len(line.recorder.lines) == 1

    in_line(scenario)


def test_policy_speaks_before_each_call_and_its_no_is_recorded() -> None:
    """Deny is a refusal with the reason; ask is pending; both are in the record."""

    async def scenario(line: Line) -> None:
        line.policy.effects |= {"test.act": "deny", "test.echo": "ask"}

        def process() -> list[str]:
            with Session(line.attempt.far.fileno()) as session:
                return [code_of(session, "test.act", text="a"), code_of(session, "test.echo", text="b")]

        assert await talk(process) == [ErrorCode.DENIED, ErrorCode.PENDING]
        assert line.recorder.kinds() == ["call.judged", "call.judged"]
        assert [action for action, _, _ in line.policy.asked] == ["test.act", "test.echo"]

    in_line(scenario)


def test_k5_nothing_is_carried_out_once_the_job_was_told_to_end() -> None:
    """In the grace of a kill only what puts things in order is served, after it nothing."""

    async def scenario(line: Line) -> None:
        def grace() -> tuple[str, object]:
            return code_of(session, "test.act", text="a"), session.call("test.tidy")

        session = await talk(lambda: Session(line.attempt.far.fileno()))
        line.channel._run.cause = "kill"
        assert await talk(grace) == (ErrorCode.ENDED, True)
        line.channel._run.forced = True
        assert await talk(lambda: code_of(session, "test.tidy")) == ErrorCode.ENDED
        line.channel.close()
        assert await talk(lambda: code_of(session, "test.tidy")) == ErrorCode.ENDED
        assert line.recorder.lines == []
        session.close()

    in_line(scenario)


def test_answers_come_in_the_order_of_the_calls_and_eight_are_under_way() -> None:
    """The ninth call is not read before the first one is answered."""

    async def scenario(line: Line) -> list[int]:
        def send() -> Session:
            session = Session(line.attempt.far.fileno())
            with socket.socket(fileno=session.fileno()) as held:
                for number in range(MAX_IN_FLIGHT + 2):
                    held.send(json.dumps({"n": number, "op": "test.wait", "text": str(number)}).encode())
                held.detach()
            return session

        session = await talk(send)
        await await_until(lambda: len(line.waits) == MAX_IN_FLIGHT, "eight calls to be under way")
        for number in reversed(range(1, MAX_IN_FLIGHT)):
            line.waits[str(number)].set()
        await asyncio.sleep(0)
        assert len(line.waits) == MAX_IN_FLIGHT
        line.waits["0"].set()
        await await_until(lambda: len(line.waits) == MAX_IN_FLIGHT + 2, "the others to be read")
        for event in line.waits.values():
            event.set()

        def receive() -> list[int]:
            with socket.socket(fileno=session.fileno()) as held:
                found = [json.loads(held.recv(MAX_CALL_BYTES))["n"] for _ in range(MAX_IN_FLIGHT + 2)]
                held.detach()
            session.close()
            return found

        return await talk(receive)

    assert in_line(scenario) == list(range(MAX_IN_FLIGHT + 2))


def test_a_process_that_takes_no_answers_loses_its_session_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node holds for it is bounded, and after a while it is let go."""
    monkeypatch.setattr(sessions, "STUCK_S", 0.1)

    async def scenario(line: Line) -> None:
        def flood() -> Session:
            session = Session(line.attempt.far.fileno())
            call = json.dumps({"n": 1, "op": "test.echo", "text": "x" * 30_000, "times": 2}).encode()
            with socket.socket(fileno=session.fileno()) as held:
                held.settimeout(0.3)
                try:
                    for _ in range(100):
                        held.send(call)
                except OSError:
                    pass
                held.detach()
            return session

        session = await talk(flood)
        await await_until(lambda: not line.channel._sessions, "the session to end")
        assert line.told[0][1] == {"what": "answers that nobody took"}
        session.close()

    in_line(scenario)


def test_the_end_of_a_session_gives_back_what_it_held_and_stops_what_is_under_way() -> None:
    """A process that dies leaves nothing with its node."""

    async def scenario(line: Line) -> None:
        def begin() -> Session:
            session = Session(line.attempt.far.fileno())
            with socket.socket(fileno=session.fileno()) as held:
                held.send(b'{"n":1,"op":"test.wait","text":"a"}')
                held.detach()
            return session

        given: list[bool] = []
        session = await talk(begin)
        await await_until(lambda: bool(line.waits), "the call to be under way")
        (served,) = line.channel._sessions
        served._caller.closing.append(lambda: given.append(True))
        (task,) = served._tasks
        session.close()
        await await_until(lambda: served.ended, "the session to end")
        await await_until(task.done, "its call to be given up")
        assert given == [True]
        assert not line.channel._sessions

    in_line(scenario)


def test_an_unasked_record_comes_between_answers_and_is_kept_for_who_waits() -> None:
    """Signals reach a process that is in the middle of a call, and one that waits for nothing else."""

    def work(session: Session) -> list[object]:
        first = session.call("test.push", text="INT")
        second = session.call("test.push", text="TERM")
        return [first, second, session.pushed(0), session.pushed(0), session.pushed(0)]

    assert told(work)[0] == [True, True, {"signal": {"name": "INT"}}, {"signal": {"name": "TERM"}}, None]


def test_the_reference_page_is_what_the_table_says() -> None:
    """docs/reference/kernel.md lists every call of this version, and no other; `make reference` writes it."""
    entries = reference.table()
    written = (Path(__file__).parents[2] / "docs" / "reference" / "kernel.md").read_text("utf-8")
    assert written == reference.page(entries), "run: make reference"


def test_k2_every_call_says_what_it_is() -> None:
    """A name of two words, one sentence, an answer; what its fields are is made of types that the wire reads."""
    for op, entry in reference.table().items():
        noun, dot, verb = op.partition(".")
        assert (noun.isidentifier(), dot, verb.isidentifier()) == (True, ".", True), op
        assert entry.what.endswith("."), op
        assert entry.answer, op
        with pytest.raises(WireError):
            record.decode(entry.ask, {"no such field": 1})
