"""``find.py``: everything that an earlier job could have left for this process to find, as one JSON object.

Two runs in fresh surroundings print the same; what differs in a second run was left by the first.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import socket

libc = ctypes.CDLL(None, use_errno=True)


def writable_files() -> list[str]:
    """Every file on a mount that can be written to."""
    found = []
    with open("/proc/self/mounts") as table:
        mounts = [line.split() for line in table]
    for _, point, kind, options, *_ in mounts:
        if "rw" in options.split(",") and kind != "proc":
            for folder, folders, files in os.walk(point):
                found += [os.path.join(folder, name) for name in (*folders, *files) if not folder.startswith("/proc")]
    return sorted(set(found))


def mounts() -> list[list[str]]:
    with open("/proc/self/mountinfo") as table:
        lines = [line.split() for line in table]
    return [[line[3], line[4], line[5], line[line.index("-") + 1]] for line in lines]


def own_state() -> dict[str, str]:
    """What the kernel holds of this process that it could have inherited."""
    kept = (
        *("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Umask"),
        *("Cpus_allowed_list", "Mems_allowed_list", "Speculation", "CoreDumping", "TracerPid", "VmLck", "SigQ"),
    )
    with open("/proc/self/status") as file:
        lines = [line.partition(":") for line in file if line.startswith(kept)]
    state = {name: text.strip() for name, _, text in lines}
    for name in ("oom_score_adj", "timerslack_ns", "coredump_filter", "personality", "cgroup", "setgroups", "loginuid"):
        state[name] = read(f"self/{name}").strip()
    return state


def processes() -> int:
    """How many processes of this pid namespace are neither pid 1 nor above this one."""
    family = {"1"}
    pid = os.getpid()
    while pid > 1:
        family.add(str(pid))
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return len([name for name in os.listdir("/proc") if name.isdigit() and name not in family])


def sockets() -> list[str]:
    """Which known addresses answer, and how many ends the net namespace lists."""
    found = []
    tries: list[tuple[int, str | tuple[str, int]]] = [
        (socket.AF_UNIX, "\0left"),
        (socket.AF_UNIX, "/tmp/left.socket"),
        (socket.AF_INET, ("127.0.0.1", 4711)),
    ]
    for family, address in tries:
        with socket.socket(family) as end:
            if end.connect_ex(address) == 0:
                found.append(str(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            end.bind(("127.0.0.1", 4712))
        except OSError:
            found.append("udp")
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "packet", "unix"):
        try:
            with open(f"/proc/self/net/{name}") as table:
                found += [name] * (len(table.readlines()) - 1 - 3 * (name == "unix"))
        except OSError:
            continue
    return found


def read(name: str) -> str:
    try:
        with open(f"/proc/{name}") as file:
            return file.read()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def rows(name: str) -> int:
    return read(name).count("\n")


def main() -> None:
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    found = {
        "files": writable_files(),
        "mounts": mounts(),
        "own": own_state(),
        "processes": processes(),
        "sockets": sockets(),
        "sysv": [rows(f"sysvipc/{kind}") for kind in ("shm", "msg", "sem")],
        "queue": libc.mq_open(b"/left", os.O_RDONLY) >= 0,
        "keys": rows("keys"),
        "names": [socket.gethostname(), read("sys/kernel/hostname"), read("sys/kernel/domainname")],
        "limits": {name: resource.getrlimit(number) for name, number in sorted(limits.items())},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "reaper": reaper(),
        "alarm": signal.alarm(0),
        "cwd": os.getcwd(),
        "descriptors": sorted(set(os.listdir("/proc/self/fd"))),
        "environment": sorted(name for name in os.environ if name != "LEFT_HERE"),
    }
    os.write(1, json.dumps(found).encode() + b"\n")


def reaper() -> int:
    answer = ctypes.c_int(0)
    libc.prctl(37, ctypes.byref(answer), 0, 0, 0)
    return answer.value


main()
