"""What a vault's protection rests on, graded: secure, weak or insecure, each with why and the exact fix.

Called by `ringfence vault doctor`. Must never change anything, open a secret, or call secure what it has not seen for
itself: of a process it goes by the kernel's word, and by the broker's own only for what the kernel tells nobody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from broker.vault import audit as audits
from broker.vault import hostkey, seeds
from broker.vault.disk import FILE_MODE, FOLDER_MODE, Folder
from broker.vault.errors import VaultError
from broker.vault.hostkey import KEY_FILE, KeySource
from broker.vault.reserve import RESERVE_BYTES
from broker.vault.rulesfile import load_rules

__all__ = ["Finding", "Grade", "Process", "processes", "vault", "worst"]

Grade = Literal["secure", "weak", "insecure"]
_ORDER: Final[Sequence[Grade]] = ("secure", "weak", "insecure")
_MAX_AUDIT_BYTES: Final = 1 << 30
_RECIPIENTS: Final = "recipients"
_SCARCE, _FULL = 0.1, 0.05
_FILTERED: Final = "2"
_MANY: Final = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``why`` says what was seen; ``fix`` is a command or setting, empty for what is secure."""

    what: str
    grade: Grade
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A daemon as the kernel shows it to everybody: uid, no_new_privs, seccomp, locked memory."""

    pid: int
    uid: int
    no_new_privs: bool
    filtered: bool
    locked: bool
    capabilities: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return a process's facts, or None if it has ended."""
        try:
            text = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
        except OSError:
            return None
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return cls(
            pid,
            int(rows["Uid"].split()[1]),
            rows.get("NoNewPrivs", "").strip() == "1",
            rows.get("Seccomp", "").strip() == _FILTERED,
            rows.get("VmLck", "0").split()[0] != "0",
            int(rows.get("CapEff", "0").strip(), 16),
        )


def worst(findings: Iterable[Finding]) -> Grade:
    """Return the worst grade among the lines."""
    return max((one.grade for one in findings), key=_ORDER.index, default="secure")


def vault(
    path: Path, rules: Path, source: KeySource | None, shown: Path, *, handed: bool = False, near: Path | None = None
) -> list[Finding]:
    """Grade what lies on disk, as the vault's owner. ``source``: where the key comes from if not from the vault.

    ``shown``: the vault's path as an operator would type it. ``handed``: the running broker was handed its key, which
    we can't have. ``near``: a recovery key that lies on this host.
    """
    return [
        _files(path, shown),
        *_keys(path, source, shown, handed=handed, near=near),
        _rules(rules, shown.parent / rules.name),
        _record(path, source, shown, handed=handed),
        _room(path, shown),
    ]


def processes(
    broker: Process | None, scrubber: Process | None, told: Mapping[str, object], agent_uid: int, *, swap: bool
) -> list[Finding]:
    """Grade the broker and its scrubber. ``told``: the broker's own words; ``agent_uid``: the home's owner."""
    if broker is None:
        why = "no broker answers on this home: what it wears can't be seen, and no job gets a secret"
        return [Finding("broker", "weak", why, "ringfence broker")]
    return [
        _user(broker, agent_uid),
        _walls("broker", broker, landlock=_number(told, "landlock"), own=broker.uid != agent_uid),
        _memory(broker, told, swap=swap),
        _scrubber(scrubber, broker, agent_uid, _number(told, "scrubber_landlock")),
        _reserve(told),
    ]


def _files(path: Path, shown: Path) -> Finding:
    try:
        owner = path.lstat().st_uid
        faults, fixes = _drift(path, shown, owner)
    except OSError as error:
        return Finding("files", "insecure", f"{shown} can't be looked at: {error.strerror}", f"ls -la {shown}")
    if not faults:
        return Finding("files", "secure", f"every file belongs to user {owner} alone, 0700 and 0600, no links")
    more = f" and {len(faults) - _MANY} more" if len(faults) > _MANY else ""
    return Finding("files", "insecure", "; ".join(faults[:_MANY]) + more, " && ".join(fixes[:_MANY]))


def _drift(path: Path, shown: Path, owner: int) -> tuple[list[str], list[str]]:
    faults, fixes = [], []
    entries = [path, *sorted(path.rglob("*"))]
    for entry in entries:
        info, name = entry.lstat(), shown / entry.relative_to(path)
        folder = stat.S_ISDIR(info.st_mode)
        mode = FOLDER_MODE if folder else FILE_MODE
        if not folder and not stat.S_ISREG(info.st_mode):
            faults.append(f"{name} is neither file nor folder")
            fixes.append(f"rm {name}")
        elif info.st_uid != owner:
            faults.append(f"{name} belongs to user {info.st_uid}, the vault to {owner}")
            fixes.append(f"chown {owner} {name}")
        elif info.st_mode & 0o7777 & ~mode:
            faults.append(f"{name} has mode {info.st_mode & 0o7777:04o}")
            fixes.append(f"chmod {mode:o} {name}")
        elif not folder and info.st_nlink > 1:
            faults.append(f"{name} has {info.st_nlink} names: who holds another one keeps what is written here")
            fixes.append(f"find / -xdev -samefile {name}")
    return faults, fixes


def _keys(path: Path, source: KeySource | None, shown: Path, *, handed: bool, near: Path | None) -> list[Finding]:
    try:
        lines = (path / _RECIPIENTS).read_text("ascii", "replace").splitlines()
    except OSError as error:
        why, fix = f"the list of recipients can't be read: {error.strerror}", f"restore {shown} from your backup"
        return [Finding("recovery key", "insecure", why, fix)]
    recipients = [line for line in lines if line.strip() and not line.startswith("#")]
    return [_recovery(len(recipients) - 1, near), _host_key(path, source, shown, handed=handed)]


def _recovery(count: int, near: Path | None) -> Finding:
    if count < 1:
        why = "nothing but the host's key opens the vault: with this host every secret is lost"
        return Finding("recovery key", "insecure", why, "ringfence vault rotate --recovery AGE1…")
    if near is not None:
        why = "the recovery key lies on this host: who reads it opens every secret"
        return Finding("recovery key", "weak", why, f"copy {near} to another host, then rm {near}")
    return Finding("recovery key", "secure", f"{count} besides the host's; whether it can be found is yours to try")


def _host_key(path: Path, source: KeySource | None, shown: Path, *, handed: bool) -> Finding:
    if source is not None or handed:
        try:
            if source is not None:
                hostkey.parse(source.read())
        except VaultError as error:
            return Finding("host key", "insecure", str(error), "mend what hands it over, and start the broker again")
        if (path / KEY_FILE).exists():
            why = "the key comes from outside, and an old one still lies in the vault"
            return Finding("host key", "weak", why, f"ringfence vault rotate --again && rm {shown / KEY_FILE}")
        return Finding("host key", "secure", "it comes from outside of the vault, and lies on no disk of it")
    why = "it lies on the same disk as the secrets: a copy of the disk opens them"
    fix = "keep it elsewhere: LoadCredentialEncrypted=age-key:… or RINGFENCE_BROKER_KEY_COMMAND (docs/secrets.md)"
    return Finding("host key", "weak", why, fix)


def _rules(path: Path, shown: Path) -> Finding:
    if not path.exists():
        why = "there is none: no job is given anything"
        return Finding("policy", "secure", why)
    try:
        rules = load_rules(path).rules
    except VaultError as error:
        return Finding("policy", "insecure", str(error), f"$EDITOR {shown} && ringfence vault reload")
    wide = [
        rule.label for rule in rules if rule.effect == "allow" and "*" in rule.secrets and "*" in (*rule.tenants, "")
    ]
    if wide:
        why = f"{wide[0]} gives every secret to every tenant"
        return Finding("policy", "weak", why, f"name secrets and tenants in {shown}, then ringfence vault reload")
    return Finding("policy", "secure", f"{len(rules)} rules, default deny, nobody else can write it")


def _record(path: Path, source: KeySource | None, shown: Path, *, handed: bool) -> Finding:
    if handed and source is None:
        why = "the broker walked its chain at its start; only who has the host's key can do so now"
        return Finding("record", "secure", why)
    try:
        folder = Folder(path)
    except VaultError as error:
        return Finding("record", "insecure", str(error), f"see `files`, and ringfence vault audit on {shown}")
    try:
        data = folder.read(audits.AUDIT_FILE, _MAX_AUDIT_BYTES)
        seed = seeds.read(folder, hostkey.parse((source or hostkey.FileKey(folder)).read()))
        # Only whole lines: a broker may be writing one.
        head, _ = audits.verify(data[: data.rfind(b"\n") + 1], seed)
    except FileNotFoundError:
        return Finding("record", "secure", "empty")
    except VaultError as error:
        return Finding(
            "record", "insecure", str(error), "ringfence vault audit; compare with an end you noted elsewhere"
        )
    finally:
        folder.close()
    return Finding(
        "record", "secure", f"{head.count} lines, unchanged; note its end elsewhere: {head.count}:{head.mac}"
    )


def _room(path: Path, shown: Path) -> Finding:
    room = os.statvfs(path)
    free = room.f_bavail / max(1, room.f_blocks)
    if free >= _SCARCE:
        return Finding("disk", "secure", f"{free:.0%} of the vault's file system is free")
    why = f"{free:.0%} of the vault's file system is free; on a full one nothing is recorded, so nothing is released"
    return Finding("disk", "weak" if free >= _FULL else "insecure", why, f"free some space: df {shown}")


def _user(broker: Process, agent_uid: int) -> Finding:
    if broker.uid == 0:
        why = "the broker runs as root: what breaks into it has the host"
        return Finding("user", "weak", why, "as root: `ringfence vault init` gives a new vault a user of its own")
    if broker.uid == agent_uid:
        why = (
            f"broker, agents and (at level B) jobs share user {broker.uid}: only namespaces and undumpable memory "
            "stand between a job that leaves its sandbox and every secret"
        )
        return Finding("user", "weak", why, "run the node as root: the broker then has a user of its own (level A)")
    return Finding("user", "secure", f"a user of its own, {broker.uid}; the home is user {agent_uid}'s")


def _walls(what: str, found: Process, *, landlock: int, own: bool) -> Finding:
    lacks = []
    if not found.filtered:
        lacks.append("no seccomp filter")
    if not found.no_new_privs:
        lacks.append("no no_new_privs")
    if lacks:
        return Finding(what, "insecure", f"process {found.pid} wears {', '.join(lacks)}", "end it and start it again")
    if found.capabilities and own:
        why = f"process {found.pid} keeps capabilities {found.capabilities:x}"
        return Finding(what, "insecure", why, "end it and start it again")
    if not landlock:
        why = "seccomp and no_new_privs, but no Landlock: " + (
            "this kernel has none" if own else "with the agents' user it could not tell jobs apart any more"
        )
        fix = "a kernel with CONFIG_SECURITY_LANDLOCK and lsm=landlock,…" if own else "run the node as root"
        return Finding(what, "weak", why, fix)
    return Finding(what, "secure", f"seccomp, no_new_privs, Landlock {landlock}")


def _memory(broker: Process, told: Mapping[str, object], *, swap: bool) -> Finding:
    if told.get("dumpable") != 0 or _number(told, "core_bytes", 1 << 62) > 1:
        why = "the broker's memory can be read by its own user, or would be written to a core file"
        return Finding("memory", "insecure", why, "end it and start it again; see its log")
    if broker.locked or not swap:
        return Finding("memory", "secure", f"unreadable, no core, {'locked' if broker.locked else 'no swap here'}")
    why = "unreadable and without a core, but not locked: values may be swapped out"
    return Finding("memory", "weak", why, "LimitMEMLOCK=infinity for the broker, or encrypted swap")


def _scrubber(scrubber: Process | None, broker: Process, agent_uid: int, landlock: int) -> Finding:
    if scrubber is None:
        return Finding("scrubber", "insecure", "none runs beside the broker", "end the broker and start it again")
    found = _walls("scrubber", scrubber, landlock=landlock, own=scrubber.uid not in {broker.uid, agent_uid})
    if found.grade == "secure" and scrubber.uid == broker.uid:
        why = f"it shares user {scrubber.uid} with the broker; Landlock {landlock} and seccomp stand between them"
        return Finding("scrubber", "weak", why, "run the node as root: it then has a user of its own")
    return found


def _reserve(told: Mapping[str, object]) -> Finding:
    held = _number(told, "reserve_bytes")
    if held >= RESERVE_BYTES:
        return Finding("reserve", "secure", f"{held >> 20} MiB are kept back for the record")
    why = f"{held >> 20} of {RESERVE_BYTES >> 20} MiB are kept back for the record: a full disk stops releases sooner"
    return Finding("reserve", "weak", why, "free some space (or use a file system with fallocate), restart the broker")


def _number(told: Mapping[str, object], name: str, default: int = 0) -> int:
    value = told.get(name)
    return value if isinstance(value, int) else default
