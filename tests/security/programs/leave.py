"""``leave.py FIND``: leaves behind whatever a job can, shows by FIND (the other program's text) that it is there, ends.

Prints what FIND sees from within, one JSON object. Every process that it leaves ends by itself after LIFE_S.
"""

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys

LIFE_S = 40
libc = ctypes.CDLL(None, use_errno=True)
kept: list[object] = []


def files() -> None:
    for folder in ("/work", "/tmp", "/dev/shm", "/run", "/var/tmp", "/dev/mqueue", "/dev", "/proc/sys/kernel", "/"):
        try:
            os.makedirs(f"{folder}/left/deep")
            with open(f"{folder}/left/file", "w") as file:
                file.write("left")
            os.chmod(f"{folder}/left", 0)
        except OSError:
            continue


def ipc() -> None:
    libc.shmget(0x5246, 4096, 0o1666)
    libc.msgget(0x5246, 0o1666)
    libc.semget(0x5246, 3, 0o1666)
    libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None)
    libc.syscall(248 if os.uname().machine == "x86_64" else 217, b"user", b"left", b"x", 1, -4)


def listeners() -> None:
    for family, address in ((socket.AF_UNIX, "\0left"), (socket.AF_UNIX, "/tmp/left.socket")):
        end = socket.socket(family)
        end.bind(address)
        end.listen()
        kept.append(end)
    kept.append(socket.create_server(("127.0.0.1", 4711)))
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagram.bind(("127.0.0.1", 4712))
    kept.append(datagram)


def last_to_go() -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def itself() -> None:
    """Limits, rank, and everything else that a process hands on to its children."""
    for name, value in (("NOFILE", 64), ("FSIZE", 1 << 20), ("STACK", 1 << 20), ("CPU", 60), ("AS", 1 << 32)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.nice(7)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.umask(0)
    libc.prctl(36, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    for act in (lambda: socket.sethostname("left"), lambda: libc.setdomainname(b"left", 4), last_to_go):
        try:
            act()
        except OSError:
            continue


def detached() -> None:
    """Processes in sessions of their own that hold all that was made above."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.alarm(LIFE_S)
                while True:
                    signal.pause()
            os._exit(0)
        os.wait()


for step in (files, ipc, listeners, itself, detached):
    step()
with open("/dev/shm/left.charged", "wb") as charged:
    charged.truncate(0)
    resource.getrlimit(resource.RLIMIT_FSIZE)
    charged.write(bytes(1 << 20))
os.environ["LEFT_HERE"] = "1"
seen = subprocess.run(
    [sys.executable, "-I", "-S", "-B", "-c", sys.argv[1]], stdout=subprocess.PIPE, check=True, env=dict(os.environ)
)
os.write(1, seen.stdout)
