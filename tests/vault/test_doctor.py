"""`vault doctor`: every fault is found, graded and given its fix, and nothing is called secure that is not."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.vault import doctor, hostkey, keystore, operator
from broker.vault.audit import Audit
from broker.vault.disk import Folder
from broker.vault.doctor import Finding, Process
from broker.vault.errors import VaultError
from broker.vault.reserve import RESERVE_BYTES
from runner import keyring
from runner.cli import broker as brokers
from runner.cli.children import environment
from runner.cli.commands import run_words
from runner.home import Home
from tests.support import scratch
from tests.support.wait import wait_until
from tests.vault.stand import OPEN_TO_ALL

AGENT, OWN = 1000, 2000
GOOD = Process(7, OWN, no_new_privs=True, filtered=True, locked=True, capabilities=0)
SCRUB = replace(GOOD, pid=8, uid=OWN + 1)
TOLD = {"landlock": 6, "scrubber_landlock": 6, "dumpable": 0, "core_bytes": 1, "reserve_bytes": RESERVE_BYTES}


@pytest.fixture
def home() -> Iterator[Home]:
    """A home with a vault and rules, as `ringfence vault init` makes them."""
    with scratch.folder(mode=0o711) as folder:
        place = Home(folder / "h")
        keyring.init(place)
        keystore.create(place.vault)
        brokers.hand_over(place)
        yield place


@contextlib.contextmanager
def served(home: Home) -> Iterator[int]:
    """Run the broker as `ringfence broker` does; yields its process id."""
    words = brokers.program(home).words
    process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(home), "the broker answers")
        yield process.pid
    finally:
        process.terminate()
        assert process.wait(10) == 0


def answers(home: Home) -> bool:
    """Return whether a broker serves."""
    try:
        return bool(operator.ask(home.sockets / "vault", {"op": "status"})["ok"])
    except VaultError:
        return False


def told(home: Home, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, dict[str, str]]]:
    """Run the command; return its exit code, the whole grade, and the lines by what they are about."""
    capfd.readouterr()
    code = run_words(["--home", str(home.path), "vault", "doctor", "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return code, found["grade"], {one["what"]: one for one in found["findings"]}


def test_a_sound_vault(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is insecure; what is weak has a fix; as root broker and scrubber have users and walls of their own."""
    with served(home):
        code, grade, lines = told(home, capfd)
        assert (code, grade) == (0, "weak")
        assert all(bool(line["fix"]) == (line["grade"] != "secure") for line in lines.values())
        assert lines["host key"]["grade"] == "weak"
        assert "LoadCredentialEncrypted" in lines["host key"]["fix"]
        own = "secure" if os.geteuid() == 0 else "weak"
        assert {lines[name]["grade"] for name in ("user", "broker", "scrubber")} == {own}
        assert {lines[name]["grade"] for name in ("home", "files", "record", "recovery key", "reserve")} == {"secure"}
    assert told(home, capfd)[2]["broker"]["fix"] == "ringfence broker"


def test_an_operator_works_through_the_walls(home: Home) -> None:
    """Everything that an operator does is done by a broker that wears them: no file or call of it is out of reach."""
    value = base64.b64encode(b"a-value-of-some-length").decode()
    put: dict[str, object] = {"op": "put", "name": "KEY", "value": value, "note": ""}
    orders: list[dict[str, object]] = [
        put,
        put,
        {"op": "rollback", "name": "KEY", "version": 1},
        {"op": "rotate"},
        {"op": "recipient", "rotate": True},
        {"op": "verify"},
        {"op": "remove", "name": "KEY"},
        {"op": "reload"},
        {"op": "pending"},
    ]
    with served(home):
        for order in orders:
            assert operator.ask(home.sockets / "vault", order)["ok"], order


def test_no_vault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A home without a vault is a set-up fault with its command."""
    tmp_path.chmod(0o700)
    assert run_words(["--home", str(tmp_path), "vault", "doctor"]) == 78
    assert "ringfence vault init" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "mode", "fix"),
    [
        ("key", 0o640, "chmod 600"),
        ("secrets", 0o755, "chmod 700"),
        ("recipients", 0o602, "chmod 600"),
        ("", 0o750, "chmod 700"),
    ],
)
def test_vault_28_a_mode_that_drifted(
    home: Home, capfd: pytest.CaptureFixture[str], name: str, mode: int, fix: str
) -> None:
    """A file or folder that others can open is insecure, with the command that repairs it; then it is secure again."""
    path = home.vault / name
    right = path.stat().st_mode & 0o777
    path.chmod(mode)
    code, grade, lines = told(home, capfd)
    assert (code, grade) == (1, "insecure")
    assert f"{fix} {path}" in lines["files"]["fix"]
    path.chmod(right)
    assert told(home, capfd)[2]["files"]["grade"] == "secure"


def test_other_names_and_kinds(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """A second name of a file, a link in the vault and (as root) a foreign owner are found."""
    os.link(home.vault / "key", home.path / "kept")
    assert "2 names" in told(home, capfd)[2]["files"]["why"]
    (home.path / "kept").unlink()
    (home.vault / "extra").symlink_to("/etc/passwd")
    assert "neither file nor folder" in told(home, capfd)[2]["files"]["why"]
    (home.vault / "extra").unlink()
    if os.geteuid() == 0:
        os.chown(home.vault / "key", 4242, -1)
        assert "belongs to user 4242" in told(home, capfd)[2]["files"]["why"]


def test_keys(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a recovery key everything hangs on this host; one that lies here is weak."""
    (home.keys / brokers.RECOVERY_FILE).write_text("x")
    assert told(home, capfd)[2]["recovery key"]["grade"] == "weak"
    path = home.vault / "recipients"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    found = told(home, capfd)[2]["recovery key"]
    assert (found["grade"], "--recovery" in found["fix"]) == ("insecure", True)


def test_rules(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """A policy that gives all to all is weak; one that others can write, or that is not understood, is insecure."""
    path = home.path / "vault-policy.toml"
    owner = home.vault.stat().st_uid
    for text, mode, grade in (
        (OPEN_TO_ALL, 0o600, "weak"),
        (OPEN_TO_ALL, 0o622, "insecure"),
        ("odd", 0o600, "insecure"),
    ):
        path.write_text(text)
        os.chown(path, owner, -1)
        path.chmod(mode)
        found = told(home, capfd)[2]["policy"]
        assert (found["grade"], bool(found["fix"])) == (grade, True)
    path.write_text(OPEN_TO_ALL.replace('secrets = ["*"]', 'secrets = ["A"]'))
    assert told(home, capfd)[2]["policy"]["grade"] == "secure"


def test_a_changed_record(tmp_path: Path) -> None:
    """A line that was edited is found, and the line that says so names it."""
    keystore.create(tmp_path / "vault")
    with keystore.Keystore(tmp_path / "vault") as store, contextlib.closing(Folder(tmp_path / "vault")) as folder:
        record = Audit(folder, store.audit_seed())
        record.write("secret.put", name="A")
        record.close()
    log = tmp_path / "vault" / "audit.log"
    log.write_bytes(log.read_bytes().replace(b'"A"', b'"B"'))
    lines = {one.what: one for one in doctor.vault(tmp_path / "vault", tmp_path / "none", None, tmp_path / "vault")}
    assert lines["record"].grade == "insecure"
    assert "line 1" in lines["record"].why


def test_a_key_from_outside(tmp_path: Path) -> None:
    """A key that is handed over is secure, unless the old one stays in the vault, or what is handed over is no key."""
    keystore.create(tmp_path / "vault")
    path = tmp_path / "vault"

    def grade(source: hostkey.KeySource | None, *, handed: bool = False) -> str:
        found = doctor.vault(path, tmp_path / "none", source, path, handed=handed)
        return next(one.grade for one in found if one.what == "host key")

    given = hostkey.GivenKey((path / "key").read_bytes())
    assert [grade(None), grade(given), grade(hostkey.GivenKey(b"none"))] == ["weak", "weak", "insecure"]
    (path / "key").unlink()
    assert [grade(given), grade(None, handed=True)] == ["secure", "secure"]


@pytest.mark.parametrize(
    ("what", "broker", "scrubber", "told", "grade"),
    [
        ("broker", GOOD, SCRUB, {}, "secure"),
        ("broker", None, None, {}, "weak"),
        ("broker", replace(GOOD, filtered=False), SCRUB, {}, "insecure"),
        ("broker", replace(GOOD, no_new_privs=False), SCRUB, {}, "insecure"),
        ("broker", replace(GOOD, capabilities=1), SCRUB, {}, "insecure"),
        ("broker", GOOD, SCRUB, {"landlock": 0}, "weak"),
        ("user", GOOD, SCRUB, {}, "secure"),
        ("user", replace(GOOD, uid=AGENT), SCRUB, {}, "weak"),
        ("user", replace(GOOD, uid=0), SCRUB, {}, "weak"),
        ("memory", GOOD, SCRUB, {}, "secure"),
        ("memory", replace(GOOD, locked=False), SCRUB, {}, "weak"),
        ("memory", GOOD, SCRUB, {"dumpable": 1}, "insecure"),
        ("memory", GOOD, SCRUB, {"core_bytes": 1 << 40}, "insecure"),
        ("scrubber", GOOD, SCRUB, {}, "secure"),
        ("scrubber", GOOD, None, {}, "insecure"),
        ("scrubber", GOOD, replace(SCRUB, filtered=False), {}, "insecure"),
        ("scrubber", GOOD, replace(SCRUB, uid=OWN), {}, "weak"),
        ("scrubber", GOOD, SCRUB, {"scrubber_landlock": 0}, "weak"),
        ("reserve", GOOD, SCRUB, {}, "secure"),
        ("reserve", GOOD, SCRUB, {"reserve_bytes": 0}, "weak"),
    ],
)
def test_attack_07_what_the_processes_wear(
    what: str, broker: Process | None, scrubber: Process | None, told: dict[str, object], grade: str
) -> None:
    """Each wall that is missing costs a grade, and the line says what to do."""
    found = doctor.processes(broker, scrubber, TOLD | told, AGENT, swap=True)
    line = next(one for one in found if one.what == what)
    assert (line.grade, bool(line.fix)) == (grade, grade != "secure")


def test_the_worst_line_counts() -> None:
    """One insecure line makes the whole insecure; no line at all is no fault."""
    lines = [Finding("a", "secure", ""), Finding("b", "insecure", ""), Finding("c", "weak", "")]
    assert [doctor.worst(lines), doctor.worst(lines[:1]), doctor.worst([])] == ["insecure", "secure", "secure"]


def test_a_process_as_the_kernel_has_it() -> None:
    """Facts come from the kernel: this process is not filtered, one that has ended is none."""
    own = Process.of(os.getpid())
    assert own is not None
    assert (own.uid, own.filtered) == (os.geteuid(), seccomp_of(os.getpid()) == "2")
    with subprocess.Popen([sys.executable, "-c", ""]) as done:
        done.wait()
    assert Process.of(done.pid) is None


def seccomp_of(pid: int) -> str:
    """Return the kernel's word on a process's filters."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(row.split()[1] for row in rows if row.startswith("Seccomp:"))
