"""Tasks for workers that run one job after the other: what they find, what they leave, and what they may not do."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from runner import App, current_job

app = App()
_served: list[str] = []
PLACES = (Path("/work"), Path("/tmp"), Path("/dev/shm"))


@app.task()
def who(word: str = "") -> dict[str, object]:
    """Return which process this is, what ran in it before, and what is found of that."""
    _served.append(current_job.id)
    sys.stdout.write(f"out {word}\n")
    sys.stderr.write(f"err {word}\n")
    return {
        "born": Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19],
        "served": len(_served),
        "files": [str(path) for place in PLACES for path in place.iterdir()],
        "env": os.environ.get("LEFT", ""),
        "path": sys.path[0],
        "cwd": str(Path.cwd()),
        "tasks": sorted(name for name in os.listdir("/proc") if name.isdecimal()),
        "word": word,
        "attempt": os.environ["RINGFENCE_ATTEMPT"],
    }


@app.task()
def litter(how: str) -> str:
    """Leave something behind."""
    _served.append("litter")
    if how == "files":
        for place in PLACES:
            deep = place / "a" / "b"
            deep.mkdir(parents=True)
            (deep / "left").write_text("canary")
            (place / "link").symlink_to("/")
            deep.chmod(0)
        os.environ["LEFT"] = "1"
        sys.path.insert(0, "/work/a")
        os.chdir("/tmp/a")
        os.umask(0)
    elif how == "held":
        # No name is left, but the blocks are: the kernel counts them.
        held = os.open("/tmp/held", os.O_RDWR | os.O_CREAT)
        os.write(held, b"x" * 5000)
        os.unlink("/tmp/held")
    elif how == "mode":
        os.chmod("/work", 0o777)  # noqa: S103 - what is tried
    elif how == "out":
        os.dup2(os.dup(1), 77)
        os.dup2(102, 78)
    elif how == "words":
        os.write(100, b"\x13\x00")
    elif how == "forged":
        # As the guest says that an attempt has ended, but for the turn.
        os.write(100, b"\x13\x00" + bytes(16))
        select.select([], [], [], 0.1)
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "exit":
        os._exit(0)
    return how


@app.task()
def others() -> dict[str, str]:
    """Try to start what would go on beside the next job."""
    found = {}
    clone3 = {"x86_64": 435, "aarch64": 435}[os.uname().machine]
    libc = ctypes.CDLL(None, use_errno=True)
    tries: dict[str, Callable[[], object]] = {
        "fork": os.fork,
        "thread": lambda: threading.Thread(target=list).start(),
        "program": lambda: subprocess.run(["/bin/true"], check=False),
        "exec": lambda: os.execv("/bin/true", ["true"]),  # noqa: S606 - what is tried
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    }
    for name, act in tries.items():
        try:
            act()
            found[name] = "done"
        except (OSError, RuntimeError) as error:
            found[name] = type(error).__name__
    arguments = ctypes.create_string_buffer(88)
    found["clone3"] = "refused" if libc.syscall(clone3, arguments, 88) < 0 else "done"
    return found


@app.task()
def late() -> str:
    """Write to the pipes and the result of the attempt before this one, if they are still open."""
    found = []
    for fd in (77, 78):
        try:
            os.write(fd, b"late")
            found.append("written")
        except OSError as error:
            found.append(type(error).__name__)
    return " ".join(found)


@app.task()
def sleep(seconds: float) -> None:
    """Say that it is up, and wait."""
    sys.stdout.write("up\n")
    select.select([], [], [], seconds)


@app.task()
def alarmed() -> None:
    """Leave a timer that ends this process while it waits for its next job, past what the guest takes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    event = (ctypes.c_int * 16)(0, 0, signal.SIGUSR1, 0)
    timer = ctypes.c_void_p()
    create, settime = {"x86_64": (222, 223), "aarch64": (107, 110)}[os.uname().machine]
    assert libc.syscall(create, 1, event, ctypes.byref(timer)) == 0
    times = (ctypes.c_long * 4)(0, 0, 0, 60_000_000)
    assert libc.syscall(settime, timer, 0, times, None) == 0


@app.task()
def asks(count: int) -> None:
    """Ask for as many sessions as fast as it goes."""
    for _ in range(count):
        os.write(100, b"\x14")


@app.task()
def stay(how: str) -> None:
    """Take the guest over: say that this attempt has ended, and never leave."""
    from runner.guest import again

    take = vars(again)["_next"]

    def rest(channel: object) -> object:
        if how in ("file", "word"):
            select.select([], [], [], 0.1)
        if how == "file":
            Path("/tmp/later").touch()
            return take(channel)
        if how == "word":
            os.write(100, b"\x12")
            return take(channel)
        while how == "write":
            os.write(77, b"x" * 65536)
        while True:
            signal.pause()

    os.dup2(1, 77)
    vars(again)["_next"] = rest
