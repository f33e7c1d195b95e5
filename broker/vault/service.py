"""The broker as a process: made safe first, then its vault, its rules, its sockets, and the loop.

Called by __main__. Must never serve before it has proved that it can tell two jobs apart, from a vault that has
drifted, or by rules that it did not understand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from broker.vault import approval, cleaning, confine, hostkey, peer
from broker.vault import audit as audits
from broker.vault.audit import Audit
from broker.vault.counter import Clerk, Counter
from broker.vault.desk import Desk
from broker.vault.disk import Folder
from broker.vault.errors import VaultError
from broker.vault.hostkey import CommandKey
from broker.vault.keystore import Keystore
from broker.vault.leases import Leases
from broker.vault.peer import Message
from broker.vault.reserve import Reserve
from broker.vault.rulesfile import RULES_FILE, load_rules
from broker.vault.sockets import CONTROL, COUNTER

__all__ = ["beginnings", "harden", "releases", "self_test", "serve"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_PDEATHSIG: Final = 2
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
#: MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT: what has been touched stays; libraries that nobody calls are not loaded for it.
_MCL: Final = 7
_MAX_AUDIT_BYTES: Final = 1 << 30
_NEW_USER_AND_PID: Final = 0x3000_0000
_SELF_TEST_S: Final = 5.0
_OWN: Final = b"own"
_PLAIN: Final = b"plain"
_APART: Final = b"apart"


def harden() -> tuple[str, ...]:
    """Make this process unreadable for its own uid's other processes; returns what this host does not allow.

    Raises:
        VaultError: it can't be made unreadable at all.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise VaultError("the broker can't hide its memory from its own user's processes on this kernel")
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # With a limit below all memory a later allocation would fail instead.
    free = os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    if free and libc.mlockall(_MCL) == 0:
        return ()
    return ("memory may be swapped: raise LimitMEMLOCK, or encrypt swap",)


def self_test() -> None:
    """Prove that the kernel pins the sender of each message, and tells a job's pid namespace from ours.

    Where this host gives no new namespace there is no job at level B whose lease could need the second half.

    Raises:
        VaultError: it does not: every job would look like every other.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        peer.arm(near, rights=False)
        far.send(_OWN)
        child = os.fork()
        if child == 0:
            _act_as_job(far)
        messages: list[Message] = []
        try:
            near.settimeout(_SELF_TEST_S)
            for _ in range(2):
                near.recv(1, socket.MSG_PEEK)
                message = peer.receive(near)
                if message is not None:
                    messages.append(message)
            _judge(messages)
        except TimeoutError:
            raise VaultError("the self-test of the broker got no answer in time") from None
        finally:
            for message in messages:
                if message.data != _OWN and message.sender.pidfd is not None:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(message.sender.pidfd, signal.SIGKILL)
                message.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def releases(lines: tuple[Mapping[str, object], ...]) -> dict[tuple[str, str], int]:
    """Return how often each (attempt, name) was released, for attempts whose lease the record does not end."""
    ended = {str(line["attempt"]) for line in lines if line["event"] == "lease.ended" and line.get("why") == "done"}
    return Tally(
        (str(line["attempt"]), str(line["name"]))
        for line in lines
        if line["event"] == "secret.released" and str(line["attempt"]) not in ended
    )


def beginnings(lines: tuple[Mapping[str, object], ...]) -> dict[str, float]:
    """Return when each attempt's first lease was opened, for attempts whose lease the record does not end."""
    found: dict[str, float] = {}
    for line in lines:
        if line["event"] == "lease.opened":
            found.setdefault(str(line["attempt"]), float(str(line.get("since_s", "inf"))))
        elif line["event"] == "lease.ended" and line.get("why") == "done":
            found.pop(str(line["attempt"]), None)
    return found


def serve(
    home: Path,
    agents: frozenset[int],
    key_command: tuple[str, ...] = (),
    scrub_uid: int | None = None,
    egress: frozenset[int] = frozenset(),
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the rules anew.

    Started by root it becomes the vault's owner, once its sockets stand and its scrubber has a user of its own.

    Raises:
        VaultError: the vault, its key, its record or its rules are not fit; nothing was served.
    """
    with contextlib.ExitStack() as stack:
        cleaner = cleaning.start(scrub_uid)
        stack.callback(cleaner.close)
        control, counter_socket = (stack.enter_context(_bound(home / "s" / name)) for name in (CONTROL, COUNTER))
        place = _become_owner(home)
        for line in harden():
            log.warning("weak: %s", line)
        self_test()
        source = CommandKey(key_command) if key_command else hostkey.outside(os.environ)
        store = stack.enter_context(Keystore(place / "vault", source))
        folder = Folder(place / "vault")
        stack.callback(folder.close)
        reserve = Reserve(folder)
        stack.callback(reserve.close)
        record = Audit(folder, store.audit_seed(), more_room=reserve.give)
        stack.callback(record.close)
        _, lines = audits.verify(folder.read(audits.AUDIT_FILE, _MAX_AUDIT_BYTES), store.audit_seed())
        rules = load_rules(place / RULES_FILE)
        leases = Leases(rules, releases(lines), approval.decisions(lines), beginnings(lines))
        desk = Desk(store, record, leases, agents=agents, cleaning=cleaner, egress=egress)
        stack.callback(desk.close)

        def reload() -> dict[str, object]:
            ended = leases.reload(load_rules(place / RULES_FILE))
            for attempt, name in ended:
                desk.lines.withdraw(attempt)
                record.write("secret.revoked", attempt=attempt, name=name, why="rules")
            record.write("rules.loaded")
            reserve.fill()
            return {"revoked": len(ended)}

        worn: dict[str, object] = {}
        counter = Counter(Clerk(store, record, leases, reload=reload, about=lambda: worn | confine.facts(reserve.held)))
        stack.callback(counter.close)
        stack.callback(record.sync)
        desk.listen(control)
        counter.listen(counter_socket)
        desk.watch(counter.fileno(), counter.serve)
        record.write("broker.started", pid=os.getpid())
        cleaner.await_confined()
        key = "outside" if source is not None else "file"
        worn |= confine.wear(place, cleaner.process.pid, fenced=place == Path()) | {"key": key}
        # What was loaded until here stays: no collection has to walk it between two answers.
        gc.freeze()
        _loop(desk, reload)


def _become_owner(home: Path) -> Path:
    """Take the user that the vault belongs to; returns the home as that user reaches it."""
    try:
        owner = os.stat(home / "vault", follow_symlinks=False).st_uid
    except FileNotFoundError:
        raise VaultError(f"{home / 'vault'} is missing: make a vault with `ringfence vault init`") from None
    if os.geteuid() != 0 or owner == 0:
        return home
    # It may lie where only root can enter; a folder that we are in stays open to us.
    os.chdir(home)
    with contextlib.suppress(ValueError):
        # Root in a container may not raise it; `harden` says what that means.
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    libc = ctypes.CDLL(None, use_errno=True)
    tied, parent = ctypes.c_int(0), os.getppid()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(tied), 0, 0, 0)
    os.setgroups([])
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    if tied.value:
        # The kernel forgot with the change of user that `up` must not be outlived.
        libc.prctl(_PR_SET_PDEATHSIG, tied.value, 0, 0, 0)
        if os.getppid() != parent:
            raise VaultError("the process that started the broker has ended")
    return Path()


def _loop(desk: Desk, reload_rules: Callable[[], object]) -> None:
    asked: list[int] = []
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda got, _: asked.append(got))
        desk.watch(near.fileno(), lambda: _drain(near))
        log.info("ready")
        try:
            while not {signal.SIGTERM, signal.SIGINT} & set(asked):
                desk.turn()
                if signal.SIGHUP in asked:
                    asked.remove(signal.SIGHUP)
                    try:
                        reload_rules()
                    except VaultError as error:
                        log.warning("the old rules stay: %s", error)
        finally:
            signal.set_wakeup_fd(-1)


def _drain(wakeups: socket.socket) -> None:
    wakeups.recv(4096)


@contextlib.contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    """A listening SEQPACKET socket that is private from its first moment; a dead one's name is taken over."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise VaultError(f"{path} can't be made: {error.strerror}") from None
    finally:
        os.umask(old)
    try:
        # What is sent before we have accepted is named and pinned too: accepted sockets inherit these switches.
        peer.arm(listener, rights=True)
        listener.listen(64)
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()


def _act_as_job(far: socket.socket) -> NoReturn:
    """In a child: send from a new pid namespace if there is one to be had, and stay for the look."""
    libc = ctypes.CDLL(None, use_errno=True)
    word = _PLAIN
    if libc.unshare(_NEW_USER_AND_PID) == 0:
        word = _APART
        grandchild = os.fork()
        if grandchild:
            os.waitpid(grandchild, 0)
            os._exit(0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(int(_SELF_TEST_S) * 2)
    with contextlib.suppress(OSError):
        far.send(word)
        signal.pause()
    os._exit(0)


def _judge(messages: Sequence[Message]) -> None:
    own = os.stat("/proc/self/ns/pid")
    for message in messages:
        sender = message.sender
        if sender.pidfd is None or not peer.alive(sender.pidfd) or sender.uid != os.geteuid():
            raise VaultError("this kernel does not pin the senders of messages: Linux 5.15 or later is needed")
        here = peer.pid_namespace(sender) == (own.st_dev, own.st_ino)
        if here != (message.data != _APART):
            raise VaultError("this host does not tell one pid namespace from another: is /proc mounted?")
    if len(messages) != 2 or messages[0].sender.pid == messages[1].sender.pid:
        raise VaultError("this kernel does not tell the senders of messages apart")
