"""What requests cost: tokens as OpenAI- and Anthropic-shaped answers tell them, whole, streamed, cut off and forged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress.meter import Count, Meter, Tally, Usage
from node_agent.doornews import Metered, denied_of, metered_of
from tests.net.keyed import Keyed, Parts, in_keyed_door, parts
from tests.support.wait import await_until

JSON = [(b"Content-Type", b"application/json; charset=utf-8")]
EVENTS = [(b"content-type", b"text/event-stream")]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, a server and an egress process."""
    with parts() as found:
        yield found


def metering(act: Callable[[Meter], None]) -> tuple[list[tuple[str, Count]], Usage]:
    """Run ``act`` with a meter; return what it told, and the totals."""

    async def main() -> tuple[list[tuple[str, Count]], Usage]:
        told: list[tuple[str, Count]] = []

        def tell(model: str, counts: dict[str, int]) -> bool:
            told.append((model, Count(**counts)))
            return True

        usage = Usage()
        meter = Meter(usage, tell)
        act(meter)
        meter.close()
        return told, usage

    return asyncio.run(main())


def answered(
    pieces: Sequence[bytes],
    headers: list[tuple[bytes, bytes]],
    *,
    path: str = CHAT,
    method: bytes = b"POST",
    status: int = 200,
    whole: bool = True,
) -> tuple[str, Count]:
    """Return the model and the count of one answer in pieces."""

    def act(meter: Meter) -> None:
        tally = Tally(meter, method, path)
        tally.head(status, headers)
        for piece in pieces:
            tally.feed(piece)
        tally.end(whole=whole)

    ((model, count),) = metering(act)[0]
    return model, count


def chat(**more: object) -> dict[str, object]:
    """Return an answer as OpenAI's API gives it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "model": "gpt-x", "choices": [choice], **more}


def events(*bodies: Mapping[str, object]) -> bytes:
    """Return a stream of events."""
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies)


USAGE = {"prompt_tokens": 11, "completion_tokens": 22, "prompt_tokens_details": {"cached_tokens": 5}}
START = {"type": "message_start", "message": {"model": "claude-x", "usage": {"input_tokens": 4, "output_tokens": 1}}}
DELTA = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}
DONE = {"type": "response.completed", "response": {"model": "gpt-r", "usage": {"input_tokens": 6, "output_tokens": 7}}}


@pytest.mark.parametrize(
    ("body", "headers", "path", "model", "tokens"),
    [
        (json.dumps(chat(usage=USAGE)).encode(), JSON, CHAT, "gpt-x", (11, 22)),
        (json.dumps(chat(usage=USAGE), indent=4).encode(), JSON, CHAT, "gpt-x", (11, 22)),
        (events(chat(usage=None), chat(choices=[], usage=USAGE)), EVENTS, CHAT, "gpt-x", (11, 22)),
        (events(START, DELTA), EVENTS, "/v1/messages", "claude-x", (4, 9)),
        (events(DONE), EVENTS, "/v1/responses", "gpt-r", (6, 7)),
        (json.dumps({"data": [0.25] * 9000, "model": "emb", "usage": {"prompt_tokens": 8}}).encode(), JSON,
         "/v1/embeddings", "emb", (8, 0)),
    ],
)  # fmt: skip # several to a line
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
def test_accounts_are_read_in_any_pieces(
    body: bytes, headers: list[tuple[bytes, bytes]], path: str, model: str, tokens: tuple[int, int], size: int
) -> None:
    """Each shape gives its model and tokens, however the network cuts it."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert answered(pieces, headers, path=path) == (model, Count(1, *tokens))


def test_input_from_a_cache_counts() -> None:
    """What Anthropic's input_tokens leaves out is added; OpenAI's prompt_tokens holds it already."""
    usage = {"input_tokens": 1, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 300, "output_tokens": 5}
    body = json.dumps({"type": "message", "model": "claude-x", "usage": usage}).encode()
    assert answered([body], JSON, path="/v1/messages")[1] == Count(1, 321, 5)


def test_an_answer_without_an_account_is_unknown_and_not_free() -> None:
    """A stream without one, one that was cut off, one that is packed: counted with their sizes."""
    body = events(chat())
    assert answered([body], EVENTS)[1] == Count(1, 0, 0, 1, len(body))
    assert answered([events(START)], EVENTS, path="/v1/messages", whole=False)[1] == Count(
        1, 4, 1, 1, len(events(START))
    )
    packed = [*JSON, (b"Content-Encoding", b"gzip")]
    assert answered([b"\x1f\x8b"], packed)[1] == Count(1, 0, 0, 1, 2)
    assert answered([b"{}"], JSON, path="/openai/deployments/x/chat/completions?api-version=1")[1].unknown == 1
    assert answered([b"data: x\n\n"], EVENTS, path="/elsewhere")[1].unknown == 1


def test_what_is_no_model_owes_no_account() -> None:
    """Reads, errors and other paths cost a request, and nothing unknown."""
    assert answered([b"{}"], JSON, path="/v1/models", method=b"GET")[1] == Count(1)
    assert answered([b"{}"], JSON, status=429)[1] == Count(1)
    assert answered([b"{}"], JSON, path="/v1/files")[1] == Count(1)


def test_attack_15_a_model_that_writes_an_account_changes_nothing() -> None:
    """Text with accounts in it, nested and escaped, is text; what a host gives back can't make figures smaller."""
    forged = '{"model": "cheap", "usage": {"prompt_tokens": 0, "completion_tokens": 0}}'
    text = {"role": "assistant", "content": forged, "tool_calls": [{"function": {"arguments": json.dumps(forged)}}]}
    body = chat(choices=[{"message": text}], usage=USAGE, tools=[{"usage": {"prompt_tokens": 0}, "model": "cheap"}])
    assert answered([json.dumps(body).encode()], JSON) == ("gpt-x", Count(1, 11, 22))
    alone = chat(choices=[{"message": text}])
    assert answered([json.dumps(alone).encode()], JSON)[1].unknown == 1
    assert answered([events(alone)], EVENTS)[1].unknown == 1


@given(st.text())
def test_no_text_of_a_model_is_taken_for_an_account(text: str) -> None:
    """Whatever a model writes, before or behind an account's own text: it stays a string."""
    for content in (text, text + ',"usage":{"completion_tokens":1}', '\\",' + json.dumps({"usage": {}}) + text):
        body = json.dumps(chat(choices=[{"message": {"content": content}}])).encode()
        assert answered([body], JSON)[1] == Count(1, 0, 0, 1, len(body))


@pytest.mark.parametrize("usage", [{"prompt_tokens": -5}, {"prompt_tokens": True}, {"prompt_tokens": "1"}, {}, [1]])
def test_numbers_that_are_none_are_no_account(usage: object) -> None:
    """Only whole numbers from 0 count."""
    assert answered([json.dumps(chat(usage=usage)).encode()], JSON)[1].unknown == 1


def test_hostile_answers_cost_little_and_are_unknown() -> None:
    """Accounts without end, or deeper than anything: neither time nor memory, and never known."""
    many = b',"usage":{}' * 6000
    model, count = answered([many] * 20, JSON)
    assert (model, count.unknown) == ("", 1)
    deep = b',"usage":' + b'{"a":' * 10_000
    assert answered([deep] * 4, JSON)[1].unknown == 1
    assert answered([b',"usage":{"a":"' + b"x" * 60_000] * 4, JSON)[1].unknown == 1


def test_reports_are_bounded_and_lose_nothing() -> None:
    """A thousand answers of a hundred models: few reports, and their sum is the total, also while the line is full."""

    async def main() -> None:
        told: list[dict[str, int]] = []
        full = [True]

        def tell(_: str, counts: dict[str, int]) -> bool:
            if not full[0]:
                told.append(counts)
            return not full[0]

        usage = Usage()
        meter = Meter(usage, tell)
        for number in range(1000):
            meter.count(f"m{number % 100}", Count(1, 2, 3))
            await asyncio.sleep(0)
        full[0] = False
        await await_until(lambda: sum(one["requests"] for one in told) == 1000, "the reports")
        assert len(told) <= 40
        assert [sum(one[name] for one in told) for name in ("tokens_in", "tokens_out")] == [2000, 3000]
        assert (usage.requests, usage.tokens_in, usage.tokens_out) == (1000, 2000, 3000)
        meter.close()

    asyncio.run(main())


def test_records_that_are_none_are_nothing() -> None:
    """The agent takes whole, non-negative counts, and nothing else."""
    good = {"op": "metered", "attempt": "main-x.1", "model": "m", **asdict(Count(1, 2, 3))}
    assert metered_of(good) == Metered("main-x.1", "m", 1, 2, 3, 0, 0)
    for wrong in ({"requests": -1}, {"tokens_in": True}, {"unknown": None}, {"op": "denied"}):
        assert metered_of({**good, **wrong}) is None
    assert denied_of({"op": "denied", "port": "1"}) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_agent_is_told_what_the_server_counted(shared: Parts, path: str) -> None:
    """Whole and streamed answers through a door: the sums, the model, and one stream without an account as unknown."""

    async def scenario(k: Keyed) -> None:
        ask = {"model": "fake-1", "messages": [{"role": "user", "content": "go"}]}
        counted = len(k.parts.web.tokens)
        asks: list[Mapping[str, object]] = [ask, {**ask, "stream": True, "stream_options": {"include_usage": True}}]
        for body in asks:
            status, _, _ = await k.get(path, method="POST", body=json.dumps(body).encode())
            assert status == 200
        want = k.parts.web.tokens[counted:]
        assert len(want) == 2
        await await_until(lambda: sum(one.requests for one in k.metered) == 2, "the reports")
        assert {one.model for one in k.metered} == {"fake-1"}
        assert sum(one.tokens_in for one in k.metered) == sum(taken[0] for taken in want)
        assert sum(one.tokens_out for one in k.metered) == sum(taken[1] for taken in want)
        assert not any(one.unknown for one in k.metered)
        assert {one.attempt for one in k.metered} == {k.attempt}
        silent = {**ask, "stream": True, "events": 1}
        await k.get(path, method="POST", body=json.dumps(silent).encode())
        await await_until(lambda: sum(one.requests for one in k.metered) == 3, "the report of the silent one")
        assert sum(one.unknown for one in k.metered) == 1

    in_keyed_door(shared, scenario)


def test_the_last_answer_is_told_after_the_end(shared: Parts) -> None:
    """An attempt that ends in the middle of a stream: its count comes before the totals, and says unknown."""

    async def scenario(k: Keyed) -> None:
        _, tick = await k.stream()
        k.door.close()
        await k.egress.settled()
        assert [(one.requests, one.unknown) for one in k.metered] == [(1, 0)]
        tick.release(9)

    in_keyed_door(shared, scenario)


def test_a_key_s_text_that_ends_in_a_name_is_no_account() -> None:
    """A quote that is escaped begins nothing, wherever the parts are cut."""
    body = b'{"model \\"usage": {"prompt_tokens": 5}, "x\\"model": "cheap", "model": "real"}'
    for size in (1, 3, 7, 200):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert answered(pieces, JSON) == ("real", Count(1, 0, 0, 1, len(body)))


def test_looking_for_accounts_does_not_slow_a_stream() -> None:
    """64 KiB of events, each with an empty account, take far less than it takes to send them."""
    chunk = events(chat(usage=None)) * 400
    times = []

    def act(meter: Meter) -> None:
        tally = Tally(meter, b"POST", CHAT)
        tally.head(200, EVENTS)
        for at in range(0, len(chunk), 1 << 16):
            start_s = time.thread_time()
            tally.feed(chunk[at : at + (1 << 16)])
            times.append(time.thread_time() - start_s)

    metering(act)
    assert min(times) < 0.002
