"""The first code in a finished sandbox: reads the payload, sets the environment, becomes the job.

Called by the worker once every restriction is in place (``main``). Must never be trusted by the node:
from the RELEASE record on, this process belongs to the job. Nothing but the payload decides what is run, and it is
read only after READY.

The payload is a canonical JSON object {"argv" | "task", "args", "kwargs", "env", "job", "attempt", "tags",
"secrets", "sealed", "service", "ca"}.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from os import _exit, environ, readv, set_inheritable, write
from os.path import abspath, dirname
from sys import executable
from sys import path as search_path
from typing import Final, NoReturn

from runner.guest import call, trust, vault
from runner.guest.call import run as run_task
from runner.wire import codec, frames
from runner.wire.codec import Json
from runner.wire.codec import load as load_json
from runner.wire.errors import WireError
from runner.wire.frames import FD_BROKER, FD_KERNEL, FD_RESULT, MAX_RECORD_BYTES, Op

__all__ = ["BASE_ENVIRONMENT", "REHEARSALS", "environment", "main", "preload", "reset"]

_BIN: Final = dirname(abspath(__file__)) + "/bin"
#: What every job finds; its own ``--env`` comes on top, but for the RINGFENCE_ names.
BASE_ENVIRONMENT: Final = {
    # Last what a command of a job calls its node with.
    "PATH": f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{_BIN}",
    "HOME": "/work",
    "TMPDIR": "/tmp",  # noqa: S108 - the job's own tmpfs
    "USER": "job",
    "LOGNAME": "job",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "RINGFENCE_PYTHON": executable,
}
OWN_PREFIX: Final = "RINGFENCE_"
#: More than the interpreter waits for before it adapts a function.
REHEARSALS: Final = 16
_COMMAND_FDS: Final = f"kernel={FD_KERNEL}"
_BROKER_FD: Final = f",broker={FD_BROKER}"
#: What in a payload means that the job has a channel to the broker.
_BROKERED: Final = frozenset({"secrets", "sealed", "service"})
_TASK_FDS: Final = f"kernel={FD_KERNEL},result={FD_RESULT}"
MAX_PAYLOAD_BYTES: Final = 32 << 20
_PAYLOAD: Final = int(Op.PAYLOAD)
_RELEASE: Final = int(Op.RELEASE)
_RUNNING: Final = frames.pack(Op.RUNNING)
#: Where records arrive: memory that a worker need not ask for.
_space: Final = bytearray(MAX_RECORD_BYTES)
#: What this process's environment holds already.
_preset: Final[dict[str, str]] = {}
_SAMPLE: Final[dict[str, Json]] = {"job": "main-1", "attempt": 1, "tags": {}, "env": {"A": "a"}, "kwargs": {}}
EXIT_NO_PAYLOAD: Final = 70
EXIT_NOT_RUNNABLE: Final = 126
EXIT_NOT_FOUND: Final = 127


def preload() -> None:
    """Load, in the zygote, what every task needs, and run what can be run: the interpreter adapts code that it repeats.

    Adapted code is faster, and writes to fewer of the pages that a new process shares.
    """
    call.preload()
    _preset.update(BASE_ENVIRONMENT, RINGFENCE_FDS=_TASK_FDS)
    environ.clear()
    environ.update(_preset)
    samples = [codec.dump({**_SAMPLE, "args": args}) for args in ([], [1])]
    for _ in range(REHEARSALS):
        for sample in samples:
            payload = _parsed(sample)
            environment(payload, "task")
            call.rehearse(payload)


def main(kind: str, task_paths: Sequence[str], result_bytes: int, given: bytes | None = None) -> int:
    """Read the payload from FD_KERNEL and run it; a task's result of at most ``result_bytes`` goes to FD_RESULT.

    ``given``: the payload, where it has come already.

    Returns the exit code that the caller ends this process with at once: nothing of the interpreter's own is to follow.
    """
    try:
        payload = _receive() if given is None else _taken(given)
        env = environment(payload, kind)
    except (OSError, WireError) as error:
        _say(f"no payload: {error}")
        _exit(EXIT_NO_PAYLOAD)
    except vault.SecretError as error:
        _say(str(error))
        _exit(EXIT_NO_PAYLOAD)
    # FD_KERNEL stays open: the job's way to its node.
    if kind == "task":
        return _call(payload, env, task_paths, result_bytes)
    argv = payload.get("argv")
    return _execute([str(word) for word in argv] if isinstance(argv, list) else [], env)


def reset() -> None:
    """Take back what the last attempt of a reused worker had, and set, of variables."""
    environ.clear()
    environ.update(_preset)


def environment(payload: dict[str, Json], kind: str) -> dict[str, str]:
    """Return the whole environment of the job; nothing of the node's own is in it."""
    env = BASE_ENVIRONMENT.copy()
    asked = payload.get("env")
    if asked and isinstance(asked, dict):
        for name, value in asked.items():
            if not name.startswith(OWN_PREFIX):
                env[name] = str(value)
    env["RINGFENCE_FDS"] = _TASK_FDS if kind == "task" else _COMMAND_FDS
    env["RINGFENCE_JOB"] = str(payload.get("job", ""))
    env["RINGFENCE_ATTEMPT"] = str(payload.get("attempt", ""))
    if (urls := payload.get("urls")) and isinstance(urls, dict):
        env.update((name, str(url)) for name, url in urls.items())
    if authority := payload.get("ca"):
        trust.plant(str(authority), env)
    if not _BROKERED.isdisjoint(payload):
        _with_broker(payload, env)
        if kind == "task":
            set_inheritable(FD_BROKER, False)
    return env


def _with_broker(payload: dict[str, Json], env: dict[str, str]) -> None:
    env["RINGFENCE_FDS"] += _BROKER_FD
    if "service" in payload:
        env["RINGFENCE_SERVICE"] = str(payload["service"])
    secrets = payload.get("secrets")
    vault.deliver([one for one in secrets if isinstance(one, dict)] if isinstance(secrets, list) else [], env)
    vault.unseal(payload, env)


def _receive() -> dict[str, Json]:
    parts: list[bytearray] = []
    size = op = 0
    while op != _RELEASE:
        filled = readv(FD_KERNEL, (_space,))
        size += filled
        op = _space[0] if filled else 0
        if op not in (_PAYLOAD, _RELEASE) or size > MAX_PAYLOAD_BYTES:
            raise OSError(f"unexpected record {op} after {size} bytes")
        parts.append(_space[1:filled])
    return _taken(b"".join(parts))


def _taken(data: bytes) -> dict[str, Json]:
    payload = _parsed(data)
    write(FD_KERNEL, _RUNNING)
    return payload


def _parsed(data: bytes) -> dict[str, Json]:
    payload = load_json(data, limit_bytes=MAX_PAYLOAD_BYTES)
    if not isinstance(payload, dict):
        raise OSError("the payload is no object")
    return payload


def _execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Become the command; its name is looked up on the PATH inside the view."""
    # The interpreter ignores it; a program finds what every shell gives it. Handlers end with the execve itself.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - no shell on purpose
    except FileNotFoundError:
        _say(f"{argv[0]}: no such command in this job's view")
        os._exit(EXIT_NOT_FOUND)
    except (OSError, ValueError, IndexError) as error:
        _say(f"{argv[:1]}: can't be run: {error}")
        os._exit(EXIT_NOT_RUNNABLE)


def _call(payload: dict[str, Json], env: dict[str, str], task_paths: Sequence[str], result_bytes: int) -> int:
    if not _preset:
        environ.clear()
    for name, value in env.items():
        if _preset.get(name) != value:
            environ[name] = value
    for number in (FD_KERNEL, FD_RESULT):
        set_inheritable(number, False)
    search_path.extend(task_paths)
    return run_task(payload, task_paths, result_bytes)


def _say(text: str) -> None:
    os.write(2, f"ringfence: {text}\n".encode("utf-8", "backslashreplace"))
