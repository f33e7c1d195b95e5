"""No form of a value comes out of a scrubbed stream, however it was cut into writes."""

from __future__ import annotations

import base64
import html
import itertools
import json
import urllib.parse

from hypothesis import given
from hypothesis import strategies as st

from broker.vault.redact import MIN_FORM_BYTES, Redactor, forms

VALUE = b'sk-Ab9"+/<&%zz\\end'
PRINTED = [
    VALUE,
    VALUE.hex().encode(),
    VALUE.hex().upper().encode(),
    base64.b64encode(VALUE),
    base64.b64encode(b"user:" + VALUE),
    base64.b64encode(b"ab" + VALUE + b"tail"),
    base64.urlsafe_b64encode(b"x" + VALUE),
    urllib.parse.quote(VALUE.decode(), safe="").encode(),
    urllib.parse.quote(VALUE.decode(), safe="").lower().replace("ab9", "Ab9").encode(),
    urllib.parse.quote_plus(VALUE.decode()).encode(),
    json.dumps({"k": VALUE.decode()}).encode(),
    json.dumps(json.dumps({"k": VALUE.decode()})).encode(),
    json.dumps(repr(VALUE.decode())).encode(),
    html.escape(VALUE.decode()).encode(),
    repr(VALUE.decode()).encode(),
    VALUE[::-1],
    VALUE.decode().encode("utf-16-le"),
]


def scrub(data: bytes, cuts: list[int], value: bytes = VALUE) -> tuple[bytes, int]:
    """Feed data in pieces; returns what came out and how often something was masked."""
    redactor = Redactor({"KEY": value})
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    out = b"".join(redactor.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    return out + redactor.finish(), redactor.hits


@given(
    st.sampled_from(PRINTED),
    st.binary(max_size=40),
    st.binary(max_size=40),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_vault_25_every_form_and_every_cut(printed: bytes, before: bytes, after: bytes, cuts: list[int]) -> None:
    """Each form between any bytes, in any pieces, is masked; nothing that gives the value away is left."""
    out, hits = scrub(before + b"\n" + printed + b"\n" + after, cuts)
    assert hits >= 1
    assert b"[secret:KEY]" in out
    assert not any(form in out for form in forms(VALUE))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=9))
def test_other_output_passes_unchanged(data: bytes, cuts: list[int]) -> None:
    """What holds no form comes out as it went in."""
    if not any(form in data for form in forms(VALUE)):
        assert scrub(data, cuts) == (data, 0)


def test_short_values_are_left_alone() -> None:
    """A value shorter than the least form is not looked for: it would be found everywhere."""
    assert forms(b"abc") == frozenset(form for form in forms(b"abc") if len(form) >= MIN_FORM_BYTES)
    assert scrub(b"abc abc", [], b"abc") == (b"abc abc", 0)


def test_lines_of_a_key_file() -> None:
    """Each long line of a multi-line value is masked by itself; a short one is not (it would mask ordinary text)."""
    value = b"-----BEGIN KEY-----\nMIIBVAIBADANBgkqhkiG9w0B\nabc\n-----END KEY-----\n"
    out, hits = scrub(b"x MIIBVAIBADANBgkqhkiG9w0B y abc", [], value)
    assert hits == 1
    assert out.endswith(b" y abc")


def test_found_before_it_is_let_go() -> None:
    """A value that may be the start of a longer one is held back, but known by name at once: it can end its job."""
    redactor = Redactor({"KEY": b"canary-value", "LONG": b"canary-value-and-more", "OTHER": b"another-value"})
    assert redactor.feed(b"so: canary-value") == b"so: "
    assert list(redactor.found) == ["KEY"]
    assert redactor.finish() == b"[secret:KEY]"
    assert redactor.hits == 1


def test_nothing_else_is_held_back() -> None:
    """A prompt is seen before anything follows it, and a whole value is masked at once; its start alone waits."""
    redactor = Redactor({"KEY": b"canary-value"})
    assert redactor.feed(b"Continue? [y/n] ") == b"Continue? [y/n] "
    assert redactor.feed(b"canary-value") == b"[secret:KEY]"
    assert redactor.feed(b"so: can") == b"so: "
    assert redactor.feed(b"not") == b"cannot"


@given(
    st.lists(st.sampled_from([b"abcabc", b"abcabcd", b"bcabca", b"abc", b"c", b"cba", b"x"]), max_size=12).map(
        b"".join
    ),
    st.lists(st.integers(0, 90), max_size=12),
)
def test_pieces_come_out_as_the_whole(data: bytes, cuts: list[int]) -> None:
    """However a stream is cut, it comes out as if it had come whole: values that hold each other's ends included."""
    values = {"ONE": b"abcabc", "TWO": b"abcabcd", "THREE": b"bcabcax"}
    redactor = Redactor(values)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    out = b"".join(redactor.feed(data[a:b]) for a, b in itertools.pairwise(edges)) + redactor.finish()
    assert out == Redactor(values).whole(data)


def test_repr_shows_nothing() -> None:
    """A scrubber in a traceback does not show what it looks for."""
    assert "sk-" not in repr(Redactor({"KEY": VALUE}))
