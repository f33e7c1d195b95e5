"""Text from jobs and from the store, made harmless for a terminal (attack 53).

Called by every command that prints. Must never let a foreign control character but colours (SGR) reach a terminal, and
never let foreign text look like one of our own lines, which start with `PREFIX`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from typing import Final

__all__ = ["PREFIX", "LineGuard", "Screen", "safe", "safe_json"]

#: Our own lines start with this; foreign text never shows it.
PREFIX: Final = "ringfence: "

_NAME: Final = "ringfence:"
_FORGED: Final = re.compile(rb"([\r\n])ringfence: ")
_FORGED_START: Final = re.compile(rb"[\r\n](?:%b)\Z" % b"|".join(b"ringfence: "[:size] for size in range(10, -1, -1)))
#: What passes a terminal unread: printable ASCII but the letter that our own name starts with.
_PLAIN: Final = re.compile(r"[\n\t -QS-qs-~]+")
#: So much text after a possible start of our name is looked at, in characters.
_NAME_WINDOW: Final = 80
_HIDDEN_CATEGORIES: Final = frozenset({"Mn", "Me", "Cf"})
_CONTROL_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Format characters that may pass: they shape letters of several scripts and join emoji.
_SHAPERS: Final = frozenset("\u200c\u200d")
_SGR: Final = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_SGR_START: Final = re.compile(r"\x1b(\[[0-9;:]{0,64})?")
_RESET: Final = "\x1b[0m"


def safe(text: str) -> str:
    """Return ``text`` on one line, with every control, bidi and line-break character in its escaped form."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if _is_control(char) else char for char in text)


def safe_json(text: str) -> str:
    """Return JSON of ASCII escapes without the one control character that JSON lets through."""
    return text.replace("\x7f", "\\u007f")


class Screen:
    """A job's byte stream for a terminal: printable text, line ends, tabs and colours pass, all else is escaped.

    ``ringfence:`` is broken up wherever it stands, because a terminal wraps long lines and so a forged line could
    start in the middle of a real one. Keep one Screen per stream; ``feed`` may hold back a few characters until it
    knows whether they are a colour or a forgery.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""
        self._coloured = False
        self.at_line_start = True

    def feed(self, data: bytes) -> str:
        """Return the harmless text of ``data``."""
        return self._convert(self._decoder.decode(data), final=False)

    def close(self) -> str:
        """Return what was held back, and switch colours off if the job left them on."""
        out = self._convert(self._decoder.decode(b"", final=True), final=True)
        if self._coloured:
            self._coloured = False
            out += _RESET
        return out

    def _convert(self, text: str, *, final: bool) -> str:
        text, self._rest = self._rest + text, ""
        out: list[str] = []
        position = 0
        while position < len(text):
            plain = _PLAIN.match(text, position)
            if plain:
                out.append(plain[0])
                position = plain.end()
                continue
            step = self._step(text, position, out, final=final)
            if step == 0:
                self._rest = text[position:]
                break
            position += step
        shown = "".join(out)
        if shown:
            self.at_line_start = shown.endswith("\n")
        return shown

    def _step(self, text: str, start: int, out: list[str], *, final: bool) -> int:
        """Convert what starts at ``start``; return the characters used, 0 for "more is needed"."""
        char = text[start]
        if char == "\x1b":
            return self._escape_sequence(text, start, out, final=final)
        if char == "\r" and start + 1 == len(text) and not final:
            return 0
        if text.startswith("\r\n", start):
            out.append("\n")
            return 2
        if unicodedata.normalize("NFKC", char).casefold().startswith("r"):
            return self._name(text, start, out, final=final)
        out.append(_shown(char))
        return 1

    def _escape_sequence(self, text: str, start: int, out: list[str], *, final: bool) -> int:
        """Pass a colour, escape anything else; return as `_step`."""
        colour = _SGR.match(text, start)
        if colour:
            self._coloured = colour[0] not in {_RESET, "\x1b[m"}
            out.append(colour[0])
            return colour.end() - start
        begun = _SGR_START.match(text, start)
        if begun and begun.end() == len(text) and not final:
            return 0
        out.append("\\x1b")
        return 1

    def _name(self, text: str, start: int, out: list[str], *, final: bool) -> int:
        """Break up our own name, also one with colours or invisible characters inside; return as `_step`."""
        found = _match_name(text, start)
        if found is None:
            if len(text) - start <= _NAME_WINDOW and not final:
                return 0
            found = not final
        out.append("\\x72" if found else text[start])
        return 1


class LineGuard:
    """A job's byte stream for a pipe that also carries our own lines: bytes pass, forged own lines are broken up."""

    def __init__(self) -> None:
        self._held = b""
        self._fresh = True

    def feed(self, data: bytes) -> bytes:
        """Return ``data`` with the first letter of each forged line escaped; may hold back a few bytes."""
        before = b"\n" if self._fresh else b""
        clean = _FORGED.sub(rb"\1\\x72ingfence: ", before + self._held + data)
        unsure = _FORGED_START.search(clean)
        end = unsure.start() + 1 if unsure else len(clean)
        self._held, self._fresh = clean[end:], unsure is not None
        return clean[len(before) : end]

    def close(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held


def _match_name(text: str, start: int) -> bool | None:
    """Return whether our name starts at ``start``; None when the text ends before that is known."""
    wanted = 0
    position = start
    while position < len(text):
        colour = _SGR.match(text, position)
        if colour:
            position = colour.end()
            continue
        char = text[position]
        position += 1
        if unicodedata.category(char) in _HIDDEN_CATEGORIES:
            continue
        if char == "\x1b" and _SGR_START.fullmatch(text, position - 1):
            return None
        for part in unicodedata.normalize("NFKC", char).casefold():
            if part != _NAME[wanted]:
                return False
            wanted += 1
            if wanted == len(_NAME):
                return True
    return None


def _shown(char: str) -> str:
    return char if char in "\n\t" or not _is_control(char) else _escaped(char)


def _is_control(char: str) -> bool:
    category = unicodedata.category(char)
    return category in _CONTROL_CATEGORIES or (category == "Cf" and char not in _SHAPERS)


def _escaped(char: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(char)
    if char in short:
        return short[char]
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
