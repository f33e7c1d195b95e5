"""The name in a TLS greeting: read from whole greetings of real clients, and refused from anything else."""

from __future__ import annotations

import ssl
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress import hello
from broker.egress.errors import RefusedError

__all__ = ["greeting", "with_extension"]


@cache
def greeting(name: str | None) -> bytes:
    """Return the first bytes of a real TLS client; made once for each name, as it takes 30 ms."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    context.verify_mode = ssl.CERT_NONE if name is None else ssl.CERT_REQUIRED
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def with_extension(data: bytes, kind: int, value: bytes) -> bytes:
    """Return a greeting with one more extension, its lengths put right."""
    body = bytearray(data[9:])
    at = 34
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2], "big")
    at += 1 + body[at]
    extra = kind.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value
    size = int.from_bytes(body[at : at + 2], "big") + len(extra)
    body[at : at + 2] = size.to_bytes(2, "big")
    whole = bytes(body) + extra
    message = b"\x01" + len(whole).to_bytes(3, "big") + whole
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def test_a_real_client_s_name_is_read() -> None:
    """The name of a real greeting, byte by byte: not whole until the last byte."""
    data = greeting("api.example.com")
    assert all(hello.parse(data[:size]) is None for size in range(len(data)))
    assert hello.parse(data) == hello.Hello("api.example.com", ech=False)
    assert hello.parse(data + b"more") == hello.Hello("api.example.com", ech=False)
    assert hello.parse(greeting(None)) == hello.Hello(None, ech=False)


def test_a_greeting_in_many_records_is_put_together() -> None:
    """A greeting cut into records of 20 bytes has the same name."""
    message = greeting("api.example.com")[5:]
    parts = [message[at : at + 20] for at in range(0, len(message), 20)]
    data = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)
    assert hello.parse(data) == hello.Hello("api.example.com", ech=False)
    assert hello.parse(data[:-1]) is None


def test_attack_14_an_encrypted_greeting_is_seen() -> None:
    """A greeting that carries another, encrypted one is told apart."""
    data = with_extension(greeting("api.example.com"), 0xFE0D, b"\0" * 40)
    assert hello.parse(data) == hello.Hello("api.example.com", ech=True)


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\x0a\x00\x00\x07evil.io",  # a second server_name extension
        b"\x00\x00",
    ],
)
def test_a_second_name_is_refused(value: bytes) -> None:
    """Two names in one greeting are two answers to the question who is asked for."""
    with pytest.raises(RefusedError):
        hello.parse(with_extension(greeting("api.example.com"), 0, value))


def test_two_names_in_one_list_are_refused() -> None:
    """A list of two names is refused, whatever their order."""
    names = b"".join(b"\x00" + len(name).to_bytes(2, "big") + name for name in (b"api.example.com", b"evil.io"))
    data = with_extension(greeting(None), 0, len(names).to_bytes(2, "big") + names)
    with pytest.raises(RefusedError):
        hello.parse(data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-x\r\n",
        b"\x80\x2e\x01\x03\x01",  # SSLv2 greeting
        b"\x16\x02\x00\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # a ServerHello
        b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",  # too short to be one
    ],
)
def test_what_is_no_greeting_is_refused(data: bytes) -> None:
    """Other protocols and malformed greetings don't get through."""
    with pytest.raises(RefusedError):
        hello.parse(data)


def test_an_endless_greeting_is_refused() -> None:
    """A client that announces a long greeting is not read for ever."""
    record = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + b"\0" * (0x4000 - 4)
    rest = b"\x16\x03\x01\x40\x00" + b"\0" * 0x4000
    with pytest.raises(RefusedError):
        hello.parse(record + rest + rest)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_break_the_parser(noise: bytes, at: int) -> None:
    """Any bytes, and any damage to a real greeting, are a greeting, not whole yet, or refused."""
    real = greeting("api.example.com")
    for data in (noise, b"\x16\x03\x01" + noise, real[:at] + noise + real[at + len(noise) :]):
        try:
            found = hello.parse(data)
        except RefusedError:
            continue
        assert found is None or isinstance(found, hello.Hello)


def guarded(parts: list[bytes]) -> tuple[bytes, list[str | None]]:
    """Feed ``parts`` to a guard; return what it passed on, and the names it judged."""
    names: list[str | None] = []
    guard = hello.Guard(lambda greeting: names.append(greeting.name))
    return b"".join(guard.feed(part) for part in parts), names


CCS = b"\x14\x03\x03\x00\x01\x01"
DATA = b"\x17\x03\x03\x00\x05abcde"


@pytest.mark.parametrize("between", [b"", CCS, CCS + CCS])
@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
def test_attack_14_a_second_greeting_is_judged_too(between: bytes, cut: int) -> None:
    """A client that greets again with another name, as a server may ask for, is judged again, however it is cut."""
    stream = greeting("api.example.com") + between + greeting("evil.io") + DATA
    out, names = guarded([stream[at : at + cut] for at in range(0, len(stream), cut)])
    assert (out, names) == (stream, ["api.example.com", "evil.io"])


def test_attack_14_a_second_greeting_behind_early_data_is_judged_too() -> None:
    """Data that is sent at once doesn't hide a second greeting; in records of any size."""
    first = with_extension(greeting("api.example.com"), 42, b"")
    message = greeting("evil.io")[5:]
    pieces = [
        b"\x16\x03\x03" + len(part).to_bytes(2, "big") + part for part in (message[:1], message[1:90], message[90:])
    ]
    stream = first + CCS + DATA * 40 + b"".join(pieces) + DATA
    out, names = guarded([stream[at : at + 11] for at in range(0, len(stream), 11)])
    assert (out, names) == (stream, ["api.example.com", "evil.io"])


def test_a_handshake_goes_on_without_delay() -> None:
    """What follows a greeting in an ordinary handshake is passed on at once; nothing waits for more bytes."""
    key_exchange = b"\x16\x03\x03\x00\x06\x10\x00\x00\x02ab"
    finished = b"\x16\x03\x03\x00\x28" + b"\x01\x00\x00\x07\x99" + bytes(35)
    for later in (key_exchange, CCS + finished, CCS + DATA, DATA, b"\x15\x03\x03\x00\x02\x01\x00"):
        first = greeting("api.example.com")
        assert guarded([first, later]) == (first + later, ["api.example.com"])
