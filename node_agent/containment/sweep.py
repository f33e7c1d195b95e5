"""What a former agent of this name left: moulds, mounts and folders; ended and removed before new work is taken.

Called by the agent at its start (after it holds its name) and by the slots, which keep the journal of moulds. Must
never touch a process whose start time is not the recorded one, follow a link, or leave this agent's own folder.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

from node_agent.containment import linux, mounts

__all__ = ["Journal", "detach_mounts", "remove_tree", "sweep_folders"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
UMOUNT_NOFOLLOW = 8
SPARED = ".spared"
MAX_DETACHES = 1000
#: Folders of ``home/nodes/NAME`` whose content belongs to attempts.
ATTEMPT_FOLDERS = ("work", "view")


class Journal:
    """The moulds of one agent, one empty file each: ``BOOT.PID.STARTTIME``. Adding and removing is atomic."""

    def __init__(self, folder: Path, *, proc: Path = Path("/proc")) -> None:
        """``folder`` is ``home/nodes/NAME/moulds``; it is made 0700 if it is not there."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._proc = proc
        self._boot = BOOT_ID.read_text().strip().replace("-", "")[:12]

    def add(self, pid: int, *, spare: bool = False) -> None:
        """Record a mould while its pid can't have been given to another process. Gone already: nothing to record.

        ``spare``: it is waited for and not killed, because it ends by itself after the proof (levels C to F).
        """
        started = self._start_time(pid)
        if started is not None:
            (self._folder / f"{self._boot}.{pid}.{started}{SPARED if spare else ''}").touch(mode=0o600)

    def remove(self, pid: int) -> None:
        """Strike a mould that is proved gone. Idempotent."""
        for path in self._folder.glob(f"{self._boot}.{pid}.*"):
            path.unlink(missing_ok=True)

    def wait_gone(self, timeout_s: float = 10.0) -> list[str]:
        """Kill every recorded mould that still lives, wait for it, and strike it; say what was found.

        Blocks: call it before the loop serves. An entry without proof stays, and its line says so.
        """
        deadline = time.monotonic() + timeout_s
        return [line for path in sorted(self._folder.iterdir()) if (line := self._end(path, deadline))]

    def _end(self, path: Path, deadline: float) -> str:
        boot, _, rest = path.name.removesuffix(SPARED).partition(".")
        pid_text, _, started = rest.partition(".")
        fd = self._pin(int(pid_text), int(started)) if boot == self._boot and pid_text.isdigit() else None
        if fd is None:
            path.unlink(missing_ok=True)
            return ""
        try:
            if not path.name.endswith(SPARED):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            gone = _readable(fd, deadline)
        finally:
            os.close(fd)
        if not gone:
            return f"mould {pid_text}: NOT PROVED GONE"
        path.unlink(missing_ok=True)
        return f"mould {pid_text}: {'ended' if path.name.endswith(SPARED) else 'killed'}"

    def _pin(self, pid: int, started: int) -> int | None:
        """Return a pidfd of exactly that process: the start time is read after it is open, so a reused pid shows."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return None
        if self._start_time(pid) == started:
            return fd
        os.close(fd)
        return None

    def _start_time(self, pid: int) -> int | None:
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name (field 2) may hold blanks and brackets; field 22 is counted from behind it.
        return int(text.rpartition(")")[2].split()[19])


def sweep_folders(node_home: Path) -> list[str]:
    """Detach mounts and remove what attempts left below ``home/nodes/NAME``; say what was found."""
    found = [f"mount {point}" for point in detach_mounts(node_home)]
    for name in ATTEMPT_FOLDERS:
        if not (node_home / name).is_dir():
            continue
        parent = os.open(node_home / name, FOLDER)
        try:
            for entry in sorted(os.listdir(parent)):
                remove_tree(entry, dir_fd=parent)
                found.append(f"folder {name}/{entry}")
        finally:
            os.close(parent)
    return found


def detach_mounts(below: Path) -> list[str]:
    """Detach every mount that lies below a folder (not one at the folder itself), the innermost first."""
    prefix = f"{below.resolve()}/"
    done: list[str] = []
    for _ in range(MAX_DETACHES):
        points = sorted(entry.point for entry in mounts.table().values() if f"{entry.point}/".startswith(prefix))
        points = [point for point in points if f"{point}/" != prefix]
        if not points:
            break
        linux.umount(points[-1], linux.DETACH | UMOUNT_NOFOLLOW)
        done.append(points[-1])
    return done


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a file or a whole tree that a hostile job made: links unfollowed, mode 000 and any depth endured.

    It goes down and up one level at a time with one open folder, and checks on the way up that it is where it was.
    Call it after the proof that no process of the job is left. Missing: nothing to do.

    Raises:
        OSError: EXDEV at a mount (detach it first), ESTALE if the tree moved meanwhile, or what the kernel answers.
    """
    if _unlink(name, dir_fd):
        return
    device = os.stat(dir_fd).st_dev
    trail: list[tuple[str, int, int]] = []
    current = os.dup(dir_fd)
    try:
        current = _down(current, name, device, trail)
        while trail:
            child = _first_folder(current)
            if child is not None:
                current = _down(current, child, device, trail)
                continue
            emptied = trail.pop()
            current = _up(current, trail, dir_fd)
            os.rmdir(emptied[0], dir_fd=current)
    finally:
        os.close(current)


def _unlink(name: str, dir_fd: int) -> bool:
    """Remove whatever is no folder; True if nothing is left to do."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            return False
        raise
    return True


def _first_folder(fd: int) -> str | None:
    """Empty a folder up to the first folder in it, and return that one; None once it is empty.

    It stops there and starts over later, so that a folder of very many folders is not listed once for each of them.
    """
    while True:
        met = False
        with os.scandir(fd) as entries:
            for entry in entries:
                met = True
                if not _unlink(entry.name, fd):
                    return entry.name
        if not met:
            return None


def _down(current: int, name: str, device: int, trail: list[tuple[str, int, int]]) -> int:
    below = _open_folder(name, current)
    info = os.fstat(below)
    if info.st_dev != device:
        os.close(below)
        raise OSError(errno.EXDEV, "a mount lies in the tree", name)
    os.close(current)
    trail.append((name, info.st_dev, info.st_ino))
    return below


def _up(current: int, trail: list[tuple[str, int, int]], top: int) -> int:
    above = os.open("..", FOLDER, dir_fd=current)
    info = os.fstat(above)
    if trail:
        expected = trail[-1][1:]
    else:
        top_info = os.fstat(top)
        expected = (top_info.st_dev, top_info.st_ino)
    if (info.st_dev, info.st_ino) != expected:
        os.close(above)
        raise OSError(errno.ESTALE, "the tree moved while it was removed")
    os.close(current)
    return above


def _open_folder(name: str, dir_fd: int) -> int:
    """Open a folder for reading whatever its mode is: chmod goes through the very descriptor that was opened."""
    pinned = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        itself = f"/proc/self/fd/{pinned}"
        if stat.S_IMODE(os.fstat(pinned).st_mode) & 0o700 != 0o700:
            os.chmod(itself, 0o700)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(pinned)


def _readable(fd: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
