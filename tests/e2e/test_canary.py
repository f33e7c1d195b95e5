"""One canary, used by real programs in every mode: their server gets it, and it is nowhere else in any encoding.

The places that a mode has by its nature (docs/secrets.md) are the only exceptions: the job that was handed it, and for
proxied ones the egress process.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner import App, Grants, Secret
from runner.job import Job
from runner.wire.states import END_STATES
from tests.e2e.test_proxied import need, served_repository
from tests.e2e.test_secrets import daemon, put
from tests.net.tlsweb import TlsWeb, tls_web
from tests.support import canary, scratch
from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

PROGRAMS = Path(__file__).parent / "programs"
#: Each character but the letters looks different in one encoding or another.
VALUE = f'sk-canary"{secrets.token_hex(12)}/+%&z'
WORD = "public-" + secrets.token_hex(8)
CANARY = canary.encodings(VALUE.encode())
#: Asks the server with each program that this host has. AUTH is the header that the mode has in hand.
ASK = r"""
url=$1; word=$2
printf '%s\n' "$AUTH" | curl -sS -H @- "$url/echo" && echo curl-done
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=http.extraHeader GIT_CONFIG_VALUE_0="$AUTH"
git clone -q "$url/r.git" cloned && git -C cloned log --format=git-done:%s
/usr/bin/python3 -c "$PYTHON" "$url/echo"
test -z "$NODE" || node -e "$NODE" "${url#https://}"
"""
PYTHON = r"""
import base64, json, os, signal, sys, urllib.parse, urllib.request
name, _, value = os.environ["AUTH"].partition(": ")
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={name: value})).read().decode(), "python-done")
raw = value.rpartition(" ")[2].encode()
print(raw.hex(), raw.hex().upper(), raw[::-1].decode(), urllib.parse.quote(raw.decode(), safe=""))
print(json.dumps(raw.decode()), json.dumps(json.dumps(raw.decode())))
print(*(base64.b64encode(b"\0" * phase + raw).decode() for phase in range(3)), ascii(raw.decode()))
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGSEGV)
print("dumped:", os.WCOREDUMP(os.waitpid(child, 0)[1]), flush=True)
"""
NODE = r"""
const http = require('http'), tls = require('tls'), host = process.argv[1], auth = process.env.AUTH;
http.request({host: '127.0.0.1', port: 3128, method: 'CONNECT', path: host}).on('connect', (_, socket) => {
  const safe = tls.connect({socket, servername: 'localhost'}, () =>
    safe.write('GET /echo HTTP/1.1\r\nHost: x\r\n' + auth + '\r\nConnection: close\r\n\r\n'));
  safe.on('data', data => process.stdout.write(data)).on('end', () => console.log('node-done'));
}).end();
"""
HAND = {
    "proxy": "X-Nothing: nothing",
    "env": "Authorization: Bearer $TOKEN",
    "file": 'Authorization: Bearer $(cat "$KEY_FILE")',
}


@dataclass(frozen=True, slots=True)
class Site:
    """A fleet, the server that wants the key, and what lets jobs trust it."""

    fleet: Fleet
    web: TlsWeb
    app: App

    @property
    def host(self) -> str:
        """The server, as grants name it."""
        return f"localhost:{self.web.port}"

    def grants(self, mode: str) -> Grants:
        """Return what a job of this mode is granted: but by proxy, the host and the file of its authority, too."""
        modes = {
            "proxy": Secret("KEY", proxy=self.host),
            "env": Secret("KEY", env="TOKEN"),
            "file": Secret("KEY", file=True),
            "get": Secret("KEY", get=True),
        }
        if mode == "proxy":
            return Grants(secrets=(modes[mode],))
        return Grants(secrets=(modes[mode],), net=(self.host,), read=(str(self.fleet.work),))

    def trust(self, mode: str) -> dict[str, str]:
        """Return the variables by which programs find the server's authority; by proxy the door sets them."""
        names = ("CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        return {} if mode == "proxy" else dict.fromkeys(names, str(self.fleet.work / "ca.pem"))

    def end(self, job: Job[object] | Job[None]) -> str:
        """Wait for a job's end; return its state and all that it wrote."""
        wait_until(lambda: job.status().state in END_STATES, "the job to end", 45)
        return str(job.status().state) + " " + b"".join(data for _, data in job.logs()).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A fleet of one node whose vault holds KEY."""
    for tool in ("curl", "git"):
        need(tool)
    with scratch.folder(mode=0o755) as folder:
        files = folder / "files"
        files.mkdir()
        served_repository(files)
        with tls_web(folder, files, name="localhost") as web:
            options = ["--nodes", "1", "--slots", "2", "--ca", str(web.ca), "--allow-net", f"localhost:{web.port}"]
            with fleets.running(*options, "--import", f"e2e_tasks:{PROGRAMS}") as fleet:
                put(fleet, "KEY", VALUE)
                shutil.copyfile(web.ca, fleet.work / "ca.pem")
                with App(home=fleet.home) as app:
                    app.command(["true"]).outcome(30)
                    yield Site(fleet, web, app)


def test_the_search_can_find() -> None:
    """Each encoding is seen between other bytes, base64 at each of its offsets; a compressed one is not looked into."""
    for name, text in CANARY.items():
        assert name in canary.traces(b"ab" + text + b"cd", CANARY)
    for before in (b"", b"x", b"xy", b"xyz"):
        assert canary.traces(base64.b64encode(before + VALUE.encode() + b"tail"), CANARY)
        assert canary.traces(base64.urlsafe_b64encode(before + VALUE.encode()), CANARY)
    assert not canary.traces(gzip.compress(VALUE.encode()), CANARY)


@pytest.mark.parametrize("mode", ["proxy", "env", "file", "get"])
def test_the_server_gets_it_and_nobody_else(site: Site, mode: str) -> None:
    """Real programs reach the server with the value; what they are told back, and print, shows none of it."""
    begin = len(site.web.asked)
    if mode == "get":
        job = site.app.call("e2e_tasks:spend_secret", ["KEY", f"https://{site.host}/echo"],
                            grants=site.grants(mode), env=site.trust(mode), tags={"word": WORD})  # fmt: skip # rows
        told, programs = site.end(job), 1
        told += json.dumps(job.result(timeout=5))
    else:
        node = NODE if shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") else ""
        words = ["sh", "-c", f'export AUTH="{HAND[mode]}"; {ASK}', "ask", f"https://{site.host}", WORD]
        env = {"PYTHON": PYTHON, "NODE": node, **site.trust(mode)}
        told, programs = site.end(site.app.command(words, grants=site.grants(mode), env=env)), 3 + bool(node)
        assert "dumped: False" in told, told
        assert "git-done:the commit" in told
    assert [word for word in ("curl", "python", "node")[: programs - 1] if f"{word}-done" not in told] == []
    assert told.startswith("finished"), told
    brought = [text for asked in site.web.asked[begin:] for text in asked.header("authorization")]
    assert len(brought) >= programs
    assert set(brought) == {f"Bearer {VALUE}"}
    assert "[secret:KEY]" in told
    assert canary.traces(told.encode(), CANARY) == set()


def test_it_is_nowhere_else(site: Site) -> None:
    """While one job holds it and another runs beside: not in store, files, record, events, results, `ps`, nor memory.

    The same searches find a public word of the job, and what the holder has by its grant.
    """
    holder = site.app.command(["sh", "-c", f": {WORD}; sleep 60 & wait"], grants=site.grants("env"))
    beside = site.app.command(["sh", "-c", "sleep 60 & wait", WORD])
    try:
        wait_until(lambda: {holder.status().state, beside.status().state} == {"running"}, "both jobs to run")
        looked = {**CANARY, "public": WORD.encode()}
        only_public = {"public"}
        assert canary.traces(canary.stored(_store(site.fleet)), looked) == only_public
        assert canary.traces(canary.process_list(), looked) == only_public
        kept = {
            name
            for path, data in canary.files(site.fleet.home, site.fleet.work)
            for name in canary.traces(data, looked)
        }
        assert kept == only_public
        shown = repr([*site.app.events(), *(one.status() for one in (holder, beside)), *site.app.jobs()])
        shown += site.fleet.log.read_text() + site.fleet.run("vault", "audit").stdout
        assert canary.traces(shown.encode(), looked) <= only_public
        assert "secret.released" in shown
        _in_processes(site, holder.id, looked)
    finally:
        for job in (holder, beside):
            job.kill()


def _in_processes(site: Site, holder: str, looked: dict[str, bytes]) -> None:
    """Look through environments and, as far as this user may, the memory of the node's processes and its jobs'."""
    has_it: dict[int, bytes] = {}
    others: dict[int, bytes] = {}
    for pid, environ in canary.family(daemon(site.fleet, "node_agent")).items():
        (has_it if f"RINGFENCE_JOB={holder}".encode() in environ else others)[pid] = environ
    assert others
    assert not any(canary.traces(environ, CANARY) for environ in others.values())
    everyone = os.geteuid() == 0
    seen, held = ({name for pid in some for name in _memory(pid, looked)} for some in (others, has_it))
    assert seen == {"public"} or (not everyone and seen == set())
    if everyone:
        assert any(canary.traces(environ, CANARY) for environ in has_it.values()), "the holder's own environment has it"
        assert {"raw", "public"} <= held, "the holder's memory has it"


def _memory(pid: int, looked: dict[str, bytes]) -> set[str]:
    try:
        return canary.memory(pid, looked)
    except (FileNotFoundError, ProcessLookupError):
        return set()
    except PermissionError:
        if os.geteuid() == 0:
            raise
        return set()


def _store(fleet: Fleet) -> str:
    return str(json.loads((fleet.home / "client.json").read_text())["redis_url"])
