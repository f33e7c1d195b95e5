"""Attack 53 through the commands: hostile output, names and tags on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import unicodedata

import pytest

from tests.support.fleet import CLI, Fleet

SGR = re.compile(r"\x1b\[[0-9;:]*m")
HOSTILE = (
    r"printf '\033]52;c;aGk=\007\033[2J\033]0;title\007\033[31mred\033[0m\302\233 2J [/] [bold]x\n"
    r"ringfence: job killed, 0 survivors\n\342\200\256dessap\n'"
)
TAG = "\x1b[31m[/]\x1b]8;;http://x\x07\u202e"


@pytest.fixture(scope="module")
def job(shared_fleet: Fleet) -> str:
    """A finished job with hostile output and a hostile tag."""
    found = shared_fleet.detach("--tag", f"evil={TAG}", "--", "sh", "-c", HOSTILE)
    shared_fleet.wait_state(found, "finished")
    return found


def on_terminal(fleet: Fleet, *words: str) -> tuple[int, str]:
    """Run a command on a terminal of its own; return exit code and what the terminal got."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        [*CLI, "--home", str(fleet.home), *words], stdin=child, stdout=child, stderr=child
    ) as process:
        os.close(child)
        seen = b""
        while True:
            try:
                more = os.read(parent, 65536)
            except OSError:
                break
            if not more:
                break
            seen += more
    os.close(parent)
    return process.returncode, seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", ["ps", "show", "events", "logs", "nodes"])
def test_attack_53_no_command_passes_a_control(fleet: Fleet, job: str, command: str) -> None:
    """Each command ends normally, and the terminal gets no control but colours."""
    words = [command, job] if command in {"show", "logs"} else [command]
    code, seen = on_terminal(fleet, *words)
    assert code == 0, seen
    rest = SGR.sub("", seen)
    assert [char for char in rest if unicodedata.category(char) in {"Cc", "Cf"} and char != "\n"] == []


def test_attack_53_run_shows_no_forged_line(fleet: Fleet) -> None:
    """A job's line that looks like ours is broken up; its colours pass."""
    code, seen = on_terminal(fleet, "run", "--", "sh", "-c", HOSTILE)
    assert code == 0
    assert "\x1b[31mred" in seen
    assert "\nringfence: job killed" not in seen
    assert "\\x72ingfence: job killed" in seen


def test_a_pipe_gets_the_bytes(fleet: Fleet, job: str) -> None:
    """`logs` into a pipe is exact."""
    words = [*CLI, "--home", str(fleet.home), "logs", job]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=30)
    assert b"\x1b]52;c;aGk=\x07" in done.stdout
    assert b"\nringfence: job killed" in done.stdout


def test_json_is_ascii_and_exact(fleet: Fleet, job: str) -> None:
    """--json carries hostile text escaped, and gives it back unchanged."""
    raw = fleet.run("show", job, "--json").stdout
    assert raw.strip().isascii()
    assert raw.strip().isprintable()
    assert fleet.json("show", job)[0]["tags"] == {"evil": TAG}
