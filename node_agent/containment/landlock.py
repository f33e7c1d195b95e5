"""Landlock: a second fence around the view, at the highest ABI that the host has.

Called by the worker after its view stands, and by the probe. Must never be the only fence at levels A and B: a kernel
without Landlock is fine there, a kernel that has it and refuses is an error.

Source: landlock(7); access rights by ABI in linux/landlock.h.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from node_agent.containment import linux
from node_agent.containment.script import AT_FDCWD, Row, row

__all__ = ["READ", "USE", "WRITE", "abi", "allowed", "restrict", "rows"]

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_MAKE_CHAR: Final = 1 << 6
_MAKE_BLOCK: Final = 1 << 11
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
#: File system rights by ABI: 13 in the first, REFER from 2, TRUNCATE from 3, IOCTL_DEV from 5.
_RIGHTS: Final = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_RIGHTS: Final = 0xFFFF
_FOR_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPES_SINCE: Final = 6
#: Descriptors in rows: the lowest that are free when a worker's own are at their places.
_RULESET_FD: Final = 3
_PATH_FD: Final = 4
#: No abstract Unix socket and no signal leads out of the domain.
_SCOPES: Final = 0b11

#: Read, list and run.
READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
#: Write to what is there (device nodes, files of /proc).
USE: Final = _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
#: Everything but making device nodes.
WRITE: Final = _ALL_RIGHTS & ~(_MAKE_CHAR | _MAKE_BLOCK)


def abi() -> int:
    """Return the host's Landlock ABI; 0 if it has none or has it switched off."""
    try:
        return linux.syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def restrict(rules: Sequence[tuple[str, int]]) -> int:
    """Confine this (only) thread to ``rules`` (path, rights); return the ABI, 0 where there is no Landlock.

    Needs no_new_privs. A rule's path must exist. A rule on a mount point does not hold for what is mounted on it later,
    so a ruleset can't be made before the view stands. Raises OSError.
    """
    version = abi()
    if version < 1:
        return 0
    handled = _handled(version)
    head = struct.pack("QQQ", handled, 0, _SCOPES)
    size = 24 if version >= _SCOPES_SINCE else 8
    ruleset = linux.syscall("landlock_create_ruleset", _CREATE_RULESET, head, size, 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        linux.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        with suppress(OSError):
            os.close(ruleset)
    return version


def rows(rules: Sequence[tuple[bytes, int]]) -> tuple[list[Row], list[Row]]:
    """Return ``restrict`` as rows for a process with no descriptor between 3 and 99: up to the rules, and after them.

    Raises OSError.
    """
    version = abi()
    before, after = [row("no_new_privs", "prctl", *linux.NO_NEW_PRIVS)], []
    if version >= 1:
        head = struct.pack("QQQ", _handled(version), 0, _SCOPES)
        size = 24 if version >= _SCOPES_SINCE else 8
        before.append(row("landlock", "landlock_create_ruleset", head, size, 0, expect=_RULESET_FD))
        for path, rights in rules:
            before += allowed(path, rights, version=version)
        after = [row("landlock", "landlock_restrict_self", _RULESET_FD, 0), row("landlock", "close", _RULESET_FD)]
    return before, after


def allowed(path: bytes, rights: int, *, version: int | None = None, is_folder: bool = True) -> list[Row]:
    """Return the rows of one rule. The kernel takes the rights of folders for folders only."""
    version = abi() if version is None else version
    if version < 1:
        return []
    rights &= _handled(version) & (_ALL_RIGHTS if is_folder else _FOR_FILES)
    rule = struct.pack("=Qi", rights, _PATH_FD)
    return [
        row("landlock", "openat", AT_FDCWD, path, os.O_PATH | os.O_CLOEXEC, 0, expect=_PATH_FD),
        row("landlock", "landlock_add_rule", _RULESET_FD, _PATH_BENEATH, rule, 0),
        row("landlock", "close", _PATH_FD),
    ]


def _handled(version: int) -> int:
    return _RIGHTS.get(version, _ALL_RIGHTS)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        linux.syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    except OSError as error:
        if error.errno != errno.EINVAL or not rights & ~_FOR_FILES:
            raise
        # The kernel takes the rights of folders for folders only.
        rule = struct.pack("=Qi", rights & _FOR_FILES, fd)
        linux.syscall(f"landlock_add_rule {path}", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
