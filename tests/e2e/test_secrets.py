"""Secrets that work in a job and are nowhere else: every mode that hands a value over, at the level of this user."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from runner import App, Grants, JobFailed, JobRefused, Sealed, Secret, request, sealing
from tests.support import fleet as fleets
from tests.support.fleet import Fleet, processes_with
from tests.support.wait import wait_until

PROGRAMS = Path(__file__).parent / "programs"
VALUE = "canary" + secrets.token_hex(12)
HASH = hashlib.sha256(VALUE.encode()).hexdigest()


@pytest.fixture(scope="module")
def vaulted() -> Iterator[Fleet]:
    """A fleet whose vault holds KEY."""
    with fleets.running("--nodes", "1", "--slots", "2", "--import", f"e2e_tasks:{PROGRAMS}") as found:
        put(found, "KEY", VALUE)
        yield found


def put(fleet: Fleet, name: str, value: str) -> None:
    """Store a secret; its file is gone again."""
    file = fleet.work / "value"
    file.write_text(value)
    wait_until(lambda: fleet.run("vault", "set", name, "--file", str(file)).returncode == 0, "the vault takes it")
    file.unlink()


@contextmanager
def ruled(fleet: Fleet, text: str) -> Iterator[None]:
    """Put other rules in force while the block runs."""
    rules = fleet.home / "vault-policy.toml"
    before = rules.read_text()
    rules.write_text(text)
    try:
        assert fleet.run("vault", "reload").returncode == 0
        yield
    finally:
        rules.write_text(before)
        assert fleet.run("vault", "reload").returncode == 0


def test_env(vaulted: Fleet) -> None:
    """The variable is there for the job and its children, and what they print of it is masked."""
    command = 'printf %s "$TOKEN" | sha256sum; sh -c "echo token: \\$TOKEN"'
    done = vaulted.run("run", "--secret", "KEY:env=TOKEN", "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert HASH in done.stdout
    assert "token: [secret:KEY]" in done.stdout
    assert VALUE not in done.stdout + done.stderr


def test_file(vaulted: Fleet) -> None:
    """The file lies on the job's own tmpfs, for the job alone, and its path is in NAME_FILE."""
    command = 'sha256sum < "$KEY_FILE"; stat -c "%a %n" "$KEY_FILE"; cat "$KEY_FILE"'
    done = vaulted.run("run", "--secret", "KEY:file", "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(HASH)
    assert "400 /run/secrets/KEY" in done.stdout
    assert VALUE not in done.stdout


def test_get(vaulted: Fleet) -> None:
    """A task asks for the value when it needs it; a result and an exception that hold it are masked."""
    done = vaulted.run("call", "e2e_tasks:use_secret", "--arg", '"KEY"', "--secret", "KEY:get")
    assert done.returncode == 0, done.stderr
    assert HASH in done.stdout
    assert "[secret:KEY]" in done.stdout
    assert VALUE not in done.stdout + done.stderr
    failed = vaulted.run("call", "e2e_tasks:use_secret", "--arg", '"KEY"', "--arg", "true", "--secret", "KEY:get")
    assert failed.returncode == 1
    assert "[secret:KEY]" in failed.stderr
    assert VALUE not in failed.stdout + failed.stderr


KILLING = """
version = 1
[[allow]]
secrets = ["KEY"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
modes = ["env", "get"]
on_leak = "kill"
"""


def test_on_leak_kill(vaulted: Fleet) -> None:
    """A job that shows the value ends at once, by output and by result, with one event that names the secret."""
    mark = vaulted.work / "too late"
    grants = Grants(secrets=(Secret("KEY", env="TOKEN"),), write=(str(vaulted.work),))
    with ruled(vaulted, KILLING), App(home=vaulted.home) as app:
        shown = app.command(["sh", "-c", f"echo so: $TOKEN; sleep 30; touch '{mark}'"], grants=grants)
        quiet = app.command(["sh", "-c", 'printf %s "$TOKEN" | sha256sum'], grants=grants)
        asked = Grants(secrets=(Secret("KEY", get=True),))
        result = app.call("e2e_tasks:use_secret", ["KEY"], grants=asked, retries=2)
        for job in (shown, result):
            with pytest.raises(JobFailed) as failed:
                job.result(timeout=25)
            assert failed.value.reason == "secret_leaked"
            assert VALUE not in str(failed.value) + b"".join(data for _, data in job.logs()).decode()
        quiet.result(timeout=25)
        assert b"".join(data for _, data in quiet.logs()).startswith(HASH.encode())
        told = [event.detail for event in app.events() if event.type == "secret.leaked"]
    assert not mark.exists()
    for where in ("output", "result"):
        assert told.count({"secret": "KEY", "where": where, "killed": True}) == 1


def test_vault_37_a_neighbours_environment(vaulted: Fleet) -> None:
    """While a job holds a value in its environment, the next one finds it in no process that it can see."""
    look = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -c TOKEN; cat /proc/self/environ | grep -ac RINGFENCE_JOB"
    with App(home=vaulted.home) as app:
        holder = app.command(["sleep", "30"], grants=Grants(secrets=(Secret("KEY", env="TOKEN"),)))
        try:
            wait_until(lambda: holder.status().state == "running", "the holder runs")
            looker = app.command(["sh", "-c", look])
            looker.result(timeout=25)
            assert b"".join(data for _, data in looker.logs()).split() == [b"0", b"1"]
        finally:
            holder.kill()


def test_a_job_without_the_grant_has_nothing(vaulted: Fleet) -> None:
    """No variable, no file, no channel; and the next job of the slot finds nothing of the last one's."""
    command = "env; ls /run/secrets; ls -l /proc/self/fd; cat /proc/self/environ"
    done = vaulted.run("run", "--", "sh", "-c", command)
    assert VALUE not in done.stdout + done.stderr
    assert "TOKEN" not in done.stdout
    assert "101" not in [line.split()[-3] for line in done.stdout.splitlines() if " -> " in line]


@pytest.mark.parametrize("name", ["NONE", "OTHER"])
def test_an_unknown_secret_is_refused(vaulted: Fleet, name: str) -> None:
    """A job that asks for what is not in the vault never starts."""
    mark = vaulted.work / f"mark-{name}"
    done = vaulted.run("run", "--secret", f"{name}:env=X", "--write", str(vaulted.work), "--", "touch", str(mark))
    assert done.returncode == 125
    assert "secret_denied" in done.stderr
    assert not mark.exists()


def test_what_policy_denies_is_refused(vaulted: Fleet) -> None:
    """The broker's own rules have the last word; when they allow it again the same job runs."""
    with ruled(vaulted, "version = 1\n"):
        done = vaulted.run("run", "--secret", "KEY:env=TOKEN", "--", "true")
        assert done.returncode == 125
        assert "secret_denied" in done.stderr
    assert vaulted.run("run", "--secret", "KEY:env=TOKEN", "--", "true").returncode == 0


def test_without_a_broker(vaulted: Fleet) -> None:
    """Jobs with secrets are refused within two seconds, jobs without run on; a new broker serves again."""
    broker = daemon(vaulted, "broker.vault")
    os.kill(broker, signal.SIGSTOP)
    try:
        done = vaulted.run("run", "--secret", "KEY:env=TOKEN", "--", "true")
        assert done.returncode == 125
        assert "broker_unavailable" in done.stderr
        assert vaulted.run("run", "--", "true").returncode == 0
    finally:
        os.kill(broker, signal.SIGKILL)
    wait_until(
        lambda: vaulted.run("run", "--secret", "KEY:env=TOKEN", "--", "true").returncode == 0, "the next broker serves"
    )


def test_attack_52_the_service(vaulted: Fleet) -> None:
    """A tool that inherited nothing asks the broker on loopback: no value, no HTTP, and not unless the job asked."""
    with App(home=vaulted.home) as app:
        job = app.call("e2e_tasks:use_service", grants=Grants(secrets=(Secret("KEY", get=True),), service=True))
        found = job.result(timeout=30)
        with pytest.raises(JobFailed, match="RINGFENCE_SERVICE"):
            app.call("e2e_tasks:use_service", grants=Grants(secrets=(Secret("KEY", get=True),))).result(timeout=30)
    state = {"ok": True, "secrets": [{"name": "KEY", "state": "ready"}]}
    assert found == {"told": [state, {"ok": False, "err": "denied"}], "http": b""}
    bare = vaulted.run("run", "--service", "--", "sh", "-c", "echo $RINGFENCE_SERVICE")
    assert bare.stdout == "127.0.0.1:3129\n"


def test_sealed_values(vaulted: Fleet) -> None:
    """Sealed arguments and variables arrive as they were; the envelope, the output and the result don't show them."""
    sealed, raw = "sealed" + secrets.token_hex(12), secrets.token_bytes(20)
    with App(home=vaulted.home) as app:
        job = app.call("e2e_tasks:use_sealed", [Sealed(sealed)], {"more": {"raw": Sealed(raw)}})
        found = job.result(timeout=30)
        assert found == {
            "token": hashlib.sha256(sealed.encode()).hexdigest(),
            "raw": hashlib.sha256(raw).hexdigest(),
            "value": "[secret:args/0]",
        }
        told = b"".join(data for _, data in job.logs())
        assert told == b"the token is [secret:args/0]\n"
        words = ["sh", "-c", 'printf %s "$TOKEN" | sha256sum; echo $TOKEN']
        command = app.command(words, env={"TOKEN": Sealed(sealed)})
        command.result(timeout=30)
        told = b"".join(data for _, data in command.logs())
        assert told.startswith(hashlib.sha256(sealed.encode()).hexdigest().encode())
        assert told.endswith(b"[secret:env/TOKEN]\n")
    texts = [path.read_bytes() for path in vaulted.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(b"sealed.released" in text for text in texts)
    assert not any(sealed.encode() in text for text in texts)
    if os.geteuid() == 0:
        assert not holds(daemon(vaulted, "node_agent"), sealed.encode())


def test_attack_02_a_ciphertext_in_an_own_envelope(vaulted: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied out of the store into another signed job it is refused before anything of that job runs."""
    with App(home=vaulted.home) as app:
        victim = request.build({}, task="e2e_tasks:use_sealed", args=[Sealed("the victim's value")])
        copied = sealing.seal(victim, app.client().cards(), app.client().signer.key_id).sealed
        thief = request.build({}, task="e2e_tasks:use_sealed", args=[Sealed("")])
        monkeypatch.setattr(sealing, "seal", lambda job, cards, signer: replace(job, sealed=copied))
        app.client().enqueue([thief])
        with pytest.raises(JobRefused, match="sealed for another job") as refused:
            app.job(thief.id).result(timeout=30)
    assert refused.value.reason == "bad_signature"


def test_the_value_is_nowhere_else(vaulted: Fleet) -> None:
    """After jobs of all modes: not in the store, the record, any log, the events, nor (as root) the agent's memory."""
    test_env(vaulted)
    texts = [path.read_bytes() for path in vaulted.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(b"secret.released" in text for text in texts)
    assert not any(VALUE.encode() in text for text in texts)
    assert VALUE not in vaulted.run("events", "--json").stdout + vaulted.log.read_text()
    if os.geteuid() == 0:
        agent = daemon(vaulted, "node_agent")
        assert holds(agent, os.fsencode(vaulted.home)), "the search finds nothing at all"
        assert not holds(agent, VALUE.encode())


def daemon(fleet: Fleet, module: str) -> int:
    """Return the process of one of the fleet's daemons."""
    found = processes_with(str(fleet.home))
    (pid,) = (pid for pid in found if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return pid


def holds(pid: int, needle: bytes) -> bool:
    """Return whether a process has some bytes in memory that it can write."""
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            where, rights = line.split()[:2]
            if "rw" not in rights or "[vvar" in line:
                continue
            start, end = (int(part, 16) for part in where.split("-"))
            memory.seek(start)
            try:
                if needle in memory.read(end - start):
                    return True
            except OSError:
                continue
    return False
