"""A fleet of two nodes, a coding agent, a runaway killed with proof, a refusal, a secret in use. Run by `make demo`.

Works as root and as an ordinary user, needs no network and ends by itself. Everything it makes lies in one temporary
folder, which is gone afterwards.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

HERE = Path(__file__).resolve().parent
RINGFENCE = (sys.executable, "-I", "-m", "runner.cli")
AGENT_ENVIRONMENT = HERE.parent / ".venv-demo"
READY_S = 60.0
STEP_S = 60.0
RUNAWAYS = 4
#: A job that proves the secret in its variable TOKEN without showing it, shows it all the same, and stays for a while.
PROVER = """
import hashlib, hmac, os, sys, time
print("proof", hmac.new(os.environb[b"TOKEN"], sys.argv[1].encode(), hashlib.sha256).hexdigest())
print("and shown:", os.environ["TOKEN"], flush=True)
time.sleep(60)
"""
PLACES = ("the store", "the fleet's files and logs", "the process list", "the agents' memory")
READ: dict[bytes, Callable[[Redis, bytes], object]] = {
    b"string": lambda store, key: store.get(key),
    b"hash": lambda store, key: store.hgetall(key),
    b"list": lambda store, key: store.lrange(key, 0, -1),
    b"set": lambda store, key: store.smembers(key),
    b"zset": lambda store, key: store.zrange(key, 0, -1),
    b"stream": lambda store, key: store.xrange(key),
}
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

    def run(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run one command of Ringfence to its end, ``given`` on its stdin, and return what it printed."""
        return subprocess.run(
            [*RINGFENCE, "--home", str(self.home), *words],
            input=given,
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
            keep(fleet)
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


def keep(fleet: Fleet) -> None:
    """Let a job use a secret, and look for it, while the job runs, where a queue's secrets usually are."""
    step("4. A job uses a secret that was stored by `vault set` from stdin; meanwhile it is looked for:")
    value, word = f"canary-{secrets.token_hex(12)}", f"public-{secrets.token_hex(4)}"
    stored = fleet.run("vault", "set", "DEMO", given=value)
    job = fleet.run("run", "--detach", "--secret", "DEMO:env=TOKEN", "--", "python3", "-c", PROVER, word).stdout.strip()
    proof = hmac.new(value.encode(), word.encode(), "sha256").hexdigest()
    deadline = time.monotonic() + STEP_S
    while "and shown:" not in (told := fleet.run("logs", job).stdout) and time.monotonic() < deadline:
        time.sleep(0.02)
    expect(stored.returncode == 0 and f"proof {proof}" in told, f"the job should have proved the secret: {told}")
    show(told.replace(proof, f"{proof[:16]}… (right)"))
    expect(value not in told, "the job's output shows the secret")
    public = dict.fromkeys(PLACES, False)
    for place, data in places(fleet):
        expect(value.encode() not in data, f"the secret is in {place}")
        public[place] |= word.encode() in data or job.encode() in data
    fleet.run("kill", job)
    if not memory_readable(fleet):
        step(f"   ({PLACES[-1]} is closed to this user on this host: not looked at)")
        del public[PLACES[-1]]
    expect(all(public.values()), f"the search should find the job's public words everywhere: {public}")
    step(f"   the secret's value: not in {', '.join(public)}")
    step("   the job's public words, its argument and its id: found in each of them by the same search")


def places(fleet: Fleet) -> Iterator[tuple[str, bytes]]:
    """Yield what each of PLACES holds, in pieces."""
    dump, files, listed, agents = PLACES
    with Redis.from_url(json.loads((fleet.home / "client.json").read_text())["redis_url"]) as store:
        for key in store.scan_iter(count=1000):
            yield dump, b"%b = %b" % (key, repr(READ[store.type(key)](store, key)).encode())
    for path in fleet.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield files, path.read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield listed, (entry / "cmdline").read_bytes()
    for process in agents_of(fleet):
        with suppress(PermissionError):
            yield from ((agents, part) for part in memory_of(process))


def agents_of(fleet: Fleet) -> list[Path]:
    """Return the /proc folders of the fleet's node agents."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"node_agent" in words and bytes(fleet.home) in words:
                found.append(entry)
    return found


def memory_readable(fleet: Fleet) -> bool:
    """Return whether this user may read the memory of every node agent: some hosts keep it from all but root."""
    try:
        for process in agents_of(fleet):
            (process / "mem").open("rb", 0).close()
    except PermissionError:
        return False
    return True


def memory_of(process: Path) -> Iterator[bytes]:
    """Yield what a process has in memory that it can write."""
    with (process / "maps").open("rb") as maps, (process / "mem").open("rb", 0) as memory:
        for line in maps:
            where, rights = line.split()[:2]
            start, end = (int(part, 16) for part in where.split(b"-"))
            if rights.startswith(b"rw"):
                memory.seek(start)
                with suppress(OSError):
                    yield memory.read(end - start)


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
