"""`ringfence vault` as its users see it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.cli.commands import run_words
from tests.support.fleet import CLI
from tests.vault.test_keystore import file_of


@pytest.fixture
def place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A home with a vault in it; its recovery key lies beside it."""
    assert run_words(["--home", str(tmp_path / "h"), "keys", "init"]) == 0
    capfd.readouterr()
    assert run_words(["--home", str(tmp_path / "h"), "vault", "init"]) == 0
    shown = capfd.readouterr().out.strip()
    assert shown.startswith("AGE-SECRET-KEY-")
    (tmp_path / "offline").write_text(shown)
    return tmp_path / "h"


def ran(place: Path, *words: str) -> int:
    """Run a vault command."""
    return run_words(["--home", str(place), "vault", *words])


def put(place: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Store a value from stdin."""

    class _Stdin(io.TextIOWrapper):
        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stdin", _Stdin(io.BytesIO(value.encode())))
    return ran(place, "set", name)


def test_set_list_rm(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What is set is listed by name, never by value, until it is removed."""
    assert put(place, "KEY", "canary\n", monkeypatch) == 0
    assert put(place, "KEY", "canary-2\n", monkeypatch) == 0
    assert ran(place, "list", "--json") == 0
    assert json.loads(capfd.readouterr().out) == [{"name": "KEY", "versions": [1, 2]}]
    assert ran(place, "rollback", "KEY", "1") == 0
    assert ran(place, "rm", "KEY") == 0
    assert ran(place, "list") == 0
    out = capfd.readouterr()
    assert "canary" not in out.out + out.err
    assert "KEY" not in out.out


def test_audit_says_what_was_done(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every change is a line of the record; the printed end is an anchor that a cut record fails."""
    put(place, "KEY", "value", monkeypatch)
    ran(place, "rotate")
    capfd.readouterr()
    assert ran(place, "audit", "--json") == 0
    out = capfd.readouterr()
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.out.splitlines()]
    assert [line["event"] for line in lines] == ["vault.made", "secret.put", "vault.rotated"]
    anchor = out.err.split()[-1]
    log = place / "vault" / "audit.log"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    assert ran(place, "audit") == 0
    assert ran(place, "audit", "--anchor", anchor) == 78
    assert "anchored line 3" in capfd.readouterr().err


def test_audit_verifies_and_follows(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """--verify prints the end alone; --follow each line as it is written, and the end at Ctrl-C; not both."""
    assert ran(place, "audit", "--verify", "--follow") == 2
    capfd.readouterr()
    assert ran(place, "audit", "--verify") == 0
    out = capfd.readouterr()
    assert (out.out, out.err.split()[1:4]) == ("", ["1", "lines,", "unchanged;"])
    words = [*CLI, "--home", str(place), "vault", "audit", "--follow", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "vault.made"
            put(place, "KEY", "canary", monkeypatch)
            line = process.stdout.readline()
            assert json.loads(line)["event"] == "secret.put"
            assert "canary" not in line
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "2 lines, unchanged; end 2:" in told


def test_restore_on_another_host(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy without the host's key opens with the recovery key, and then with a key of its own."""
    put(place, "KEY", "value", monkeypatch)
    (place / "vault" / "key").unlink()
    assert ran(place, "list") == 78
    assert "vault restore" in capfd.readouterr().err
    assert ran(place, "restore", "--recovery", str(tmp_path / "offline")) == 0
    assert ran(place, "list") == 0


@pytest.mark.parametrize(("words", "code"), [(["set", "../key"], 2), (["rm", "NONE"], 78), (["init"], 2)])
def test_wrong_words(place: Path, words: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A name that can't be, one that isn't there and a second vault are told apart from success."""
    assert ran(place, *words) == code
    assert capfd.readouterr().err


def test_a_drifted_vault_says_the_fix(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A key that others can read stops every command; the message is the command that repairs it."""
    put(place, "KEY", "value", monkeypatch)
    (place / "vault" / "key").chmod(0o644)
    assert ran(place, "list") == 78
    assert f"chmod 600 {place / 'vault' / 'key'}" in capfd.readouterr().err
    assert file_of(place / "vault", "KEY", 1).stat().st_mode & 0o777 == 0o600
