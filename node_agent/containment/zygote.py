"""The zygote: a small single-threaded process that every mould is forked from.

Started by the agent as ``python -I -B -m node_agent.containment.zygote FD`` with an empty environment, in /, holding
nothing but its socket. Loads the guest's code once, forks a mould on request, hands the mould's pidfd back. Must never
see a plan, argument, environment value or secret (attacks 5, 6). Ends when its socket closes or its agent dies, and
then every mould ends too (parent-death signal; before its first attempt at level B, lifeline).

    agent → zygote   {"id", "op": "mould", "join": [groups], "paths": [node's own]} + lifeline, control[, job group] ·
                     {"id", "op": "userns", "owner": [uid, gid], "job": [uid, gid]}
    zygote → agent   {"op": "up"} · {"id", "pid"} + pidfd · {"id"} + descriptor · {"id", "error", "errno"}
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal, NoReturn, cast

from node_agent.containment import idmap, linux, mould, pages, worker
from runner.wire import codec
from runner.wire.codec import Json

__all__ = ["main"]

_MAX_REQUEST_BYTES: Final = 16 * 1024
_MAX_FDS: Final = 4
_PID_BYTES: Final = 16
#: The application's side of the package, standard library and wire only, loaded once: every task imports it and
#: would pay 10 ms. By name: this layer must not depend on it.
_PRELOADED: Final = ("runner.app", "runner.context", "runner.task")
#: Namespaces that stand by then are not counted. mnt, ipc and cgroup: each worker makes one of its own, and a detached
#: mount is one, too; the rest is a second lock beside seccomp.
_USER_QUOTAS: Final = (
    ("max_inotify_instances", 32),
    ("max_inotify_watches", 8192),
    ("max_fanotify_groups", 0),
    ("max_fanotify_marks", 0),
    *((f"max_{kind}_namespaces", 0) for kind in ("user", "pid", "net", "uts", "time")),
    *((f"max_{kind}_namespaces", 64) for kind in ("mnt", "ipc", "cgroup")),
)
_MIDDLE_NAMESPACES: Final = linux.NEWUSER | linux.NEWPID | linux.NEWNS | linux.NEWNET | linux.NEWIPC | linux.NEWUTS


def main(argv: Sequence[str]) -> NoReturn:
    """Serve the agent at the other end of descriptor ``argv[1]``; ``argv[2]`` is the level."""
    level: Literal["A", "B"] = "A" if argv[2] == "A" else "B"
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=int(argv[1]))
    os.set_inheritable(agent.fileno(), False)
    linux.set_parent_death_signal(signal.SIGKILL)
    pages.keep_code_mapped()
    linux.set_dumpable(False)
    if level == "B":
        linux.set_subreaper()
    linux.heed_signals()
    sys.argv = ["job"]
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 2)  # until here errors of the start reached the agent through it
    os.close(null)
    for name in _PRELOADED:
        importlib.import_module(name)
    zygote = _Zygote(agent, level)
    gc.collect()
    gc.disable()
    gc.freeze()
    agent.send(codec.dump({"op": "up"}))
    zygote.serve()


class _Zygote:
    def __init__(self, agent: socket.socket, level: Literal["A", "B"]) -> None:
        self._agent = agent
        self._level = level
        self._kit = worker.make_kit()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        self._signals = linux.signal_descriptor(signal.SIGCHLD)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._agent.fileno() in ready:
                self._answer()
            # After the answer: a mould's pidfd is opened before it can be reaped.
            if self._signals in ready:
                self._reap()

    def _answer(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._agent, _MAX_REQUEST_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self._reap()
            os._exit(0)
        request = cast("dict[str, Json]", codec.load(data))
        reply: dict[str, Json] = {"id": request["id"]}
        out = -1
        try:
            if request["op"] == "mould":
                paths = cast("list[str]", request["paths"])
                pid = self._mould(cast("list[str]", request["join"]), paths, fds)
                reply["pid"] = pid
                out = os.pidfd_open(pid)
            elif request["op"] == "userns":
                owner, job = cast("list[int]", request["owner"]), cast("list[int]", request["job"])
                out = idmap.make_userns(os.fork, (owner[0], owner[1], job[0], job[1]))
            else:
                os._exit(1)
        except OSError as error:
            reply |= {"error": str(error)[:300], "errno": error.errno or 0}
        for fd in fds:
            os.close(fd)
        self._send(reply, out)

    def _send(self, reply: dict[str, Json], fd: int) -> None:
        if fd < 0:
            self._agent.send(codec.dump(reply))
            return
        socket.send_fds(self._agent, [codec.dump(reply)], [fd])
        os.close(fd)

    def _mould(self, join: list[str], paths: list[str], fds: list[int]) -> int:
        seat = mould.Seat(
            level=self._level,
            join_paths=tuple(join),
            lifeline_fd=fds[0],
            control_fd=fds[1],
            job_fd=fds[2] if len(fds) > 2 else None,
            paths=tuple(paths),
            kit=self._kit,
        )
        return self._spawn_in_pid_namespace(seat) if self._level == "A" else self._spawn_through_middle(seat)

    def _spawn_in_pid_namespace(self, seat: mould.Seat) -> int:
        linux.unshare(linux.NEWPID)
        pid = os.fork()
        if pid == 0:
            mould.run(seat)
        linux.setns(self._own_pids, linux.NEWPID)
        return pid

    def _spawn_through_middle(self, seat: mould.Seat) -> int:
        """Fork a mould in namespaces that an ordinary user may make.

        The middle process makes them and ends; this process, a subreaper, adopts the mould. Nothing is reaped between
        the mould's birth and the pidfd, so its pid is its own.
        """
        read, write = os.pipe2(os.O_CLOEXEC)
        middle = os.fork()
        if middle == 0:
            _middle(seat, write)
        os.close(write)
        told = os.read(read, _PID_BYTES)
        os.close(read)
        os.waitpid(middle, 0)
        pid = int(told or 0)
        if pid <= 0:
            raise OSError(-pid, f"user namespace: {os.strerror(-pid)}")
        return pid

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 128)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _middle(seat: mould.Seat, write: int) -> NoReturn:
    uid, gid = os.getuid(), os.getgid()
    try:
        # /proc/self belongs to root while non-dumpable; no job shares this process's pid namespace.
        linux.set_dumpable(True)
        linux.unshare(_MIDDLE_NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
        for name, most in _USER_QUOTAS:
            _cap(f"/proc/sys/user/{name}", most)
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        mould.run(seat)
    os.write(write, str(pid).encode())
    os._exit(0)


def _cap(path: str, most: int) -> None:
    """Bound what the job's user namespace takes of the developer's own quota (attack 39); old kernels lack some."""
    try:
        with open(path, "r+", encoding="ascii") as file:
            if int(file.read()) > most:
                file.seek(0)
                file.write(str(most))
    except FileNotFoundError:
        return


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    main(sys.argv)
