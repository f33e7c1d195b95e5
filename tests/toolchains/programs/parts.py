"""Python's own use of the system: threads, processes, semaphores, asyncio, sockets, databases. Ends with "parts ok".

Run inside jobs and by the census. ``unix`` as an argument: Unix sockets are there too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import locale
import lzma
import mmap
import multiprocessing
import multiprocessing.shared_memory
import os
import pwd
import queue
import random
import resource
import select
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

UNIX = "unix" in sys.argv[1:]


def square(number: int) -> int:
    return number * number


def threads() -> None:
    found: queue.Queue[int] = queue.Queue()
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait(10)
        found.put(threading.get_native_id())

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
    assert len({found.get(timeout=1) for _ in workers}) == 4
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(square, range(10))) == 285


def processes() -> None:
    for method in ("fork", "spawn", "forkserver") if UNIX else ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(square, range(10)) == [square(number) for number in range(10)]
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        assert list(executor.map(square, range(4))) == [0, 1, 4, 9]
    semaphore, counter = multiprocessing.Semaphore(2), multiprocessing.Value("i", 0)
    with semaphore, counter.get_lock():
        counter.value += 1
    block = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    assert block.buf is not None
    block.buf[0] = 7
    block.close()
    block.unlink()


def children() -> None:
    assert subprocess.run(["sh", "-c", "cat; exit 3"], input=b"in", capture_output=True, check=False).returncode == 3
    assert os.waitpid(os.posix_spawnp("true", ["true"], os.environ), 0)[1] == 0
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as child:
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    handle = os.pidfd_open(pid)
    select.select([handle], [], [], 10)
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    os.waitid(os.P_PID, pid, os.WEXITED)
    os.close(handle)


async def _asyncio() -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = await process.communicate(b"through")
    assert out == b"through"
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    writer.close()
    server.close()
    assert await asyncio.to_thread(square, 3) == 9
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, done.set)
    os.kill(os.getpid(), signal.SIGUSR2)
    await asyncio.wait_for(done.wait(), 10)
    await loop.getaddrinfo("localhost", 80)
    if UNIX:
        path = tempfile.mktemp()  # noqa: S306 - a socket makes its file itself
        async with await asyncio.start_unix_server(lambda reader, writer: writer.close(), path):
            reader, writer = await asyncio.open_unix_connection(path)
            assert await reader.read() == b""
            writer.close()


def sockets() -> None:
    first, second = socket.socketpair()
    first.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, second.fileno().to_bytes(4, sys.byteorder))])
    second.recvmsg(10, 64)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            end.bind(("localhost", 0))
    socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    with select.epoll() as poll:
        poll.register(first, select.EPOLLOUT)
        assert poll.poll(1)
    ssl.create_default_context()
    socket.if_nameindex()


def files() -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.closing(sqlite3.connect(f"{name}/base")) as base:
        base.execute("pragma journal_mode=wal")
        base.execute("create table t(x)")
        base.executemany("insert into t values (?)", [(number,) for number in range(100)])
        base.commit()
        with open(f"{name}/file", "w+b") as file:
            file.truncate(8192)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with mmap.mmap(file.fileno(), 8192) as area:
                area[0:1] = b"x"
                area.flush()
            os.posix_fallocate(file.fileno(), 0, 8192)
            os.fsync(file.fileno())
        shutil.copy2(f"{name}/file", f"{name}/copy")
        os.utime(f"{name}/copy", (1, 1))
        with zipfile.ZipFile(f"{name}/zip", "w") as archive:
            archive.write(f"{name}/file")
        Path(f"{name}/x").write_bytes(lzma.compress(b"x" * 9999))
        list(os.scandir(name))
    memory = os.memfd_create("memory", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(memory, b"sealed")
    os.close(memory)


def machine_code() -> None:
    answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(square)(5)
    assert answer == 25
    assert ctypes.CDLL(None).getpid() == os.getpid()
    assert importlib.util.find_spec("json") is not None


def surroundings() -> None:
    assert pwd.getpwuid(os.getuid()).pw_dir
    assert locale.setlocale(locale.LC_ALL, "")
    assert sys.stdin.read() == ""
    resource.getrusage(resource.RUSAGE_CHILDREN)
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
    os.sched_getaffinity(0)
    os.getloadavg()
    os.nice(1)
    os.getrandom(8)
    random.SystemRandom().random()
    hashlib.scrypt(b"a", salt=b"b", n=1024, r=8, p=1)
    select.select([], [], [], 0.001)
    signal.setitimer(signal.ITIMER_REAL, 60)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.sigtimedwait([signal.SIGUSR1], 0)


def main() -> None:
    parts: tuple[Callable[[], None], ...] = (threads, processes, children, sockets, files, machine_code, surroundings)
    for part in parts:
        part()
    asyncio.run(_asyncio())
    print("parts ok")  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
