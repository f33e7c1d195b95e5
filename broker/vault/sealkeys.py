"""The keys that jobs' sealed values are opened with: made by the broker, kept like a secret, an old one for a while.

Called by the keystore (writes them anew with everything else) and by the unsealer. Must never let the private half
leave the vault, or keep an old key longer than what was sealed to it can still start.

The file holds one identity a line, the newest first, with the second until which it opens (0: no end yet).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pyrage import x25519

from broker.vault import sealing
from broker.vault.disk import Folder
from broker.vault.errors import CorruptError

__all__ = ["FILE", "GRACE_S", "SealKeys", "rewrite"]

FILE: Final = "sealing.age"
#: How long a replaced key still opens: twice the time that a job may wait for its start by default.
GRACE_S: Final = 14 * 86_400
_MAX_FILE_BYTES: Final = 16 * 1024
_MAX_KEYS: Final = 32
#: No secret can have this name, so a secret's file in its place is found out.
_HEAD: Final = {"name": "@sealing", "v": 1, "at": 0, "kind": "keys", "note": ""}


@dataclass(slots=True, repr=False)
class SealKeys:
    """The keys of an open vault; the first is made when it is needed. ``recipients``: whom the file is sealed to."""

    folder: Folder
    identities: Sequence[x25519.Identity]
    recipients: Sequence[str]
    clock: Callable[[], float] = time.time

    def current(self) -> str:
        """Return the public half of the newest key. Raises CorruptError."""
        found = _read(self.folder, self.identities)
        if not found:
            return self.rotate()
        return str(x25519.Identity.from_str(found[0][0]).to_public())

    def opening(self) -> list[x25519.Identity]:
        """Return every key that still opens, the newest first. Raises CorruptError."""
        return [x25519.Identity.from_str(text) for text, until_s in self._live()]

    def rotate(self) -> str:
        """Make a new key and give the old one its last days; returns the new public half. Raises CorruptError."""
        ends = int(self.clock()) + GRACE_S
        old = [(text, until_s or ends) for text, until_s in self._live()][: _MAX_KEYS - 1]
        new = x25519.Identity.generate()
        _write(self.folder, [(str(new), 0), *old], self.recipients)
        return str(new.to_public())

    def _live(self) -> list[tuple[str, int]]:
        now_s = self.clock()
        return [one for one in _read(self.folder, self.identities) if not one[1] or now_s < one[1]]


def rewrite(folder: Folder, identities: Sequence[x25519.Identity], recipients: Sequence[str]) -> None:
    """Seal the file anew, if there is one. Raises CorruptError."""
    if found := _read(folder, identities):
        _write(folder, found, recipients)


def _read(folder: Folder, identities: Sequence[x25519.Identity]) -> list[tuple[str, int]]:
    try:
        file = folder.read(FILE, _MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    head, text = sealing.unseal(file, identities, FILE)
    rows = [line.split() for line in text.decode("ascii", "replace").splitlines()]
    if head != _HEAD or not all(len(row) == 2 and row[1].isdigit() for row in rows):
        raise CorruptError(f"{folder.path / FILE} holds something else: restore it from your backup")
    return [(row[0], int(row[1])) for row in rows]


def _write(folder: Folder, rows: Sequence[tuple[str, int]], recipients: Sequence[str]) -> None:
    text = "".join(f"{identity} {until_s}\n" for identity, until_s in rows)
    folder.replace(FILE, sealing.seal(dict(_HEAD), text.encode(), recipients))
