"""Every sequence of opens, calls, nonsense, closes, kill orders and ends is answered as a plain model says."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.guest.calls import CallRefused, Session
from runner.wire.calls import MAX_SESSIONS, ErrorCode
from tests.kernel.line import Line, in_line, talk
from tests.support.wait import await_until

#: What a call is answered with while nothing asked the job to end: (fields, value or code).
CALLS: dict[str, tuple[dict[str, str], object]] = {
    "test.echo": ({"text": "a"}, "a"),
    "test.act": ({"text": "b"}, "b"),
    "test.tidy": ({}, True),
    "test.refuse": ({"text": "c"}, ErrorCode.NOT_FOUND),
    "test.fail": ({}, ErrorCode.FAULT),
    "test.nonsense": ({}, ErrorCode.UNKNOWN_OP),
}
STEPS = st.one_of(
    st.just(("open", 0)),
    st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 3)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.sampled_from([("order", 0), ("force", 0), ("end", 0)]),
)


@dataclass
class Model:
    """What stands: sessions in the order in which they were given, and how far the end of the attempt has come."""

    open: list[Session] = field(default_factory=list)
    dead: list[Session] = field(default_factory=list)
    phase: str = "runs"
    recorded: int = 0

    def wanted(self, op: str) -> object:
        """Return what a call is answered with now."""
        late = {"runs": set(CALLS), "told": {"test.tidy", "test.nonsense"}, "forced": {"test.nonsense"}, "over": set()}
        return CALLS[op][1] if op in late[self.phase] else ErrorCode.ENDED


def asked(session: Session, op: str) -> object:
    """Make a call; return its value or its code."""
    try:
        return session.call(op, **CALLS[op][0])
    except CallRefused as refused:
        return refused.code


def opened(line: Line) -> Session | str:
    """Ask for a session; return it, or the code of the refusal."""
    try:
        return Session(line.attempt.far.fileno())
    except CallRefused as refused:
        return refused.code


async def step(line: Line, model: Model, what: str, which: int) -> None:
    """Do one step, and compare."""
    if what == "open":
        if model.phase == "over" or len(model.open) >= MAX_SESSIONS:
            return
        found = await talk(lambda: opened(line))
        assert isinstance(found, Session)
        model.open.append(found)
    elif what == "order":
        line.channel._run.cause = "kill"
        model.phase = "told" if model.phase == "runs" else model.phase
    elif what == "force":
        line.channel._run.cause, line.channel._run.forced = "kill", True
        model.phase = "forced" if model.phase != "over" else "over"
    elif what == "end":
        line.channel.close()
        model.phase = "over"
    elif model.open:
        session = model.open[which % len(model.open)]
        if what == "close":
            session.close()
            model.open.remove(session)
        else:
            wanted = model.wanted(what)
            assert await talk(lambda: asked(session, what)) == wanted, (what, model.phase)
            model.recorded += what == "test.act" and wanted == "b"
            if wanted is ErrorCode.UNKNOWN_OP:
                model.open.remove(session)
                model.dead.append(session)


@settings(max_examples=50)
@given(st.lists(STEPS, min_size=1, max_size=16))
def test_a_session_does_what_a_model_says(steps: list[tuple[str, int]]) -> None:
    """Answers, refusals, ends, records before acts, and how many sessions the node holds."""

    async def scenario(line: Line) -> None:
        model = Model()
        for what, which in steps:
            await step(line, model, what, which)
            held = 0 if model.phase == "over" else len(model.open)
            await await_until(lambda held=held: len(line.channel._sessions) == held, "the node to hold as many")  # type: ignore[misc] # late binding
        assert len(line.recorder.lines) == model.recorded
        for session in (*model.open, *model.dead):
            session.close()

    in_line(scenario)
