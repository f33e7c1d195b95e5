"""The first code in a finished sandbox: reads the payload, sets the environment, becomes the job.

Called by the worker once every restriction is in place (``main``, never returns). Must never be trusted by the node:
from the RELEASE record on, this process belongs to the job. Nothing but the payload decides what is run, and the node
sends it only to a worker that answered READY.

The payload is a canonical JSON object {"argv" | "task", "args", "kwargs", "env", "job", "attempt", "tags"}.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, cast

from runner.guest import call
from runner.wire import codec, frames
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.frames import FD_KERNEL, FD_RESULT, Op

__all__ = ["BASE_ENVIRONMENT", "REHEARSALS", "environment", "main", "preload"]

#: What every job finds; its own ``--env`` comes on top, but for the RINGFENCE_ names.
BASE_ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/work",
    "TMPDIR": "/tmp",  # noqa: S108 - the job's own tmpfs
    "USER": "job",
    "LOGNAME": "job",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
OWN_PREFIX: Final = "RINGFENCE_"
#: More than the interpreter waits for before it adapts a function.
REHEARSALS: Final = 16
MAX_PAYLOAD_BYTES: Final = 32 << 20
_PAYLOAD: Final = int(Op.PAYLOAD)
_RELEASE: Final = int(Op.RELEASE)
_RUNNING: Final = frames.pack(Op.RUNNING)
EXIT_NO_PAYLOAD: Final = 70
EXIT_NOT_RUNNABLE: Final = 126
EXIT_NOT_FOUND: Final = 127


def preload() -> None:
    """Load, in the zygote, what every task needs, and run what can be run: the interpreter adapts code that it repeats.

    Adapted code is faster, and writes to fewer of the pages that a new process shares.
    """
    call.preload()
    sample = codec.dump({"job": "main-1", "attempt": 1, "tags": {}, "env": {"A": "a"}, "task": ":", "args": [1]})
    for _ in range(REHEARSALS):
        payload = cast("dict[str, Json]", codec.load(sample))
        environment(payload, "task")
        call.rehearse(payload)


def main(kind: str, task_paths: Sequence[str], result_bytes: int) -> NoReturn:
    """Read the payload from FD_KERNEL and run it; a task's result of at most ``result_bytes`` goes to FD_RESULT."""
    try:
        payload = _receive()
        env = environment(payload, kind)
    except (OSError, WireError) as error:
        _say(f"no payload: {error}")
        os._exit(EXIT_NO_PAYLOAD)
    # FD_KERNEL stays open: the job's way to its node.
    if kind == "task":
        os._exit(_call(payload, env, task_paths, result_bytes))
    _execute([str(word) for word in cast("list[Json]", payload.get("argv") or [])], env)


def environment(payload: dict[str, Json], kind: str) -> dict[str, str]:
    """Return the whole environment of the job; nothing of the node's own is in it."""
    asked = {name: str(value) for name, value in cast("dict[str, Json]", payload.get("env") or {}).items()}
    fds = f"kernel={FD_KERNEL}" + (f",result={FD_RESULT}" if kind == "task" else "")
    return {
        **BASE_ENVIRONMENT,
        **{name: value for name, value in asked.items() if not name.startswith(OWN_PREFIX)},
        f"{OWN_PREFIX}FDS": fds,
        f"{OWN_PREFIX}JOB": str(payload.get("job", "")),
        f"{OWN_PREFIX}ATTEMPT": str(payload.get("attempt", "")),
    }


def _receive() -> dict[str, Json]:
    parts: list[bytes] = []
    size = op = 0
    while op != _RELEASE:
        data = os.read(FD_KERNEL, frames.MAX_RECORD_BYTES)
        size += len(data)
        op = data[0] if data else 0
        if op not in (_PAYLOAD, _RELEASE) or size > MAX_PAYLOAD_BYTES:
            raise OSError(f"unexpected record {op} after {size} bytes")
        parts.append(data[1:])
    payload = codec.load(b"".join(parts), limit_bytes=MAX_PAYLOAD_BYTES)
    if not isinstance(payload, dict):
        raise OSError("the payload is no object")
    os.write(FD_KERNEL, _RUNNING)
    return payload


def _execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Become the command; its name is looked up on the PATH inside the view."""
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - no shell on purpose
    except FileNotFoundError:
        _say(f"{argv[0]}: no such command in this job's view")
        os._exit(EXIT_NOT_FOUND)
    except (OSError, ValueError, IndexError) as error:
        _say(f"{argv[:1]}: can't be run: {error}")
        os._exit(EXIT_NOT_RUNNABLE)


def _call(payload: dict[str, Json], env: dict[str, str], task_paths: Sequence[str], result_bytes: int) -> int:
    os.environ.clear()
    os.environ.update(env)
    for number in (FD_KERNEL, FD_RESULT):
        os.set_inheritable(number, False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.extend(path for path in task_paths if path not in sys.path)
    return call.run(payload, result_bytes)


def _say(text: str) -> None:
    os.write(2, f"ringfence: {text}\n".encode("utf-8", "backslashreplace"))
