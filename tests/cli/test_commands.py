"""The command line without a fleet: words, errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.cli.commands import LATER, run_words
from tests.support.fleet import CLI

SLOWEST_HELP_S = 1.0


def ran(*words: str) -> int:
    """Run a command line in this process and return its exit code."""
    return run_words(list(words))


@pytest.mark.parametrize("command", sorted(LATER))
def test_later_commands_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A designed command that has not landed exits 2 and is never taken for a misspelling."""
    assert ran("--home", "/tmp/x", command, "words") == 2
    assert f"{command}: not in this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["kill"],
        ["kill", "main-01hzzzzzzzzzzzzzzzzzzzzzzz", "--all"],
        ["kill", "--all", "--tag", "a=b"],
        ["kill", "--wait", "-1", "--all"],
        ["run"],
        ["run", "--detach", "--json", "--", "true"],
        ["run", "--tool", "a b", "--", "true"],
        ["run", "--spawn", "0", "--", "true"],
        ["run", "--memory", "much", "--", "true"],
        ["call", "m:t", "--arg", "word"],
        ["show", "no job"],
        ["up", "--nodes", "0"],
        ["up", "--allow", "/no/such/path"],
        ["up", "--import", "no_such_module_at_all"],
        ["up", "--policy", "/no/such/policy"],
        ["bogus"],
        ["--no-such-option"],
    ],
)
def test_wrong_words_exit_2(words: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Usage errors exit 2 with a message, and make nothing."""
    assert ran("--home", str(home / "h"), *words) == 2
    assert capsys.readouterr().err
    assert not (home / "h").exists()


@pytest.mark.parametrize("words", [["ps"], ["run", "--", "true"], ["kill", "--all"], ["nodes"], ["events"]])
def test_a_home_without_a_fleet_exits_78(words: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the next step."""
    assert ran("--home", str(home / "h"), *words) == 78
    assert "ringfence up" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [(["ps"], 1), (["run", "--", "true"], 125), (["kill", "--all"], 3)])
def test_a_store_that_is_away_is_no_success(
    words: list[str], code: int, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` says infrastructure, `kill` says unconfirmed; a password in the URL is not shown."""
    place = home / "h"
    assert ran("--home", str(place), "--redis", f"unix://:hushhush@{home}/nothing.sock", "keys", "init") == 0
    assert ran("--home", str(place), *words) == code
    out, err = capsys.readouterr()
    assert "hushhush" not in out + err


def test_home_and_store_may_stand_on_both_sides(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before or after the command; two different values are an error."""
    assert ran("keys", "init", "--home", str(home / "h"), "--json") == 0
    after = json.loads(capsys.readouterr().out)
    assert ran("--home", str(home / "h"), "keys", "show", "--json") == 0
    assert json.loads(capsys.readouterr().out) == after
    assert ran("--home", str(home / "h"), "keys", "show", "--home", str(home / "other")) == 2


def test_keys_from_init_to_revoke(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are made once, trusted with rights, and revoked for ever; no private half is shown."""
    place = str(home / "h")
    assert ran("--home", place, "keys", "init") == 0
    key = "ab" * 32
    capsys.readouterr()
    trust = ("keys", "trust", key, "--may", "kill", "--tenant", "acme", "--json")
    assert ran("--home", place, *trust) == 0
    (view,) = json.loads(capsys.readouterr().out)
    assert (view["may"], view["tenants"], view["revoked"]) == (["kill"], ["acme"], False)
    assert ran("--home", place, "keys", "revoke", view["id"]) == 0
    assert ran("--home", place, *trust) == 78
    assert ran("--home", place, "keys", "card", "node-1") == 0
    out = capsys.readouterr().out
    private = (home / "h" / "keys" / "client.key").read_text().split()[-1]
    assert private not in out
    assert (home / "h" / "keys" / "node-node-1.card").exists()


def test_help_is_quick_and_loads_no_queue(home: Path) -> None:
    """Help for people who wait for it: no rq, redis or pydantic is loaded."""
    code = (
        "import sys; from runner.cli.commands import run_words; run_words(['--help']);"
        "print([name for name in ('rq', 'redis', 'pydantic') if name in sys.modules])"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - start < SLOWEST_HELP_S


def test_output_into_a_closed_pipe_is_no_traceback(home: Path) -> None:
    """`ringfence … | head` ends quietly."""
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(CLI)} --help | true"], capture_output=True, text=True, check=False, timeout=30
    )
    assert "Traceback" not in done.stderr
