"""Errors of the wire layer, one root.

    WireError
    ├── CodecError        bytes that are not one strict, bounded JSON document
    ├── RecordError       a document that is not the record it should be (unknown field, wrong type, wrong version)
    ├── ValueTypeError    a value that can't travel; names the path to it
    └── GrammarError      a name, id, size or grant that breaks its grammar

Called by every package. Must never carry the offending value itself: it may be a secret.
"""

from __future__ import annotations

__all__ = ["CodecError", "GrammarError", "RecordError", "ValueTypeError", "WireError"]


class WireError(Exception):
    """Root of the wire errors. ``code`` is stable; ``retryable`` says whether the same call may succeed later."""

    code = "wire"
    retryable = False

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class CodecError(WireError):
    """The bytes are not one strict JSON document within the limits."""

    code = "codec"


class RecordError(WireError):
    """The document is not a valid record of the expected type and version."""

    code = "record"


class ValueTypeError(WireError):
    """A value has no form on the wire; the message names the path to it and what to do."""

    code = "value"


class GrammarError(WireError):
    """A name, id, size or grant does not follow its documented grammar."""

    code = "grammar"
