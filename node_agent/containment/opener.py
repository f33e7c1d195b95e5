"""The process that touches granted paths for the agent: opens and checks them, and looks for planted code.

Started by the agent (openers.py) by exec, like the zygote, with nothing but its socket. A path may lie on a file system
that never answers, and a process that waits there can't even be killed: this one is waited for with a deadline, the
agent never. Must never keep a state between two requests, nor hand out a descriptor that was not checked.

    agent → opener   the fences, once · {"op": "open", "path", "mode", "code", "quiet"}
                     · {"op": "changed", "marks", "cut"} + the grant's descriptor
    opener → agent   {"up"} · {"facts", "kept", "marks", "cut"} + a descriptor · {"refused", "why"}
                     · {"changed", "count"}
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Mapping
from typing import Final, cast

from node_agent.containment import linux, plants
from node_agent.containment.errors import GrantRefused
from node_agent.containment.paths import Mode, Opened, Protected, open_grant
from runner.wire import codec
from runner.wire.codec import Json

__all__ = ["MAX_BYTES", "main"]

#: Largest message between agent and opener, well below what a socket takes whole.
MAX_BYTES: Final = 160 << 10
#: Entries of a read grant that are looked through for FIFOs where Landlock does not stop writes to them.
MOST_ENTRIES: Final = 200_000
#: Changed paths that are told, and how much of each.
MOST_PATHS: Final = 100
MOST_CHARACTERS: Final = 400
_SAME_MOUNT: Final = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | 0x01  # RESOLVE_NO_XDEV


def main(argv: list[str]) -> int:
    """Serve until the agent closes its end. ``argv[1]``: the number of the socket."""
    agent = socket.socket(fileno=int(argv[1]))
    agent.set_inheritable(False)
    protected = Protected.load(codec.load(agent.recv(MAX_BYTES)))
    agent.send(codec.dump({"up": True}))
    while True:
        data, fds, _, _ = socket.recv_fds(agent, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return 0
        try:
            _serve(agent, cast("dict[str, Json]", codec.load(data)), fds, protected)
        finally:
            for fd in fds:
                os.close(fd)


def _serve(agent: socket.socket, request: Mapping[str, Json], fds: list[int], protected: Protected) -> None:
    if request["op"] == "changed":
        marks = cast("dict[str, str]", request["marks"])
        paths = plants.changed(fds[0], marks, cut=bool(request["cut"]))
        told = [ascii(path)[1:-1][:MOST_CHARACTERS] for path in paths[:MOST_PATHS]]
        agent.send(codec.dump({"changed": told, "count": len(paths)}))
        return
    path, mode = str(request["path"]), cast("Mode", request["mode"])
    try:
        opened = open_grant(path, mode, protected=protected)
    except GrantRefused as error:
        agent.send(codec.dump({"refused": error.reason, "why": str(error)}))
        return
    try:
        reply = _looked_into(opened, code=bool(request["code"]), quiet=bool(request["quiet"]))
        socket.send_fds(agent, [codec.dump(reply)], [opened.fd])
    except GrantRefused as error:
        agent.send(codec.dump({"refused": error.reason, "why": str(error)}))
    finally:
        opened.close()


def _looked_into(opened: Opened, *, code: bool, quiet: bool) -> dict[str, object]:
    """Return what the agent is told of a grant. ``code``: plants are looked for; ``quiet``: a FIFO in it is refused."""
    found = plants.find(opened.fd) if code and opened.kind == "dir" else plants.Plants()
    if quiet and opened.kind == "dir":
        _refuse_pipes(opened)
    kept = [[path, *key] for path, key in found.kept.items()]
    return {"facts": opened.facts(), "kept": kept, "marks": found.marks, "cut": found.cut}


def _refuse_pipes(opened: Opened) -> None:
    """Refuse a read grant that holds a FIFO: a read-only mount does not keep a job from writing to one.

    What is mounted below the grant is not part of it, and what its opener may not list, at level B the job may not.

    Raises:
        GrantRefused: there is one, or there is more in the folder than is looked through.
    """
    left = MOST_ENTRIES
    todo = ["."]
    while todo:
        at = todo.pop()
        try:
            listed = linux.openat2(at, os.O_RDONLY | os.O_DIRECTORY, _SAME_MOUNT, at=opened.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EXDEV):
                continue
            message = f"can't be looked through for FIFOs: {os.strerror(error.errno or 0)}"
            raise GrantRefused("unenforceable", f"{opened.path}: {message}; grant a smaller folder") from error
        try:
            left -= _look_through(opened, at, listed, todo, left)
        finally:
            os.close(listed)


def _look_through(opened: Opened, at: str, listed: int, todo: list[str], left: int) -> int:
    count = 0
    with os.scandir(listed) as entries:
        for entry in entries:
            count += 1
            if count > left:
                message = f"more than {MOST_ENTRIES} entries to look through for FIFOs, which jobs could write to here"
                raise GrantRefused("unenforceable", f"{opened.path}: {message}; grant a smaller folder")
            if entry.is_dir(follow_symlinks=False):
                todo.append(f"{at}/{entry.name}")
            elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
                _refuse_if_pipe(opened, entry)
    return count


def _refuse_if_pipe(opened: Opened, entry: os.DirEntry[str]) -> None:
    if stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode):
        where = "where Landlock is missing, below /tmp, /work and /dev/shm, and in write grants"
        message = f"holds the FIFO {entry.name!a}, and {where} a job can write to FIFOs of a read grant"
        raise GrantRefused("unenforceable", f"{opened.path}: {message}; grant a folder without it")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
