"""What went wrong for others with secrets, sockets and neighbours, tried on a fleet (scenarios A-S, A-I);
and what the fleet does while its broker is away, or while a secret waits for a person (DESIGN §6).
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import cast

import pytest
import redis

from broker.vault import operator
from runner import Grants, Secret, keyring
from runner.home import Home
from runner.job import Job
from tests.e2e.test_secrets import daemon
from tests.support import scratch
from tests.support.fleet import CLI
from tests.support.wait import wait_until
from tests.vault.site import Site, standing

PROGRAMS = Path(__file__).parent / "programs"
CANARY = "canary" + secrets.token_hex(10)
CLOUD = "cloud" + secrets.token_hex(10)
LINES = "\n".join(["-----BEGIN KEY-----", *(secrets.token_hex(20) for _ in range(3)), "-----END KEY-----"])
TEXT = json.dumps({"token": "t" + secrets.token_hex(9), "path": 'a"b\\c'})
RULES = """
version = 1
[[allow]]
secrets = ["KEY", "LINES", "TEXT", "SHORT"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
modes = ["get", "env", "file"]
[[allow]]
secrets = ["ASKED"]
tenants = ["*"]
commands = ["*"]
modes = ["get", "env"]
approve = true
"""
KEY = Secret("KEY", env="K")
ASKED = Secret("ASKED", env="T")
#: Reads whatever of other processes /proc and shared folders show, as a neighbour would.
NOSE = r"""
import os
from pathlib import Path
own = os.getpid()
seen = [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, own)]
print("others", len(seen))
for pid in os.listdir("/proc"):
    if not pid.isdigit() or int(pid) == own:
        continue
    names = ["environ", "cmdline", "maps"] + [f"task/{t}/environ" for t in os.listdir(f"/proc/{pid}/task")]
    for name in names:
        try:
            print(Path(f"/proc/{pid}/{name}").read_bytes().decode("latin-1"))
        except OSError:
            pass
for folder in ("/tmp", "/dev/shm", "/work", "/run/secrets", "/run"):
    for path in Path(folder).rglob("*"):
        try:
            print(path, path.read_bytes()[:4096].decode("latin-1") if path.is_file() else "")
        except OSError:
            pass
print(dict(os.environ))
"""
#: Tries each local way out of a sandbox; prints those that worked.
WAYS_OUT = r"""
import os, socket, sys
for path in sys.argv[2:]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
            with socket.socket(socket.AF_UNIX, kind) as end:
                end.connect(path)
                print("OUT", path)
        except OSError:
            pass
try:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect("\0" + sys.argv[1])
        print("OUT abstract")
except OSError:
    pass
for port in (6379, 2375, 22):
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            print("OUT", port)
    except OSError:
        pass
for program in ("systemd-run --user true", "tmux -L x new -d", "docker ps", "podman --remote ps"):
    if os.system(program + " >/dev/null 2>&1") == 0:
        print("OUT", program)
print("tried")
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A fleet whose own environment holds what no job may see."""
    values = {"KEY": CANARY, "LINES": LINES, "TEXT": TEXT, "SHORT": "a", "ASKED": "value-of-asked"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUD_SECRET_KEY", CLOUD)
        with standing(values, RULES, "--import", f"failing:{PROGRAMS}") as found:
            yield found


def everywhere(site: Site, *jobs: Job[object] | Job[None]) -> str:
    """Return all that is kept or shown of a fleet: store, files, logs, events, jobs, and what the command line says."""
    client = redis.Redis.from_url(keyring.load_client(Home(site.fleet.home)).redis_url)
    with client:
        texts = [repr((key, _value(client, key))) for key in client.scan_iter(count=1000)]
    for path in site.fleet.home.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.name != "audit.reserve":
                texts.append(path.read_bytes().decode("latin-1"))
    texts += [repr(list(site.app.events())), repr(site.app.jobs()), site.fleet.log.read_text(errors="replace")]
    texts += [repr((one.status(), list(one.logs()))) for one in jobs]
    return "\n".join(texts)


def _value(client: redis.Redis, key: bytes) -> object:
    kind = cast("bytes", client.type(key))
    if kind == b"list":
        return client.lrange(key, 0, -1)
    if kind == b"zset":
        return client.zrange(key, 0, -1)
    reader = {b"string": client.get, b"hash": client.hgetall, b"set": client.smembers, b"stream": client.xrange}
    return reader[kind](key)  # type: ignore[operator]  # redis-py's own types differ by command


def test_scenario_a_s01_nowhere_in_stores_and_lists(site: Site) -> None:
    """A-S01: in success, failure, retry and kill the value is in no argument, store, log, event or process list."""
    done = site.command("sh", "-c", 'test -n "$K"', secrets=[KEY])
    failed = site.command("sh", "-c", 'echo "got $K"; exit 3', secrets=[KEY], retries=1)
    held = site.command("sh", "-c", "exec sleep 60", secrets=[KEY])
    site.wait(held.id, "running")
    arguments = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                arguments.append((entry / "cmdline").read_bytes())
    assert not any(CANARY.encode() in words for words in arguments)
    assert held.kill().survivors == 0
    site.wait(done.id, "finished")
    assert site.wait(failed.id, "failed").attempt == 2
    text = everywhere(site, done, failed, held)
    assert "got [secret:KEY]" in text
    assert CANARY not in text
    password = urllib.parse.urlsplit(keyring.load_client(Home(site.fleet.home)).redis_url).password
    shown = [site.fleet.run(*words) for words in (("nodes",), ("vault", "audit"))]
    assert not any(CANARY in one.stdout + one.stderr for one in shown)
    assert password is None or not any(password in one.stdout + one.stderr for one in shown)
    plain = site.fleet.run("run", "--detach", "--env", "API_KEY=in-the-open", "--", "true")
    assert "warning: env/API_KEY: looks like a secret" in plain.stderr
    assert "in-the-open" not in plain.stdout + plain.stderr


def test_scenario_a_s02_forms_of_a_value(site: Site) -> None:
    """A-S02: no documented form of a value can be read in the log; a text with a short secret in it stays readable."""
    forms = [
        CANARY,
        CANARY.encode().hex(),
        urllib.parse.quote(TEXT),
        json.dumps(LINES),
        shlex.quote(CANARY),
        LINES,
        TEXT,
    ]
    forms += [base64.b64encode(b"xyz"[:n] + CANARY.encode() + b"\n").decode() for n in range(3)]
    program = (
        "import base64, json, os, shlex, urllib.parse; k, m, t = (os.environ[n] for n in 'KMT'); "
        "print(k, k.encode().hex(), urllib.parse.quote(t), json.dumps(m), shlex.quote(k), t); print(m); "
        "[print(base64.b64encode(b'xyz'[:n] + k.encode() + b'\\n').decode()) for n in range(3)]; "
        "print(base64.encodebytes(k.encode()).decode()); print('banana {}')"
    )
    held = [KEY, Secret("LINES", env="M"), Secret("TEXT", env="T"), Secret("SHORT", env="S")]
    text = site.output(site.command("/usr/bin/python3", "-c", program, secrets=held))
    assert "banana {}" in text
    assert CANARY not in text
    assert [form for form in forms if form in text] == []
    assert [line for line in LINES.splitlines()[1:-1] if line in text] == []


@pytest.mark.parametrize("way", ["local", "address", "repr", "chain", "locals"])
def test_scenario_a_s03_failures_carry_nothing(site: Site, way: str) -> None:
    """A-S03: a failure with the value in a local, an address, a repr, a chained error or a printed traceback."""
    job = site.app.call("failing:fail", [way], grants=Grants(secrets=[Secret("KEY", get=True)]))
    view = site.wait(job.id, "failed")
    told = repr(view) + repr(list(job.logs())) + repr(list(job.events()))
    assert view.reason == "exception"
    assert "RuntimeError" in told
    assert CANARY not in told
    if way == "chain":
        assert CANARY not in everywhere(site, job)


def test_scenario_a_s04_unknown_names_are_not_tried_again(site: Site) -> None:
    """A-S04: an unknown name and a forbidden one are refused alike, once, whatever the retries; none is on disk."""
    jobs = [site.command("true", secrets=[Secret(name, env="X")], retries=100) for name in ("NONE", "OTHER")]
    views = [site.wait(job.id, "refused") for job in jobs]
    assert {(view.reason, view.attempt) for view in views} == {("secret_denied", 1)}
    first, second = (str(view.detail).replace(name, "") for view, name in zip(views, ("NONE", "OTHER"), strict=True))
    assert first == second
    assert CANARY not in everywhere(site)


def test_scenario_a_s05_a_neighbour_sees_nothing(site: Site) -> None:
    """A-S05: while one job holds a value and runs a tool with it, another finds no process and no trace of it."""
    held = site.command("sh", "-c", "sleep 60 & wait", secrets=[KEY])
    site.wait(held.id, "running")
    text = site.output(site.command("/usr/bin/python3", "-c", NOSE))
    assert "others 0" in text
    assert CANARY not in text
    assert held.kill().survivors == 0


def test_scenario_a_i04_local_sockets_are_no_way_out(site: Site) -> None:
    """A-I04: neither the host's services, nor the fleet's sockets, nor an abstract one is reached; the job's own is."""
    name = f"rf-{secrets.token_hex(6)}"
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        paths = [str(path) for path in (site.fleet.home / "s").iterdir()]
        paths += [str(site.fleet.home / "store" / "valkey.sock"), "/var/run/docker.sock", "/run/podman/podman.sock"]
        paths += [
            f"/run/user/{os.getuid()}/bus",
            os.environ.get("SSH_AUTH_SOCK", "/run/ssh"),
            "/run/dbus/system_bus_socket",
        ]
        job = site.command("/usr/bin/python3", "-c", WAYS_OUT, name, *paths, secrets=[Secret("KEY", get=True)])
        text = site.output(job)
    assert text.strip() == "tried"
    got = site.app.call("failing:fail", ["local"], grants=Grants(secrets=[Secret("KEY", get=True)]))
    assert "1 held" in repr(site.wait(got.id, "failed"))


def test_scenario_a_i05_the_agents_own_credentials(site: Site) -> None:
    """A-I05: the fleet's environment, keys, store and vault are not there for a job."""
    client = keyring.load_client(Home(site.fleet.home))
    files = [site.fleet.home / "vault" / "key", client.key_file, site.fleet.home / "client.json"]
    reads = "; ".join(f"cat {shlex.quote(str(path))} 2>&1 | head -c 99" for path in files)
    job = site.command("sh", "-c", f'{reads}; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr "\\0" "\\n"; env')
    text = site.output(job)
    assert text.count("cat: ") == 3
    assert "PATH=" in text
    password = urllib.parse.urlsplit(client.redis_url).password
    assert CLOUD not in text
    assert "RINGFENCE_HEARTBEAT_S" not in text
    assert password is None or password not in text


def test_scenario_a_i09_a_path_that_is_too_long() -> None:
    """A-I09: a home whose sockets could not be made is refused, with the path and the limit."""
    with scratch.folder() as folder:
        home = folder / ("h" * 150)
        done = subprocess.run(
            [*CLI, "--home", str(home), "up", "--allow", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 78
    assert str(home) in done.stderr
    assert "bytes" in done.stderr


# the broker away, and secrets that wait for a person (DESIGN §6)


def test_a_broker_that_is_away(site: Site) -> None:
    """Line 7: a job with a secret is refused in 2 s, others run; the node is degraded, claims none, recovers."""
    broker = daemon(site.fleet, "broker.vault")
    os.kill(broker, signal.SIGSTOP)
    try:
        refused = site.command("true", secrets=[KEY]).id
        view = site.wait(refused, "refused")
        assert view.reason == "broker_unavailable"
        assert "ringfence broker" in str(view.detail)
        claimed, ended = (datetime.fromisoformat(site.event(refused, kind).at) for kind in ("job.claimed", "job.ended"))
        assert (ended - claimed).total_seconds() < 3.5
        wait_until(lambda: site.node() == "degraded(broker)", "the node says so")
        waits = site.command("true", secrets=[KEY]).id
        site.wait(site.command("true").id, "finished")
        assert "degraded(broker)" in str(site.view(waits).waiting)
        assert site.view(waits).state == "queued"
    finally:
        os.kill(broker, signal.SIGCONT)
    site.wait(waits, "finished")
    wait_until(lambda: site.node() == "ready", "the node has recovered")
    told = [one.type for one in site.app.events() if "broker" in str(one.detail) and one.type.startswith("node.")]
    assert told == ["node.degraded", "node.healthy"]


def test_a_secret_is_approved_from_afar(site: Site) -> None:
    """The job waits, an event names what for, a signed yes lets it go on; the record says who and by which key."""
    job = site.command("sh", "-c", 'test "$T" = value-of-asked', secrets=[ASKED]).id
    assert site.event(job, "secret.pending").detail["secret"] == "ASKED"
    done = site.fleet.run("vault", "approve", job, "ASKED", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "approved"
    site.wait(job, "finished")
    assert site.event(job, "secret.approved").verified
    (line,) = [line for line in record(site, "secret.approved") if line["attempt"] == f"{job}.1"]
    assert line["origin"] == "fleet"
    assert "key " in str(line["by"])


def test_a_secret_is_denied_from_afar(site: Site) -> None:
    """After a signed no the job never has it; a name that nothing waits for is refused by the broker."""
    job = site.command("sh", "-c", "echo it ran", secrets=[ASKED]).id
    site.event(job, "secret.pending")
    assert site.decide("approve", job, "KEY") == "refused"
    assert site.decide("deny", job, "ASKED") == "denied"
    site.wait(job, "failed")
    assert site.event(job, "secret.denied").detail["secret"] == "ASKED"
    assert b"it ran" not in b"".join(data for _, data in site.app.job(job).logs())


def test_an_approval_outlives_a_restart_of_the_broker(site: Site) -> None:
    """Who said yes before is not asked again: the next broker finds it in the record."""
    job = site.command("sleep", "60", secrets=[Secret("ASKED", get=True)]).id
    site.event(job, "secret.pending")
    assert site.fleet.run("vault", "approve", f"{job}.1", "ASKED").returncode == 0
    os.kill(daemon(site.fleet, "broker.vault"), signal.SIGKILL)
    wait_until(lambda: site.leases() > 0, "the next broker has the lease")
    assert not operator.ask(site.fleet.home / "s" / "vault", {"op": "pending"})["pending"]
    assert site.app.job(job).kill().survivors == 0


def record(site: Site, event: str) -> list[dict[str, object]]:
    """Return the record's lines of one kind."""
    text = (site.fleet.home / "vault" / "audit.log").read_text()
    lines = [json.loads(line.rsplit(" ", 1)[0]) for line in text.splitlines()]
    return [line for line in lines if line["event"] == event]
