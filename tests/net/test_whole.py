"""Answers that go past the parser: whatever is taken for one, the parser reads the same way, and so does the client."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.egress.whole import Whole, whole

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello"
LINES = (
    b"Content-Length: 5", b"content-length:5", b"Content-Length: 5, 5", b"Content-Length: +5", b"Content-Length: 05",
    b"Content-Length : 5", b"Content-Length: 5 5", b"Content-Length:\t5\t", b"Content-Length: 0", b"Content-Length: ",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Connection: close", b"Connection: keep-alive",
    b"Connection: Keep-Alive, X", b"Keep-Alive: timeout=5", b"Upgrade: h2c", b"X: y", b"X:", b"X: a b\tc", b" folded",
    b"\tfolded", b"X y: z", b"X: \x00", b"X: \xc3\xa4", b"X: a\rb", b"X: a\nContent-Length: 3", b": x", b"",
    b"Content-Encoding: gzip",
)  # fmt: skip # several to a line
STARTS = (
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304 No",
    b"HTTP/1.1 100 Continue", b"HTTP/1.1 101 Other", b"HTTP/1.1 599 ", b"HTTP/1.1 999 x", b"HTTP/1.1  200 OK",
    b"HTTP/1.1 404 Not Found", b"HTTP/1.1 200 a\tb", b"\r\nHTTP/1.1 200 OK", b"HTTP/2 200 OK", b" HTTP/1.1 200 OK",
)  # fmt: skip # several to a line
ANSWERS = st.builds(
    lambda start, lines, end, body: end.join([start, *lines, b"", body]),
    st.sampled_from((*STARTS, STARTS[0], STARTS[0], STARTS[0])),
    st.lists(st.sampled_from((*LINES, LINES[0], LINES[0], LINES[0])), max_size=5),
    st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n")),
    st.sampled_from((b"hello", b"hello", b"", b"hell", b"hello!", b"5\r\nhello\r\n0\r\n\r\n", PLAIN)),
)
METHODS = st.sampled_from((b"GET", b"POST", b"HEAD", b"OPTIONS"))


def parsed(data: bytes, method: bytes) -> tuple[Whole, h11.Connection]:
    """Return an answer as the parser reads it, and the parser behind it."""
    server = h11.Connection(h11.CLIENT)
    server.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    server.send(h11.EndOfMessage())
    server.receive_data(data)
    head = server.next_event()
    assert isinstance(head, h11.Response)
    found, body = Whole(head.status_code, bytes(head.reason), [], b""), b""
    found.headers = [(bytes(name), bytes(value)) for name, value in head.headers]
    while isinstance(event := server.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    found.body = body
    return found, server


@settings(max_examples=600, deadline=None)
@given(ANSWERS, METHODS)
@example(PLAIN, b"GET")
@example(PLAIN, b"HEAD")
def test_attack_15_what_is_taken_for_whole_the_parser_reads_alike(data: bytes, method: bytes) -> None:
    """Status, reason, fields and body are the same, nothing is left over, and the connection may be kept."""
    found = whole(data, method)
    if found is None:
        return
    read, server = parsed(data, method)
    assert read == found
    assert server.trailing_data == (b"", False)
    server.start_next_cycle()


def test_a_plain_answer_is_taken() -> None:
    """The ordinary one is: else nothing here would be faster, and the test above would say nothing."""
    found = whole(PLAIN, b"GET")
    assert found is not None
    assert (found.status, found.reason, found.body) == (200, b"OK", b"hello")
    assert found.headers[1:] == [(b"connection", b"keep-alive"), (b"content-length", b"5")]
    assert whole(b"HTTP/1.1 500 Not now\r\nContent-Length: 0\r\n\r\n", b"POST") is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"HTTP/1.1", b"HTTP/1.0"), (b"200 OK", b"204 No"), (b"200 OK", b"304 No"), (b"200 OK", b"101 X"),
        (b"5\r\n", b"6\r\n"), (b"5\r\n", b"4\r\n"), (b"5\r\n", b"5\r\nContent-Length: 5\r\n"),
        (b"5\r\n", b"5\r\nTransfer-Encoding: chunked\r\n"), (b"5\r\n", b"5\r\nTrailer: x\r\n"),
        (b"5\r\n", b"5\r\n folded\r\n"), (b"5\r\n", b"0000000005\r\n"), (b"keep-alive", b"close"),
        (b"\r\n\r\n", b"\n\n"), (b"Content-Length", b"X"), (b"text", b"\xff"),
    ],
)  # fmt: skip # several to a line
def test_what_is_not_plain_is_parsed(old: bytes, new: bytes) -> None:
    """Another version, length, framing or end of lines: it is not decided here what that is."""
    assert whole(PLAIN, b"GET") is not None
    assert whole(PLAIN.replace(old, new, 1), b"GET") is None


@pytest.mark.parametrize("data", [PLAIN[:-1], PLAIN + b"H", PLAIN[:60], b"", b"HTTP/1.1 200 " + b" " * (1 << 16)])
def test_a_part_or_more_than_one_is_parsed(data: bytes) -> None:
    """What has not come whole, or has something behind it."""
    assert whole(data, b"GET") is None
