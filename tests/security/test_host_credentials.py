"""The agent's own credentials and sockets (A-I05, A-I09): nothing of them is in a job, and no path is too long in one.

Stopped by an environment of listed names alone, a view without the home, hidden processes, and the socket rules.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator

import pytest

from runner.grants import Grants
from tests.containment.rig import python
from tests.support import scratch
from tests.support.fleet import CLI
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

LOOK = r"""
import glob, os, socket, sys
home, store, mark = sys.argv[1], sys.argv[2], "".join(sys.argv[3:5])
print("names", "+".join(sorted(os.environ)))
text = b""
for name in ("environ", "cmdline", "mountinfo", "status", "maps", "stat", "cgroup"):
    for path in glob.glob("/proc/[0-9]*/" + name) + glob.glob("/proc/[0-9]*/task/*/" + name):
        try: text += open(path, "rb").read()
        except OSError: pass
text += repr(dict(os.environ)).encode()
print("marks", text.count(mark.encode()))
opened = []
for place, _, files in os.walk(home): opened += files
for name in ("keys/client.key", "client.json", "trust.toml", "policy.toml", "keys", "s", "."):
    try: os.close(os.open(f"{home}/{name}", os.O_RDONLY)); opened.append(name)
    except OSError: pass
print("opened", len(opened))
reached = 0
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for path in (store, *glob.glob(home + "/s/*"), f"{home}/s/ctl"):
        try: socket.socket(socket.AF_UNIX, kind).connect(path); reached += 1
        except OSError: pass
print("reached", reached)
print("processes", len(glob.glob("/proc/[0-9]*")))
"""


CANARY = secrets.token_hex(12)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One agent whose environment holds what no job may see."""
    with rigged(slots=1, real=True) as found:
        found.start(
            "one",
            AWS_SECRET_ACCESS_KEY=CANARY,
            SOPS_AGE_KEY_FILE=f"/root/{CANARY}",
            GITHUB_TOKEN=CANARY,
            PYTHONPATH=f"/nowhere/{CANARY}",
        )
        # The connections that a test would leave open are opened here.
        job = found.app.command(["echo", "}"])
        found.wait_output(job, "}")
        yield found


def test_i05_nothing_of_the_agents_credentials_is_in_a_job(rig: Rig) -> None:
    """Neither a secret of its environment, nor its keys, settings, sockets or store, with and without a path grant."""
    # In two halves, or the search would find its own argument.
    words = [*python(LOOK), str(rig.home), str(rig.store.socket), CANARY[:12], CANARY[12:]]
    for grants in (None, Grants(read=(str(rig.work),))):
        told = _told(rig, words, grants)
        names = set(told["names"].split("+"))
        listed = {"HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "LC_CTYPE"}
        assert {name for name in names - listed if not name.startswith("RINGFENCE_")} == set()
        assert (told["marks"], told["opened"], told["reached"]) == ("0", "0", "0"), told
        assert int(told["processes"]) <= 2, "the mould and the job"


def _told(rig: Rig, words: list[str], grants: Grants | None) -> dict[str, str]:
    job = rig.app.command(words) if grants is None else rig.app.command(words, grants=grants)
    rig.wait_state(job, "finished", "failed", "refused")
    wait_until(lambda: "processes" in rig.logs(job), f"the output of {job.id}: {rig.logs(job)}")
    return dict(line.split(" ", 1) for line in rig.logs(job).splitlines())


MANAGER = r"""
import multiprocessing, os, tempfile
manager = multiprocessing.get_context("fork").Manager()
shared = manager.dict(a=1)
print(dict(shared), tempfile.gettempdir(), len(os.environ["RINGFENCE_JOB"]))
manager.shutdown()
"""


def test_i09_a_home_with_a_path_too_long_is_refused_by_name() -> None:
    """The agent does not start on it: it names the path, its length, the limit, and what to do."""
    with scratch.folder() as folder:
        home = folder / ("long" * 35)
        done = subprocess.run(
            [*CLI, "--home", str(home), "up"], capture_output=True, text=True, check=False, timeout=40, cwd="/"
        )
        assert done.returncode == 78, done
        assert str(home) in done.stderr
        assert "100 are possible" in done.stderr
        assert "shorter home" in done.stderr


def test_i09_a_job_has_short_paths_for_its_sockets(rig: Rig) -> None:
    """A manager of multiprocessing, which has a socket below TMPDIR, works whatever the node's home is called."""
    job = rig.app.command(python(MANAGER))
    rig.wait_state(job, "finished", "failed", "refused")
    wait_until(lambda: "}" in rig.logs(job), "its output")
    assert rig.logs(job).startswith("{'a': 1} /tmp "), rig.logs(job)
