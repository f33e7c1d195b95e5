"""``trees.py KIND COUNT [end]``: a tree of processes that does not want to go.

Says ``up`` (with what was tried in vain) once it stands; then its first process waits, or with ``end`` exits with 0.
Every process ends by itself after LIFE_S, and a tree makes at most MOST processes in all, should a kill ever fail.
"""

import ctypes
import errno
import mmap
import os
import platform
import select
import signal
import struct
import sys
import threading
import time

LIFE_S = 45
MOST = 3000
X86 = platform.machine() == "x86_64"
CLONE, EXIT, PTRACE, GETPPID, SECCOMP = (56, 60, 101, 110, 317) if X86 else (220, 93, 117, 173, 277)
CLONE_VM, CLONE_VFORK, CLONE_PARENT, NEW_USER, NEW_PID = 0x100, 0x4000, 0x8000, 0x10000000, 0x20000000
libc = ctypes.CDLL(None, use_errno=True)
made = mmap.mmap(-1, 4096)
ready, stand = os.pipe()
told: list[str] = []


def call(number: int, *words: int) -> int:
    return int(libc.syscall(*(ctypes.c_long(word) for word in (number, *words, *(0,) * (6 - len(words))))))


def count() -> int:
    """Count one more process; not exact when many count at once, which only makes the bound a little soft."""
    (so_far,) = struct.unpack_from("q", made, 0)
    struct.pack_into("q", made, 0, so_far + 1)
    return int(so_far) + 1


def child() -> bool:
    """Fork; true in the child, which then ends by itself some day."""
    if os.fork():
        return False
    signal.alarm(LIFE_S)
    return True


def linger() -> None:
    while True:
        signal.pause()


def stands() -> None:
    """Called by a process once it is what its kind makes of it."""
    os.write(stand, b".")


def wait_standing(size: int) -> None:
    for _ in range(size):
        os.read(ready, 1)


def forest(size: int) -> None:
    """Half plain children, half double-forked into sessions of their own; ``size`` processes with the first."""
    for number in range(size - 1):
        if number % 2:
            orphan()
        elif child():
            linger()


def orphan() -> None:
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if child():
            linger()
        os._exit(0)
    os.waitpid(middle, 0)


def siblings(size: int) -> None:
    """Children of the first process's own parent."""
    for _ in range(size):
        if call(CLONE, CLONE_PARENT | signal.SIGCHLD) == 0:
            signal.alarm(LIFE_S)
            os.setsid()
            stands()
            linger()
    wait_standing(size)


def subreaper(size: int) -> None:
    """A detached process that adopts its orphans, so that they never fall to pid 1."""
    if child():
        os.setsid()
        libc.prctl(36, 1, 0, 0, 0)
        for _ in range(size):
            orphan()
        stands()
        linger()
    wait_standing(1)


def nested(size: int) -> None:
    """User and pid namespaces of its own: asked for in three ways."""
    new = NEW_USER | NEW_PID
    ways = (lambda: libc.unshare(new), lambda: call(CLONE, new | signal.SIGCHLD), lambda: call(435, 0, 0))
    for way in ways:
        told.append("DONE" if way() >= 0 else errno.errorcode[ctypes.get_errno()])
    forest(size)


def leaderless(size: int) -> None:
    """A process whose first thread has ended while another runs on."""
    for _ in range(size):
        if child():
            os.setsid()
            threading.Thread(target=linger_in_thread).start()
            stands()
            call(EXIT, 0)
    wait_standing(size)


def linger_in_thread() -> None:
    while True:
        time.sleep(1)


def vforked(size: int) -> None:
    """A parent that the kernel holds until its child execs, and a child that never does."""
    for _ in range(size):
        if child():
            call(CLONE, CLONE_VM | CLONE_VFORK | signal.SIGCHLD)
            stands()
            linger()
    wait_standing(size)


def hydra(size: int) -> None:
    """Two heads that start each other again; it stands once a head has really been replaced."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    first = os.fork()
    if first == 0:
        signal.alarm(LIFE_S)
        os.setsid()
        spare = os.fork()
        watch(os.getppid() if spare == 0 else spare)
    before = wait_made(1)
    os.kill(before, signal.SIGKILL)
    wait_made(2)
    told.append("regrown")


def watch(other: int) -> None:
    while True:
        struct.pack_into("q", made, 8, os.getpid())
        if count() > MOST:
            os._exit(0)
        poll = select.poll()
        try:
            other_fd = os.pidfd_open(other)
        except ProcessLookupError:
            other_fd = -1
        if other_fd >= 0:
            poll.register(other_fd, select.POLLIN)
            poll.poll()
            os.close(other_fd)
        other = os.fork()
        if other == 0:
            signal.alarm(LIFE_S)
            os.setsid()
            other = os.getppid()


def wait_made(least: int) -> int:
    while struct.unpack_from("q", made, 0)[0] < least:
        time.sleep(0.001)
    return int(struct.unpack_from("q", made, 8)[0])


def hopper(size: int) -> None:
    """Relays that fork a successor in a new session and are gone: no pid stays true for long."""
    for _ in range(size):
        if child():
            while count() < MOST:
                time.sleep(0.001)
                if os.fork():
                    os._exit(0)
                signal.alarm(LIFE_S)
                os.setsid()
                stands()
            linger()
    wait_standing(size)


def bomb(size: int) -> None:
    """Every process forks as fast as it can, up to MOST in all."""
    if not child():
        while struct.unpack_from("q", made, 0)[0] < size:
            time.sleep(0.001)
        return
    os.setsid()
    while count() < MOST:
        try:
            if os.fork() == 0:
                signal.alarm(LIFE_S)
        except OSError:
            time.sleep(0.005)
    linger()


def stopped(size: int) -> None:
    """Processes that are stopped and would have to be continued to see any other signal."""
    for _ in range(size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIFE_S)
            linger()
        os.kill(pid, signal.SIGSTOP)


def traced(size: int) -> None:
    """A child that has itself traced, and a sibling that is seized."""
    for request, whose in ((0, 0), (0x4206, 1)):
        victim = os.fork()
        if victim == 0:
            signal.alarm(LIFE_S)
            if request == 0 and call(PTRACE, 0) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            linger()
        answer = call(PTRACE, request, victim * whose)
        told.append("DONE" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
    forest(size)


def deaf(size: int) -> None:
    """Every signal ignored where it may be, and blocked."""
    for _ in range(size):
        if child():
            os.setsid()
            signal.alarm(0)  # its last resort is the look at the clock below
            for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            stands()
            time.sleep(LIFE_S)
            os._exit(0)
    wait_standing(size)


def hidden(size: int) -> None:
    """Not dumpable, so that nobody of the same uid can look into it through /proc."""
    if child():
        os.setsid()
        libc.prctl(4, 0, 0, 0, 0)
        forest(size)
        stands()
        linger()
    wait_standing(1)


def threads(size: int) -> None:
    """Processes of ten threads each."""
    for _ in range(size):
        if child():
            os.setsid()
            for _ in range(9):
                threading.Thread(target=linger_in_thread).start()
            stands()
            linger()
    wait_standing(size)


def reborn(size: int) -> None:
    """Processes that execute a new program again and again."""
    for _ in range(size):
        if child():
            os.setsid()
            stands()
            again = 'i=$((${i:-0}+1)); export i; [ $i -lt 3000 ] && exec sh -c "$again"; exec sleep 30'
            os.execve("/bin/sh", ["sh", "-c", again], {**os.environ, "again": again})  # noqa: S606 - its trick
    wait_standing(size)


def held(size: int) -> None:
    """Processes inside a call that waits for an answer of a supervisor, which there is not."""
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, GETPPID), (0x06, 0, 0, 0x7FC00000), (0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filtered = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    for _ in range(size):
        if child():
            os.setsid()
            libc.prctl(38, 1, 0, 0, 0)
            if call(SECCOMP, 1, 8, ctypes.addressof(filtered)) >= 0:
                stands()
                call(GETPPID)
            os._exit(1)
    wait_standing(size)


def zombies(size: int) -> None:
    """Orphans that fall to pid 1 and end at once, as many as it can make."""
    if child():
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while count() < MOST:
            if os.fork() == 0:
                os.fork()
                os._exit(0)
            if struct.unpack_from("q", made, 0)[0] == size:
                stands()
        linger()
    wait_standing(1)


def burners(size: int) -> None:
    """Sessions of one process each that all burn, from the moment that the last one stands."""
    gate, key = os.pipe()
    for _ in range(size):
        if child():
            os.setsid()
            os.close(key)
            stands()
            os.read(gate, 1)
            while True:
                pass
    wait_standing(size)
    os.close(key)


def main() -> None:
    first = (forest, siblings, subreaper, nested, leaderless, vforked, hydra, hopper)
    second = (bomb, stopped, traced, deaf, hidden, threads, reborn, held, zombies, burners)
    kinds = {each.__name__: each for each in (*first, *second)}
    signal.alarm(LIFE_S)
    kinds[sys.argv[1]](int(sys.argv[2]))
    os.write(1, " ".join(["up", *told]).encode() + b"\n")
    if sys.argv[3:] != ["end"]:
        linger()


if len(sys.argv) > 1:
    main()
