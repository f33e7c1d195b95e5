"""Takes values out of what a host answers: each form is overwritten with as many other bytes, so that lengths stay.

Called by the exchange of a request that carried a value. Must never hold back more of a stream than the start of a
value that may go on, and never promise more than it can: a host that is asked to can give a value back in a form that
nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker.vault.redact import forms, open_end

__all__ = ["Mask", "Veil"]

_FILL: Final = b"*"


class Veil:
    """What to look for: the forms of some values."""

    def __init__(self, values: Mapping[str, bytes]) -> None:
        """``values``: name → value; one that is too short to be told from other text is not looked for."""
        pairs = [(form, name) for name, value in values.items() for form in forms(value)]
        #: Longest first: a form that holds another one is covered whole.
        self.covers: Final = {
            form: f"[secret:{name}]".encode().ljust(len(form), _FILL)[: len(form)]
            for form, name in sorted(pairs, key=lambda pair: (-len(pair[0]), pair))
        }
        #: A form that holds another one is found with it.
        self.cores: Final = tuple(
            form for form in self.covers if not any(other != form and other in form for other in self.covers)
        )

    def __repr__(self) -> str:
        return f"Veil({len(self.covers)} forms)"

    def whole(self, text: bytes) -> tuple[bytes, int]:
        """Return a text that is complete without the values, and how many there were."""
        found = 0
        if self.shows(text):
            for form, cover in self.covers.items():
                found += (count := text.count(form))
                if count:
                    text = text.replace(form, cover)
        return text, found

    def shows(self, text: bytes) -> bool:
        """Return whether a text holds one of the values."""
        for core in self.cores:  # noqa: SIM110 - a generator would cost more than the search
            if core in text:
                return True
        return False


class Mask:
    """One stream through a veil. ``hits`` counts what was covered."""

    def __init__(self, veil: Veil) -> None:
        self._veil = veil
        self._kept = b""
        self.hits = 0

    def feed(self, data: bytes) -> bytes:
        """Return what can go on: all but an end that may be the start of a value."""
        text = self.cover(self._kept + data if self._kept else data)
        keep = open_end(text, self._veil.covers)
        self._kept = text[len(text) - keep :] if keep else b""
        return text[: len(text) - keep] if keep else text

    def finish(self) -> bytes:
        """Return the rest of the stream."""
        kept, self._kept = self._kept, b""
        return kept

    def shows(self, text: bytes) -> bool:
        """Return whether a text has to be covered."""
        return self._veil.shows(text)

    def cover(self, text: bytes) -> bytes:
        """Return a text without the values, apart from the stream."""
        clean, found = self._veil.whole(text)
        self.hits += found
        return clean
