"""A job's own line to the vault broker: one question at a time on descriptor 101.

Called by bootstrap (secrets that are delivered before the job starts) and by applications as ``runner.secret``. Must
never write a value anywhere but where its grant says, or put one into an error.
"""

from __future__ import annotations

import os
import time
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from typing import Final

from runner.wire import codec, sealed
from runner.wire.codec import Json
from runner.wire.errors import CodecError
from runner.wire.frames import FD_BROKER
from runner.wire.values import encode as encode_value

__all__ = ["FOLDER", "SecretError", "deliver", "secret", "unseal"]

FOLDER: Final = "/run/secrets"
_MAX_REPLY_BYTES: Final = 64 * 1024
_PENDING_S: Final = 0.2
_NO_LINE: Final = "there is no line to a broker"
_WHY: Final = {
    "denied": "this job was not granted it as a value",
    "expired": "its time is over",
    "used-up": "it was handed out as often as the rule allows",
    "not-you": "this process is not inside the job's sandbox",
    "slow-down": "too many requests at once",
    "unavailable": "the vault can't open or record it now",
}


class SecretError(Exception):
    """A secret was not handed over; ``code`` is the broker's word for why."""

    def __init__(self, name: str, code: str) -> None:
        super().__init__(f"secret {name}: {_WHY.get(code, code)}")
        self.code = code


def secret(name: str, *, wait: bool = True) -> bytes:
    """Return the value of a secret that this job was granted as get, file or env.

    ``wait``: while a person has not approved it yet, ask again; the job's time limit is the end of that.

    Raises:
        SecretError.
    """
    while True:
        reply = _asked(name, {"op": "get", "name": name})
        if reply.get("ok"):
            return a2b_base64(str(reply["value"]))
        code = str(reply.get("err", _NO_LINE))
        if code != "pending" or not wait:
            raise SecretError(name, code)
        time.sleep(_PENDING_S)


def deliver(secrets: Sequence[Mapping[str, object]], env: dict[str, str]) -> None:
    """Put the secrets that are granted as env and file where they belong, before the job starts.

    Raises:
        SecretError, OSError.
    """
    for one in secrets:
        name, mode = str(one["name"]), one["mode"]
        if mode == "env":
            env[str(one["target"])] = secret(name).decode("utf-8", "surrogateescape")
        elif mode == "file":
            env[f"{name}_FILE"] = _write(name, secret(name))


def unseal(payload: dict[str, Json], env: dict[str, str]) -> None:
    """Put the job's sealed values in their places, before the job starts.

    Raises:
        SecretError, RecordError: one has no place.
    """
    found = payload.get("sealed")
    for place in found if isinstance(found, list) else ():
        name = str(place)
        reply = _asked(name, {"op": "sealed", "place": name})
        if not reply.get("ok"):
            raise SecretError(name, str(reply.get("err", _NO_LINE)))
        value = a2b_base64(str(reply["value"]))
        kind, _, variable = name.partition("/")
        if kind == sealed.ENV:
            env[variable] = value.decode("utf-8", "surrogateescape")
        elif reply.get("text"):
            sealed.fill(payload, name, value.decode())
        else:
            sealed.fill(payload, name, encode_value(value))


def _asked(name: str, question: dict[str, Json]) -> dict[str, Json]:
    try:
        os.write(FD_BROKER, codec.dump(question))
        reply = codec.load(os.read(FD_BROKER, _MAX_REPLY_BYTES) or b"{}")
    except (OSError, CodecError):
        reply = None
    if not isinstance(reply, dict):
        raise SecretError(name, _NO_LINE)
    return reply


def _write(name: str, value: bytes) -> str:
    os.makedirs(FOLDER, mode=0o700, exist_ok=True)
    path = os.path.join(FOLDER, name)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
    with os.fdopen(fd, "wb") as file:
        file.write(value)
    return path
