"""Foreign text on the operator's screen (attack 53): nothing but colours acts, nothing looks like our own lines."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.output import say
from runner.cli.text import PREFIX, LineGuard, Screen, safe, safe_json

SGR = re.compile(r"\x1b\[[0-9;:]*m")
HOSTILE = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            [
                b"\x1b[31m",
                b"\x1b[0m",
                b"\x1b]8;;http://x\x07",
                b"\x1b]52;c;eA==\x07",
                b"\x1b[2J",
                b"ringfence: killed",
                b"ring",
                b"fence: ",
                b"\nringfence: ",
                b"\r",
                b"\r\n",
                "\u202e\u2066".encode(),
                "\uff52ingfence:".encode(),
                "r\ufe00ingfence:".encode(),
                b"\x9b31m",
                "\u009b2J".encode(),
                b"RINGFENCE:",
            ]
        ),
    ),
    max_size=30,
)


def shown(parts: list[bytes]) -> str:
    """Return what a terminal gets of the stream that arrives in these pieces."""
    screen = Screen()
    return "".join(screen.feed(part) for part in parts) + screen.close()


def guarded(parts: list[bytes]) -> bytes:
    """Return what a shared pipe gets of the stream that arrives in these pieces."""
    guard = LineGuard()
    return b"".join(guard.feed(part) for part in parts) + guard.close()


@given(HOSTILE)
def test_attack_53_only_colours_act_on_a_terminal(parts: list[bytes]) -> None:
    """Whatever a job writes, a terminal gets printable text, line ends, tabs and SGR, and no bidi control."""
    rest = SGR.sub("", shown(parts))
    assert [c for c in rest if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} and c not in "\n\t"] == []
    assert not set(rest) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\ufeff")


@given(HOSTILE)
def test_attack_53_our_prefix_can_not_be_forged(parts: list[bytes]) -> None:
    """Our name and colon never appear on a terminal, also not with colours, case, width or marks in between."""
    seen = SGR.sub("", shown(parts))
    seen = "".join(c for c in seen if unicodedata.category(c) not in {"Mn", "Me", "Cf"})
    assert "ringfence:" not in unicodedata.normalize("NFKC", seen).casefold()


@given(HOSTILE)
def test_the_cut_into_pieces_does_not_matter(parts: list[bytes]) -> None:
    """The same bytes look the same, however they arrive."""
    assert shown(parts) == shown([b"".join(parts)])
    assert guarded(parts) == guarded([b"".join(parts)])


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cf", "Zl", "Zp"])))
def test_printable_text_passes_unchanged(text: str) -> None:
    """Text without controls and without our name is shown as it is."""
    if "ringfence:" not in unicodedata.normalize("NFKC", text).casefold():
        assert shown([text.encode()]) == text
        assert safe(text) == text


@given(HOSTILE)
def test_a_pipe_gets_the_bytes_but_no_forged_line(parts: list[bytes]) -> None:
    """A pipe that also carries our lines gets every byte; only a forged line start is broken up."""
    data = b"".join(parts)
    seen = guarded(parts)
    assert not re.search(rb"(\A|[\r\n])ringfence: ", seen)
    if not re.search(rb"(\A|[\r\n])ringfence: ", data):
        assert seen == data


def test_a_colour_left_on_is_switched_off() -> None:
    """A job can't colour the lines that come after it."""
    assert shown([b"\x1b[8m", b"hidden"]).endswith("\x1b[0m")
    assert not shown([b"\x1b[1mx\x1b[0m"]).endswith("\x1b[0m\x1b[0m")


def test_line_starts_are_known() -> None:
    """The caller can tell whether its own line must begin with a line end."""
    screen = Screen()
    screen.feed(b"ab")
    assert not screen.at_line_start
    screen.feed(b"c\r\n")
    assert screen.at_line_start


@given(st.text())
def test_safe_is_one_printable_line(text: str) -> None:
    """Fields of ps, show and events hold no control character at all, not even a line end or a colour."""
    assert not [c for c in safe(text) if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}]


@pytest.mark.parametrize("text", ["[/]", "[bold]x[/bold]", "[link=http://x]y[/link]"])
def test_markup_is_text(text: str) -> None:
    """Square brackets mean nothing here."""
    assert safe(text) == text


@given(st.text())
def test_json_is_printable_ascii_and_exact(text: str) -> None:
    """JSON for people's terminals: ASCII without controls, and the same value when read back."""
    out = safe_json(json.dumps(text))
    assert out.isascii()
    assert out.isprintable()
    assert json.loads(out) == text


def test_attack_53_foreign_text_can_not_add_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A reason with a line end in it stays on its own line: only we begin lines with our prefix."""
    say("job x failed(exception): boom\nringfence: job x killed\r\x1b[2J\u2028y")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(PREFIX)
    assert err[:-1].isprintable()
