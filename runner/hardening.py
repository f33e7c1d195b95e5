"""Port: rq. Import it first wherever rq is loaded: then no pickle is loaded and no name from Redis is imported.

Called by the dashboard and by every other process of ours that lets RQ's own classes read jobs. Must never leave an
unhardened reference behind: importing it later than rq works too, because every module of rq that is loaded is
searched; ``check`` proves it.

What stock rq's readers do and this module ends: they unpickle meta and results, import functions and callbacks by name,
call webhooks, and unpack zlib data without a limit (attack 25).
"""

from __future__ import annotations

import json
import pickle
import sys
import types
import zlib
from collections.abc import Callable
from typing import Final

import rq
import rq.callbacks
import rq.defaults
import rq.job
import rq.results
import rq.serializers
import rq.utils
import rq.webhook

from runner.scripts.payload import FUNCTION, MAX_PAYLOAD_BYTES, JobData, TooLargeError, decompress, pack, parse
from runner.wire.errors import CodecError

__all__ = [
    "MAX_TEXT_BYTES",
    "MAX_VALUE_BYTES",
    "HardeningError",
    "JobData",
    "StrictJSON",
    "check",
    "decompress",
    "pack",
    "parse",
]

#: Longest JSON text of one value that a reader parses, in bytes.
MAX_VALUE_BYTES: Final = 64 * 1024 * 1024
#: Most bytes that a reader unpacks from a result's failure text.
MAX_TEXT_BYTES: Final = MAX_PAYLOAD_BYTES
#: RQ's own classes, which its tools look up by name when they start.
_OWN_NAMES: Final = frozenset(
    {
        "redis.Redis",
        "rq.Queue",
        "rq.SimpleWorker",
        "rq.Worker",
        "rq.job.Job",
        "rq.queue.Queue",
        "rq.serializers.DefaultSerializer",
        "rq.serializers.JSONSerializer",
        "rq.timeouts.UnixSignalDeathPenalty",
        "rq.worker.Worker",
    }
)
_PICKLE_LOADS: Final = pickle.loads
_STOCK_IMPORT: Final = rq.utils.import_attribute


class HardeningError(RuntimeError):
    """A name that may not be imported, or an rq that is not hardened."""


class StrictJSON:
    """The only serializer: plain JSON, whatever the caller or the stored data asked for."""

    @staticmethod
    def dumps(*values: object, **_options: object) -> bytes:
        """Return a value's JSON text."""
        (value,) = values
        return json.dumps(value).encode("utf-8")

    @staticmethod
    def loads(data: bytes, *_more: object, **_options: object) -> object:
        """Return the value of a JSON text. Raises ValueError for anything else, a pickle for example."""
        if len(data) > MAX_VALUE_BYTES:
            raise ValueError(f"more than {MAX_VALUE_BYTES} bytes")
        return json.loads(data.decode("utf-8"))


def _import_own(name: str) -> Callable[..., object]:
    """Import one of RQ's own classes or the one function of our jobs, nothing else."""
    if name != FUNCTION and name not in _OWN_NAMES:
        raise HardeningError("a name that is not on the allow-list was not imported")
    found: Callable[..., object] = _STOCK_IMPORT(name)
    return found


def _import_job(name: str) -> Callable[..., object]:
    """What a job hash may name: the one function of our jobs."""
    if name != FUNCTION:
        raise HardeningError(f"a job names something else than {FUNCTION}; it was not imported")
    found: Callable[..., object] = _STOCK_IMPORT(name)
    return found


def _unpack(data: bytes) -> bytes:
    """Return the unpacked bytes; of a bomb a note that is neither a payload nor a failure's text."""
    try:
        return decompress(data, MAX_TEXT_BYTES)
    except TooLargeError:
        return _BOMB_NOTE
    except CodecError as error:
        raise zlib.error(str(error)) from None


def _no_call(*_args: object, **_options: object) -> None:
    """Nothing is called because of what a hash says."""


_BOMB_NOTE: Final = b"(not shown: it unpacks to more than a job may hold)"

#: What rq's readers see as ``zlib``: the same, but nothing unpacks without a limit.
_ZLIB: Final = types.SimpleNamespace(decompress=_unpack, compress=zlib.compress, error=zlib.error)


def _harden() -> None:
    serializer = rq.serializers.DefaultSerializer
    serializer.dumps = staticmethod(StrictJSON.dumps)
    serializer.loads = staticmethod(StrictJSON.loads)
    rq.serializers.JSONSerializer.loads = staticmethod(StrictJSON.loads)  # type: ignore[method-assign,assignment]  # bounded
    rq.serializers.SERIALIZER_ALIASES.update(json=StrictJSON, pickle=StrictJSON)
    rq.webhook.Webhook.send = _no_call  # type: ignore[method-assign]  # never called for a stored URL
    for module in _loaded():
        for name, value in list(vars(module).items()):
            if value is _STOCK_IMPORT:
                setattr(module, name, _import_own)
            elif value is zlib:
                setattr(module, name, _ZLIB)
    for reader in (rq.job, rq.callbacks):
        if hasattr(reader, "import_attribute"):
            reader.import_attribute = _import_job  # type: ignore[attr-defined]  # by name, as rq looks it up


def _loaded() -> list[types.ModuleType]:
    """Every loaded module of rq and its dashboard, this one left out."""
    packages = ("rq", "rq_dashboard")
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages and m is not None]


def check() -> None:
    """Prove that no loaded module of rq holds what was replaced.

    Raises:
        HardeningError: one does; this process must not read jobs.
    """
    holders = [
        f"{module.__name__}.{name}"
        for module in _loaded()
        for name, value in vars(module).items()
        if value is _STOCK_IMPORT or value is zlib or value is _PICKLE_LOADS
    ]
    if rq.serializers.DefaultSerializer.loads is not StrictJSON.loads:
        holders.append("rq.serializers.DefaultSerializer")
    if holders:
        raise HardeningError(f"not hardened: {', '.join(sorted(holders))}; import runner.hardening first")


_harden()
check()
