"""Ordinary programs do their work inside a job, with the right exit code and output, at this user's level."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.fleet import Fleet
from tests.toolchains.goods import PROGRAMS

#: Installers and compilers, on a machine that may do other things besides.
RUN_S = 110
pytestmark = pytest.mark.timeout(RUN_S + 10)


def run(fleet: Fleet, program: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run one of the programs in a job; it sees the programs and nothing else of the granted folder."""
    path = fleet.work / "programs" / program
    job = ["run", "--read", str(path.parent), *options, "--", shell_of(program), str(path), *words]
    return fleet.run(*job, timeout_s=RUN_S)


def shell_of(program: str) -> str:
    """Return what runs a program."""
    return "bash" if program.endswith(".sh") else sys.executable


def need(*tools: str) -> None:
    """Skip a test whose tools this machine lacks."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")


def works(done: subprocess.CompletedProcess[str], word: str) -> None:
    """The program went to its end."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == word


def test_a_shell_without_a_terminal(fleet: Fleet) -> None:
    """bash with pipes, job control, traps, here-documents and the usual small programs."""
    need("bash")
    works(run(fleet, "shell.sh"), "shell ok")


def test_the_place_is_what_programs_expect(fleet: Fleet) -> None:
    """HOME, TMPDIR, user, UTF-8 locale; input at its end, no terminal, and `bash -i` says so and works."""
    need("bash", "getent")
    done = run(fleet, "place.sh")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split("=", 1) for line in done.stdout.splitlines())
    expected = {"home": "/work", "cwd": "/work", "tmp": "/tmp", "user": "job/job", "lang": "1", "utf8": "1"}
    expected |= {"stdin": "0", "terminal": "no", "tty": "no", "interactive": "works", "getent": "/work"}
    assert facts == expected


def test_copies_keep_modes_times_and_links(fleet: Fleet) -> None:
    """tar, cp -a, install, mv, sed -i and rsync (where it is) keep what they should."""
    need("bash", "tar")
    works(run(fleet, "files.sh"), "files ok")


def test_git_clones_through_a_read_grant(fleet: Fleet) -> None:
    """A local repository is cloned, changed, merged, pushed and cleaned up."""
    need("git")
    source = str(fleet.work / "repository")
    works(run(fleet, "git.sh", source, options=("--read", source)), "git ok")


def test_a_compiler_and_make(fleet: Fleet) -> None:
    """A threaded program with a shared library is built by make -j2 and runs from the workspace."""
    need("cc", "make")
    works(run(fleet, "build.sh"), "build ok")


def test_openssl_and_sqlite(fleet: Fleet) -> None:
    """Keys, certificates, signatures; a database with a write-ahead log."""
    need("openssl", "sqlite3")
    works(run(fleet, "crypto.sh"), "crypto ok")


def test_python_with_all_that_it_uses(fleet: Fleet) -> None:
    """Threads, pools, semaphores, shared memory, asyncio, children, sockets, sqlite, machine code."""
    works(run(fleet, "parts.py"), "parts ok")


@pytest.mark.parametrize(("program", "word"), [("parts.py", "parts ok"), ("others.sh", "others ok")])
def test_a_job_without_path_grants_has_unix_sockets_too(fleet: Fleet, program: str, word: str) -> None:
    """Unix sockets, the fork server, gpg's agent; and perl, java, cmake, archives and other tools that are here."""
    text = (PROGRAMS / program).read_text()
    start = 'printf "%s" "$1" >program && exec "$2" program unix'
    works(fleet.run("run", "--", "sh", "-c", start, "sh", text, shell_of(program), timeout_s=RUN_S), word)


def test_pip_installs_from_a_folder(fleet: Fleet) -> None:
    """A new environment, and a package from an index folder behind a read grant, without a network."""
    need("python3")
    wheels = str(fleet.work / "wheels")
    works(run(fleet, "pip.sh", wheels, options=("--read", wheels)), "pip ok")


def test_npm_installs_from_a_tarball(fleet: Fleet) -> None:
    """npm takes a package from behind a read grant; node runs it with workers, children and sockets."""
    need("node", "npm")
    package = str(fleet.work / "ringed-1.0.0.tgz")
    works(run(fleet, "npm.sh", package, options=("--read", package)), "npm ok")


def test_pytest_with_two_workers(fleet: Fleet) -> None:
    """pytest -n 2 runs a test folder inside a job."""
    if find_spec("xdist") is None:
        pytest.skip("this environment has no pytest-xdist")
    works(run(fleet, "pytest.sh", sys.executable), "pytest ok")
