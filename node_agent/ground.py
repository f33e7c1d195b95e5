"""Port: runner.keyring, runner.trust, runner.home. What one agent needs of its host: home, name, keys, groups.

Called by the agent's start. Must never let two agents share a name in one home, and never start on a home that another
user could change.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node_agent import policy, room, trees
from node_agent.admission import Enforcement, Rules
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.errors import GroupBusy
from node_agent.containment.host import HostReport
from node_agent.containment.lower.workspace import Workspaces
from node_agent.containment.paths import Protected
from node_agent.containment.sweep import Journal, sweep_folders
from node_agent.errors import InvariantError, LeftoverError, NameTakenError, PolicyError, SetupError
from node_agent.kernel import prices
from node_agent.kernel.prices import Prices
from node_agent.kernel.recorder import Recorder
from node_agent.placing import Placing
from node_agent.sandbox import Defaults
from node_agent.settings import AgentSettings
from runner import keyring, trust
from runner.errors import ConfigError
from runner.home import Home, check_private_file, check_root_only, check_safe, locate
from runner.signing import Signer

__all__ = ["Ground", "enforcement", "prepare"]

log = logging.getLogger(__name__)

#: Of every job where no cpu controller keeps a share for the agent (attack 35).
NICE = 19
MOST_PIDS = 128
#: What a sweep says of processes that outlived their SIGKILL.
NOT_GONE = "NOT PROVED GONE"
_NODE_FOLDERS = ("moulds", "work")
#: The host's folders that every job sees besides the node's own code.
SYSTEM_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ssl")


@dataclass(slots=True)
class Ground:
    """Opened once per agent process; ``close`` gives the name back."""

    settings: AgentSettings
    home: Home
    signer: Signer
    card: bytes
    policy: policy.Policy
    #: What models cost; None: nobody said, and no job whose budget bounds cost is let in.
    prices: Prices | None
    trust: trust.Trust
    #: The key that signs the fleet's cards; None if this home does not hold it.
    fleet: str | None
    groups: NodeGroups | None
    journal: Journal
    protected: Protected
    swept: tuple[str, ...]
    #: Trees that jobs see and others may put sockets into (attack 16).
    loose: tuple[str, ...]
    #: What this start had to change; told as events once.
    notes: tuple[str, ...]
    _lock: int
    report: HostReport | None = None
    #: Open from the first boot on, for all of them.
    recorder: Recorder | None = None

    def close(self) -> None:
        """Let go of the record, remove own groups and release the name. Idempotent."""
        if self.recorder is not None:
            self.recorder.close()
        if self.groups is not None:
            self.groups.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def rules(self, report: HostReport) -> Rules:
        """Return what admission judges by."""
        return Rules(
            node=self.settings.name,
            trust=self.trust.by_id(),
            policy=self.policy,
            enforcement=Enforcement(
                report.level,
                {each.name: each.how for each in report.promises if each.asked and not each.kept},
                report.why,
                report.fix,
                most_pids=None if "cpu" in report.enforces else MOST_PIDS,
                most_disk_bytes=self._room(report).most_disk,
                prices=self.prices is not None,
            ),
            tasks=self.settings.tasks,
            labels=self.settings.labels,
            fleet=self.fleet,
        )

    def defaults(self, report: HostReport) -> Defaults:
        """Return the limits of jobs that ask for none. Without a group tmpfs is charged to nobody (attack 33)."""
        own = self._room(report)
        shared = "cpu" not in report.enforces
        return Defaults(
            level=report.level,
            python_paths=python_paths(),
            task_paths=self.settings.task_path,
            loose_paths=self.loose,
            memory_bytes=own.memory,
            data_bytes=own.data,
            files=1024 if report.level == "A" else min(1024, _hard_files() // 4),
            disk_bytes=own.disk,
            tmp_bytes=own.tmp,
            shm_bytes=own.shm,
            nice=NICE if shared else 0,
            pids=min(512, MOST_PIDS) if shared else 512,
        )

    def placing(self, report: HostReport) -> Placing:
        """Return what all jobs of this node may ask for together."""
        counted = "memory" in report.enforces
        memory = (self.settings.memory_bytes or _ram()) if counted else None
        cpus = self.settings.cpus or float(len(os.sched_getaffinity(0)))
        return Placing(memory, cpus, self._room(report).memory or 0 if counted else 0)

    def _room(self, report: HostReport) -> room.Room:
        return room.split(_ram(), self.settings.slots, counted="memory" in report.enforces)


def prepare(settings: AgentSettings) -> Ground:
    """Take the name, load keys, trust and policy, and end what an earlier agent of this name left.

    Raises:
        NameTakenError: an agent of this name runs in this home. PolicyError, ConfigError: a file does not load.
    """
    home = Home(settings.home)
    check_safe(home)
    if os.geteuid() == 0:
        for place in own_code():
            check_root_only(place)
    check_hidden((home.path, settings.home, home.keys), (*python_paths(), *settings.task_path, *SYSTEM_TREES))
    loose = _without_sockets((*python_paths(), *settings.task_path))
    folder = settings.node_home
    for part in (folder.parent, folder, *(folder / name for name in _NODE_FOLDERS)):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _take_name(folder, settings.name)
    groups: NodeGroups | None = None
    try:
        ceiling = _load_policy(settings, home)
        groups = _open_groups(settings)
        settings, notes = fitting(settings, counted=groups is not None and "memory" in groups.enforces)
        swept = [*(groups.sweep() if groups is not None else [])]
        journal = Journal(folder / "moulds")
        # What the groups did not lose in their time is not given as much again.
        swept += journal.wait_gone(1.0 if any(NOT_GONE in line for line in swept) else 10.0)
        check_gone(swept)
        swept += sweep_folders(folder)
        swept += Workspaces.of(folder).sweep()
        private = [home.keys, home.trust, home.client, settings.home, settings.policy or home.path / "policy.toml"]
        private += _usual_homes()
        return Ground(
            settings=settings,
            home=home,
            signer=keyring.node_key(home, settings.name),
            card=keyring.load_card(home, settings.name),
            policy=ceiling,
            prices=_load_prices(settings, home),
            trust=trust.load(home.trust),
            fleet=keyring.load_fleet_public(home) if home.fleet_pub.exists() else None,
            groups=groups,
            journal=journal,
            protected=Protected.collect(private=private, extra=settings.task_path),
            swept=tuple(swept),
            loose=loose,
            notes=notes,
            _lock=lock,
        )
    except BaseException:
        if groups is not None:
            groups.close()
        os.close(lock)
        raise


def fitting(settings: AgentSettings, *, counted: bool) -> tuple[AgentSettings, tuple[str, ...]]:
    """Return the settings with no more slots than this host's memory has room for, and what to say of it."""
    most = room.most_slots(_ram())
    if counted or settings.slots <= most:
        return settings, ()
    note = (
        f"{most} slots instead of {settings.slots}: without a memory cgroup the jobs' file systems must fit in half "
        "the memory; `ringfence doctor` prints how to get one, or set fewer slots"
    )
    log.warning(note)
    return settings.model_copy(update={"slots": most}), (note,)


def enforcement(report: HostReport) -> dict[str, str]:
    """Return what `nodes` shows of a host's walls, one word or number each."""
    return {
        "kernel": report.kernel,
        "cgroup": report.cgroup,
        "totals": ",".join(report.enforces),
        "landlock": str(report.landlock_abi),
        "missing": ",".join(missing.what for missing in report.missing),
        "higher": report.higher,
        **{each.name: f"{'yes' if each.kept else 'no'}: {each.how}" for each in report.promises},
    }


def check_gone(swept: Iterable[str]) -> None:
    """Refuse to start beside what an earlier start left alive. Raises LeftoverError with what to do."""
    stuck = [line for line in swept if NOT_GONE in line]
    if stuck:
        raise LeftoverError(
            f"what an earlier start of this node left does not die: {'; '.join(stuck)}. It waits in the kernel, often "
            "for a file system that does not answer: free that (umount -f; /sys/fs/fuse/connections/N/abort), or reboot"
        )


def _without_sockets(shown: Iterable[str]) -> tuple[str, ...]:
    """Return those of the trees that jobs see into which others may put sockets.

    Raises:
        SetupError: one of them holds a socket, which jobs could connect to through any mount.
    """
    found = trees.look(shown)
    if found.sockets:
        raise SetupError(
            f"{found.sockets[0]} is a socket in a tree that jobs see, so they could connect to it: move or remove it"
        )
    for tree, folder in found.loose.items():
        log.warning("others can write to %s: jobs that see %s get no Unix sockets", folder, tree)
    return tuple(found.loose)


def python_paths() -> tuple[str, ...]:
    """Return the folders that hold this interpreter and these packages: what a task's own imports need, read-only."""
    found = importlib.util.find_spec("runner")
    if found is None or found.origin is None:
        raise InvariantError("the package runner is not importable")
    own = Path(found.origin).resolve().parent
    roots = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
    if not any(own.is_relative_to(root) for root in roots):
        roots.append(own)
    # /usr is part of every view.
    return tuple(dict.fromkeys(str(root) for root in roots if not root.is_relative_to("/usr")))


def own_code() -> tuple[Path, ...]:
    """Return the folders that this process takes its code from: interpreter, environment, these packages."""
    found = importlib.util.find_spec("runner")
    if found is None or found.origin is None:
        raise InvariantError("the package runner is not importable")
    return Path(sys.base_prefix), Path(sys.prefix), Path(found.origin).parent, Path(__file__).parent


def check_hidden(private: Iterable[Path], shown: Iterable[str]) -> None:
    """Make sure that no folder that every job sees holds what no job may see: at level B a job could read the keys.

    Folders are compared by device and inode, so a link or a bind mount hides nothing.

    Raises:
        SetupError: names both.
    """
    trees = {(info.st_dev, info.st_ino): tree for tree in shown if (info := _stat(Path(tree))) is not None}
    for path in private:
        real = Path(os.path.realpath(path))
        for place in (real, *real.parents[:-1]):
            info = _stat(place)
            tree = None if info is None else trees.get((info.st_dev, info.st_ino))
            if tree is not None:
                raise SetupError(f"{path} lies in {tree}, which jobs can read: choose another --home")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _usual_homes() -> list[Path]:
    """Return where other fleets of this host and user keep their homes by default."""
    with contextlib.suppress(ConfigError):
        return [Path("/var/lib/ringfence"), locate(environ={}).path]
    return [Path("/var/lib/ringfence")]


def _load_policy(settings: AgentSettings, home: Home) -> policy.Policy:
    path = settings.policy or home.path / "policy.toml"
    try:
        return policy.parse(_private_text(path))
    except FileNotFoundError:
        raise PolicyError(
            f"no policy at {path}: write one (docs/operations.md shows it) or name one with --policy"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"the policy {path} can't be read: {error}") from None


def _load_prices(settings: AgentSettings, home: Home) -> Prices | None:
    path = settings.prices or home.path / "prices.toml"
    try:
        return prices.parse(_private_text(path))
    except FileNotFoundError:
        if settings.prices is None:
            return None
        raise PolicyError(f"no price table at {path}: write one, or leave RINGFENCE_PRICES out") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"the price table {path} can't be read: {error}") from None


def _private_text(path: Path) -> str:
    """Return a file that nobody else can write. Raises OSError, UnicodeDecodeError, ConfigError."""
    with path.open("rb") as file:
        check_private_file(path, os.fstat(file.fileno()), secret=False)
        if os.geteuid() == 0:
            check_root_only(path.parent)
        return file.read().decode("utf-8")


def _take_name(folder: Path, name: str) -> int:
    """Lock the name; an agent that was killed a moment ago may hold it until the kernel has cleared it away."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    for _ in range(50):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        time.sleep(0.02)
    os.close(fd)
    raise NameTakenError(f"an agent named {name} runs in this home already: stop it, or choose another --name")


def _open_groups(settings: AgentSettings) -> NodeGroups | None:
    try:
        return NodeGroups.open(settings.name, home=settings.home)
    except GroupBusy as error:
        raise NameTakenError(str(error)) from None


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _hard_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
