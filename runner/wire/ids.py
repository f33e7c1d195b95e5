"""Names with a grammar: job ids, attempts, tenants, nodes, queues, labels.

Called by everyone who makes or receives a name. Must never accept what a Redis key, a path or a terminal could
misread: no separators but the documented ones, ASCII only, bounded length.
"""

from __future__ import annotations

import os
import re
import time
from typing import Final

from runner.wire.errors import GrammarError

__all__ = [
    "DEFAULT_TENANT",
    "attempt_name",
    "check_job_id",
    "check_name",
    "check_node",
    "check_tenant",
    "new_boot",
    "new_command_id",
    "new_job_id",
    "new_job_names",
    "new_nonce",
    "split_attempt",
    "tenant_of",
    "ulid",
]

DEFAULT_TENANT: Final = "main"
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
#: Ten bits at a time: an id is made for each job.
_PAIRS: Final = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
#: Five bits of each byte: as good as five bits of a number that is made of them first.
_LOW_BITS: Final = (_ALPHABET * 8).encode("ascii")
_TENANT: Final = re.compile(r"[a-z0-9]{1,32}")
_ULID: Final = re.compile(r"[0-7][0-9a-hjkmnp-tv-z]{25}")
_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")
_NODE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def ulid(now_ms: int | None = None, random: bytes | None = None) -> str:
    """Return 26 lower-case Crockford characters: 48 bits of milliseconds, 80 random bits. Source: the ULID format."""
    stamp = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if random is None:
        return _stamped(stamp, os.urandom(16))
    number = (stamp << 80) | int.from_bytes(random, "big")
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(120, -1, -10)])


def new_job_id(tenant: str = DEFAULT_TENANT) -> str:
    """Return a fresh job id, ``TENANT-ULID``. Raises GrammarError for a bad tenant."""
    return f"{check_tenant(tenant)}-{ulid()}"


def new_job_names(tenant: str) -> tuple[str, str]:
    """Return a fresh id of a job and its nonce, for a tenant whose name was checked."""
    random = os.urandom(32)
    return f"{tenant}-{_stamped(time.time_ns() // 1_000_000, random[:16])}", random[16:].hex()


def _stamped(stamp_ms: int, random: bytes) -> str:
    """Return a ULID with five bits of each of 16 random bytes."""
    pairs = [_PAIRS[(stamp_ms >> shift) & 1023] for shift in (40, 30, 20, 10, 0)]
    return "".join(pairs) + random.translate(_LOW_BITS).decode("ascii")


def new_command_id() -> str:
    """Return a fresh command id (a ULID)."""
    return ulid()


def new_nonce() -> str:
    """Return 128 random bits in hex."""
    return os.urandom(16).hex()


def new_boot() -> str:
    """Return the id of one agent start: 12 random hex digits."""
    return os.urandom(6).hex()


def check_job_id(job_id: str) -> str:
    """Return ``job_id`` if it is ``TENANT-ULID``. Raises GrammarError."""
    tenant, dash, rest = job_id.partition("-")
    if not dash or not _TENANT.fullmatch(tenant) or not _ULID.fullmatch(rest):
        raise GrammarError("a job id is TENANT-ULID, as `ringfence ps` prints it")
    return job_id


def tenant_of(job_id: str) -> str:
    """Return the tenant part of a job id. Raises GrammarError."""
    return check_job_id(job_id).partition("-")[0]


def attempt_name(job_id: str, attempt: int) -> str:
    """Return ``JOB.N``, the name of one attempt."""
    return f"{job_id}.{attempt}"


def split_attempt(name: str) -> tuple[str, int]:
    """Return (job id, attempt number) of ``JOB.N``. Raises GrammarError."""
    job_id, _, number = name.rpartition(".")
    if not number.isascii() or not number.isdigit():
        raise GrammarError("an attempt is JOB.N")
    return check_job_id(job_id), int(number)


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it is 1 to 32 of [a-z0-9]. Raises GrammarError."""
    if not _TENANT.fullmatch(tenant):
        raise GrammarError("a tenant is 1 to 32 of a-z and 0-9")
    return tenant


def check_node(node: str) -> str:
    """Return ``node`` if it is 1 to 32 of [a-z0-9-], not starting with a dash. Raises GrammarError."""
    if not _NODE.fullmatch(node):
        raise GrammarError("a node name is 1 to 32 of a-z, 0-9 and -")
    return node


def check_name(name: str, what: str) -> str:
    """Return ``name`` (queue, tag key, label, group, secret, tool) if it follows the grammar. Raises GrammarError."""
    if not _NAME.fullmatch(name):
        raise GrammarError(f"a {what} is 1 to 64 of letters, digits, _ . and -")
    return name
