"""A fleet of two nodes, a coding agent, a runaway that is killed with proof, and a refusal. Run by `make demo`.

Works as root and as an ordinary user, needs no network and ends by itself. Everything it makes lies in one temporary
folder, which is gone afterwards.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RINGFENCE = (sys.executable, "-I", "-m", "runner.cli")
AGENT_ENVIRONMENT = HERE.parent / ".venv-demo"
READY_S = 60.0
STEP_S = 60.0
RUNAWAYS = 4
#: What the agent prints around its steps; left out to keep the demo short.
CHATTER = ("<", "System:", "User:", "You fix code.", "Warning:", "Building agent", "Exit:", "Saved trajectory")
#: Temporary folders with longer names leave no room for the sockets of a home.
LONGEST_TMP = 60
QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


@dataclass(frozen=True)
class Fleet:
    """A running `ringfence up` and the folders of this demo."""

    folder: Path
    home: Path
    repository: Path
    program: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command of Ringfence to its end and return what it printed."""
        return subprocess.run(
            [*RINGFENCE, "--home", str(self.home), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
            check=False,
        )

    def stream(self, *words: str) -> int:
        """Run one command of Ringfence, print its lines as they come, return its exit code."""
        with subprocess.Popen(
            [*RINGFENCE, "--home", str(self.home), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                show(line)
            return process.wait(STEP_S)


def main() -> int:
    """Show it all; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="rf-demo-", dir=short_tmp()) as name:
        folder = Path(name)
        folder.chmod(0o711)
        fleet = Fleet(folder, folder / "home", folder / "repository", folder / "program")
        prepare(fleet)
        started = time.monotonic()
        with up(fleet):
            step(f"A fleet of two nodes is up after {time.monotonic() - started:.1f} s.")
            for line in fleet.run("nodes").stdout.splitlines():
                show(line)
            work(fleet)
            stop(fleet)
            refuse(fleet)
    step("Done: the fleet is down, and the demo's folder is gone.")
    return 0


def work(fleet: Fleet) -> None:
    """Let an unmodified coding agent fix a repository that it is granted."""
    step("1. A coding agent (mini-swe-agent, unmodified, scripted model) fixes a repository that it is granted:")
    code = fleet.stream(*agent_words(fleet))
    fixed = (fleet.repository / "calc.py").read_text().splitlines()[-1].strip()
    expect(code == 0 and fixed == "return a + b", f"the agent should have fixed calc.py (exit code {code}, {fixed!r})")
    step(f"   exit code {code}; on the host calc.py now says: {fixed}")


def agent_words(fleet: Fleet) -> tuple[str, ...]:
    """Return the command that runs the agent as a job, with exactly what it needs."""
    tools = AGENT_ENVIRONMENT / "bin"
    settings = {
        "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin",
        "MSWEA_GLOBAL_CONFIG_DIR": "/work/mini",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    grants = ("--write", str(fleet.repository), "--read", str(fleet.program), "--read", str(AGENT_ENVIRONMENT))
    variables = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    command = (
        str(tools / "mini"),
        "-c",
        str(fleet.program / "agent.yaml"),
        "-t",
        "fix add",
        "-y",
        "--exit-immediately",
    )
    return ("run", *grants, "--cwd", str(fleet.repository), *variables, "--", *command)


def stop(fleet: Fleet) -> None:
    """Kill a tree of processes that resists, from another process, and look for survivors in the host's /proc."""
    step("2. A runaway ignores signals, forks twice and detaches; it is killed from here:")
    mark = f"runaway-{secrets.token_hex(4)}"
    program = str(fleet.program / "runaway.py")
    job = fleet.run("run", "--detach", "--read", str(fleet.program), "--", "python3", program, mark).stdout.strip()
    deadline = time.monotonic() + STEP_S
    while "try to stop us" not in fleet.run("logs", job).stdout and time.monotonic() < deadline:
        time.sleep(0.02)
    # The one that forks twice has a process more for a moment.
    while (count := processes(mark)) != RUNAWAYS and time.monotonic() < deadline:
        time.sleep(0.02)
    step(f"   job {job} has {count} processes, seen in the host's /proc")
    killed = fleet.run("kill", job, "--reason", "demo")
    show(killed.stdout)
    left = processes(mark)
    expect(count == RUNAWAYS and killed.returncode == 0 and left == 0, f"{count} processes, {left} of them left")
    step(f"   exit code {killed.returncode}; left in the host's /proc: {left}")


def refuse(fleet: Fleet) -> None:
    """Ask for what policy does not allow."""
    step("3. A job asks for a path that the nodes' policy does not allow:")
    code = fleet.stream("run", "--read", "/etc", "--", "cat", "/etc/shadow")
    expect(code == 125, f"the job should have been refused, the exit code is {code}")
    step(f"   exit code {code}: refused before a byte of it ran")


def prepare(fleet: Fleet) -> None:
    """Make the repository, and copy the programs that jobs may read."""
    shutil.copytree(HERE / "repository", fleet.repository)
    fleet.program.mkdir()
    for name in ("agent.yaml", "runaway.py"):
        shutil.copy(HERE / name, fleet.program)
    author = ("-c", "user.name=demo", "-c", "user.email=demo@localhost")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "Start")):
        subprocess.run(["git", *words], cwd=fleet.repository, env={**os.environ, **QUIET}, check=True)  # noqa: S607 - the git of this PATH


@contextmanager
def up(fleet: Fleet) -> Iterator[None]:
    """Run the fleet while the block runs; its log is shown only if it does not come up."""
    log = fleet.folder / "up.log"
    allowed = [word for path in (fleet.repository, fleet.program, AGENT_ENVIRONMENT) for word in ("--allow", str(path))]
    words = [*RINGFENCE, "--home", str(fleet.home), "up", "--nodes", "2", "--slots", "2", *allowed]
    with log.open("wb") as file, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                sys.stderr.write(log.read_text(errors="replace"))
                raise SystemExit("the fleet did not come up: run `.venv/bin/ringfence doctor`")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(READY_S)


def processes(mark: str) -> int:
    """Return how many processes of this host have ``mark`` among their arguments and still run."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            count += mark.encode() in words and b"--detach" not in words
    return count


def short_tmp() -> str:
    """Return the folder for temporary files, or /tmp if its name is too long for sockets below it."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST_TMP else "/tmp"  # noqa: S108 - TemporaryDirectory makes names


def expect(condition: bool, message: str) -> None:
    """End the demo with a message unless what it shows is true."""
    if not condition:
        raise SystemExit(f"demo: {message}")


def step(text: str) -> None:
    """Print one line of the demo's own."""
    print(text, flush=True)


def show(lines: str | Sequence[str]) -> None:
    """Print lines of a command, indented, without empty ones, rulers and chatter."""
    for line in lines.splitlines() if isinstance(lines, str) else lines:
        if line.strip(" ─\n") and not line.startswith(CHATTER):
            print(f"   | {line.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
