"""Counts that a job or a host wants to be nothing, or too much: what is not told is not free, and what is written into
an answer is no account (attacks 15 and 42)."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.egress.accounts import Reader
from broker.egress.confine import State
from broker.egress.meter import Count, Meter, Tally, Usage, models_path
from broker.egress.service import Service, _Agent
from runner.wire import codec
from tests.net.test_meter import CHAT, EVENTS, JSON, USAGE, answered, chat, events, metering
from tests.support.wait import await_until

FAKE = {"usage": {"input_tokens": 0, "output_tokens": 0}, "model": "cheap"}
BEGUN = {"type": "response.created", "response": {"model": "gpt-r", "tools": [{"parameters": FAKE}], "usage": None}}
ENDED = {"type": "response.completed", "response": {"model": "gpt-r", "usage": {"input_tokens": 6, "output_tokens": 7}}}


def asked(*pieces: bytes, method: bytes = b"POST", path: str = CHAT, head: bool = True) -> Count:
    """Return the count of a request whose answer is one event, or never begins."""

    def act(meter: Meter) -> None:
        tally = Tally(meter, method, path)
        for piece in pieces:
            tally.sent(piece)
        if head:
            tally.head(200, EVENTS)
            tally.feed(b"data: {}\n\n")
        tally.end(whole=head)

    ((_, count),) = metering(act)[0]
    return count


@pytest.mark.parametrize("size", [1, 9, 300, 1 << 16])
@pytest.mark.parametrize("pad", [0, 100, 5000])
def test_attack_15_what_a_job_has_come_back_as_json_is_no_account(size: int, pad: int) -> None:
    """Schemas of tools and what a model gives a tool: deeper than accounts stand, whether they say little or much."""
    much = {"input_tokens": 10**9, "output_tokens": 10**9}
    used = {"type": "tool_use", "input": {"usage": much, "x": "y" * pad + '\\"{["', "model": "dear"}}
    body = {"metadata": FAKE, "content": [used], "model": "claude-x", "usage": {"input_tokens": 4, "output_tokens": 5}}
    for text in (json.dumps(body), json.dumps(body, indent=1)):
        pieces = [text.encode()[at : at + size] for at in range(0, len(text), size)]
        assert answered(pieces, JSON, path="/v1/messages") == ("claude-x", Count(1, 4, 5))
    stream = events({**BEGUN, "pad": "x" * pad}, ENDED)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert answered(pieces, EVENTS, path="/v1/responses") == ("gpt-r", Count(1, 6, 7))


def test_who_leaves_before_the_last_word_has_not_heard_the_account() -> None:
    """A first account, one of the job's own, or one that an answer says it has not yet: unknown, with all its bytes."""
    begun = b"event: response.created\n" + events(BEGUN)
    assert answered([begun], EVENTS, path="/v1/responses", whole=False)[1].unknown_bytes == len(begun)
    flat = begun + events({"usage": {"input_tokens": 1, "output_tokens": 1}})
    assert answered([flat], EVENTS, path="/v1/responses", whole=False)[1].unknown_bytes == len(flat)
    half = json.dumps(chat(usage=USAGE)).encode()[:-1]
    assert answered([half], JSON, whole=False)[1].unknown == 1
    later = {"status": "queued", "model": "gpt-r", "usage": None, "tools": [{"parameters": FAKE}]}
    assert answered([json.dumps(later).encode()], JSON, path="/v1/responses")[1].unknown == 1
    # What works in the background is heard by asking for it later.
    assert answered([begun], EVENTS, path="/v1/responses/r1?stream=true", method=b"GET", whole=False)[1].unknown == 1
    assert answered([b"data: 1\n\n"], EVENTS, path="/news", method=b"GET", whole=False)[1] == Count(1)


@pytest.mark.parametrize(
    ("path", "text", "tokens"),
    [
        (CHAT, events(chat(choices=[], usage=USAGE)) + b"data: [DONE]\n\n", (11, 22)),
        (CHAT, events(chat(choices=[], usage=USAGE)) + b"data:[DONE]\r\n\r\n", (11, 22)),
        ("/v1/responses", b"event: response.completed\n" + events(ENDED), (6, 7)),
        ("/v1/messages", events({"usage": {"input_tokens": 6, "output_tokens": 7}})
         + b'event: message_stop\ndata: {"type":"message_stop"   }\n\n', (6, 7)),
    ],
)  # fmt: skip # several to a line
@pytest.mark.parametrize("size", [1, 10, 1 << 16])
def test_who_leaves_after_the_last_word_has(path: str, text: bytes, tokens: tuple[int, int], size: int) -> None:
    """Clients close when the stream has said that it ends; nothing of that is unknown, but one byte less is."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert answered(pieces, EVENTS, path=path, whole=False)[1] == Count(1, *tokens)
    if b"[DONE]" not in text:
        assert answered([text[:-1]], EVENTS, path=path, whole=False)[1].unknown == 1
    said = events(chat(choices=[{"delta": {"content": "\ndata: [DONE]\n\nevent: message_stop\n\n"}}], usage=USAGE))
    assert answered([said], EVENTS, path=path, whole=False)[1].unknown == 1


def test_what_goes_into_a_model_that_does_not_tell_it_counts() -> None:
    """A long question with a short answer, or one that is left before the answer: its bytes, unless what went in is
    told."""
    assert asked(b"x" * 50_000, b"y" * 50_000).unknown_sent_bytes == 100_000
    assert asked(b"x" * 100, head=False) == Count(1, 0, 0, 1, 0, 0, 100)
    assert asked(b"x" * 100, path="/upload", head=False) == Count(1)
    start = {"message": {"usage": {"input_tokens": 4, "output_tokens": 1}}}

    def act(meter: Meter) -> None:
        tally = Tally(meter, b"POST", "/v1/messages")
        tally.sent(b"x" * 100)
        tally.head(200, EVENTS)
        tally.feed(events(start))
        tally.end(whole=False)

    assert metering(act)[0] == [("", Count(1, 4, 1, 1, len(events(start))))]


@pytest.mark.parametrize("method", [b"POST", b"post", b"PUT", b"QUERY"])
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/%63ompletions", "/v1/%2563hat/completion%73", "/V1/Messages", "/v1//messages/", "/v1/messages;x=1/",
     "/v1/chat/x/../completions?a", "/v1%2fresponses", "/api/./chat", "/v1beta/models/g-2:streamGenerateContent",
     "/model/a.b/invoke", "/v1/messages/count_tokens/../"],
)  # fmt: skip # several to a line
def test_a_model_s_path_is_one_in_every_form(path: str, method: bytes) -> None:
    """What a host may read as a model's path is one, with any method that makes something."""
    assert models_path(path)
    assert asked(b"ab", method=method, path=path, head=False).unknown == 1


def test_other_paths_are_none() -> None:
    """Lists, files, what only counts tokens, and what names a model's path in its query."""
    for path in ("/v1/models", "/v1/files", "/x?y=/messages", "/api/chart", "/a.b/%7Bx%7D", "/"):
        assert not models_path(path)
    assert answered([b'{"input_tokens": 9}'], JSON, path="/v1/messages/count_tokens")[1] == Count(1)


@settings(max_examples=50)
@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["usage", "model", 'a"b', "c\\"]) | st.text(), inner)), st.integers(1, 40))  # fmt: skip # rows
def test_no_value_of_a_job_s_making_hides_or_makes_an_account(value: object, size: int) -> None:
    """Whatever comes back deeper down, cut anywhere: the account at the top is read, and that one alone."""
    text = json.dumps({"a": [[value]], "model": "m", "usage": {"input_tokens": 3}, "b": [[value]]}).encode()
    reader = Reader()
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    assert (reader.tokens, reader.accounts, reader.model, reader.missing) == ((3, 0), 1, "m", False)


def test_attack_42_sums_stay_numbers_that_can_be_told() -> None:
    """A host that says a billion for ever: the record of the totals is one that the agent can read."""

    async def main() -> None:
        usage = Usage()
        meter = Meter(usage, lambda _model, _counts: True)
        for _ in range(3):
            meter.count("m", Count(1, 2**62, 2**62))
        record = codec.load(codec.dump(asdict(usage)))
        assert isinstance(record, dict)
        assert record["tokens_in"] == 2**53
        meter.close()

    asyncio.run(main())
    assert answered([json.dumps({"usage": {"prompt_tokens": 10**9 + 1}}).encode()], JSON)[1].unknown == 1


def test_attack_42_reports_of_a_job_cost_others_no_door() -> None:
    """An agent that does not read for a while: reports wait at their door, answers and last words come later."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service = Service(listener, None, State(0, 0, frozenset()), caps=None, most=1)  # type: ignore[arg-type] # unused
        agent = _Agent(service, ours, 0)
        agent.doors["live"] = None  # type: ignore[assignment] # only whether it is there counts
        counts = asdict(Count(1, 2, 3))
        told = 0
        while agent._metered("live", "m", counts):
            told += 1
            assert told < 100_000
        for number in range(50):
            agent._answer({"id": number})
        assert agent._metered("closed", "m", counts)
        assert not agent._metered("live", "m", counts)
        assert ours.fileno() >= 0
        theirs.setblocking(False)
        found: list[bytes] = []

        def read() -> bool:
            with suppress(BlockingIOError):
                while True:
                    found.append(theirs.recv(1 << 16))
            return b'"closed"' in found[-1]

        await await_until(read, "the last word")
        assert len(found) == told + 51
        assert [codec.load(one)["id"] for one in found[told:-1]] == list(range(50))  # type: ignore[call-overload, index] # records
        assert agent._metered("live", "m", counts)
        agent.doors.clear()
        agent.leave()
        agent._answer({"id": 1})
        theirs.close()
        listener.close()

    asyncio.run(main())
