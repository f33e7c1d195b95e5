"""Programs that use a secret which they never hold: real ones, on a real fleet, at the level of this user.

The agents' part needs an interpreter that has them: requirements/agents.in says how.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Unpack, cast

import pytest
from redis import Redis

from runner import App, Budget, Grants, Secret
from runner.request import JobOptions
from runner.wire.keys import Keys
from runner.wire.states import END_STATES
from tests.e2e.test_secrets import daemon, holds, put, ruled
from tests.net.tlsweb import TlsWeb, tls_web
from tests.support import fleet as fleets
from tests.support import scratch
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

VALUE = "sk-canary-" + secrets.token_hex(16)
AGENTS = "RINGFENCE_TEST_AGENTS"
#: A budget of tokens, far more than a loop of requests takes until what it took has come to its node's notice: as much
#: again must be room to go on.
TOKENS = 20_000
#: A hostile job looks everywhere. It knows how the value begins, and its hash: its own memory has it from nobody.
SEARCH = r"""
import hashlib, os, sys, urllib.request
begin, size, want, url = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def holds(data):
    at = data.find(begin)
    while at >= 0:
        if hashlib.sha256(data[at : at + size]).hexdigest() == want:
            return True
        at = data.find(begin, at + 1)
    return False
def look(path):
    try:
        return holds(open(path, "rb").read(1 << 24))
    except OSError:
        return False
answer = urllib.request.urlopen(url).read() if url else b""
found = [os.fsdecode(name) for name, text in os.environb.items() if holds(text)]
for pid in filter(str.isdigit, os.listdir("/proc")):
    found += [part for part in ("environ", "cmdline") if look(f"/proc/{pid}/{part}")]
for root in ("/run", "/work", "/tmp", "/etc", "/dev/shm"):
    for folder, _, names in os.walk(root):
        found += [name for name in names if look(os.path.join(folder, name))]
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in list(maps):
        where, rights = line.split()[:2]
        low, high = (int(part, 16) for part in where.split("-"))
        if "rw" in rights:
            memory.seek(low)
            try:
                found += ["memory"] if holds(memory.read(high - low)) else []
            except OSError:
                pass
print("found", sorted(set(found)), b"[secret:KEY]" in answer)
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one job did."""

    job: str
    state: str
    output: str


@dataclass(frozen=True, slots=True)
class Site:
    """A fleet, and the server that its jobs may use KEY at."""

    fleet: Fleet
    web: TlsWeb
    app: App

    @property
    def host(self) -> str:
        """The server, as grants name it."""
        return f"localhost:{self.web.port}"

    def run(self, *words: str, secret: Secret | None = None, **options: Unpack[JobOptions]) -> Seen:
        """Run a command with KEY by proxy, or with another grant."""
        granted = options.pop("grants", Grants())
        options["grants"] = replace(granted, secrets=(secret or Secret("KEY", proxy=self.host),))
        job = self.app.command(words, **options)
        wait_until(lambda: job.status().state in END_STATES, f"{words[0]} to end", 45)
        return Seen(job.id, job.status().state, b"".join(data for _, data in job.logs()).decode("utf-8", "replace"))

    def keys(self, count: int = 1) -> list[str]:
        """Return what the last requests brought as authorization."""
        return [text for asked in self.web.asked[-count:] for text in asked.header("authorization")]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A fleet that trusts the server, and a repository behind it."""
    with scratch.folder(mode=0o755) as folder:
        files = folder / "files"
        files.mkdir()
        with tls_web(folder, files, name="localhost") as web:
            options = ["--nodes", "1", "--slots", "2", "--ca", str(web.ca), "--allow-net", f"localhost:{web.port}"]
            if agents := os.environ.get(AGENTS):
                options += ["--allow", str(Path(agents).parent.parent)]
            with fleets.running(*options) as fleet:
                put(fleet, "KEY", VALUE)
                put(fleet, "OPENAI_KEY", VALUE)
                served_repository(files)
                with App(home=fleet.home) as app:
                    # What is opened on first use belongs to the module, not to its first test.
                    app.command(["true"]).outcome(30)
                    yield Site(fleet, web, app)


def served_repository(files: Path) -> None:
    """Make a repository that a plain file server can serve."""
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "t", "GIT_COMMITTER_NAME": "t"}
    quiet |= {"GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_EMAIL": "t@t", "GIT_CONFIG_SYSTEM": "/dev/null"}
    work = files / "work"
    for words in (
        ["git", "init", "-q", str(work)],
        ["git", "-C", str(work), "commit", "-q", "--allow-empty", "-m", "the commit"],
        ["git", "clone", "-q", "--bare", str(work), str(files / "r.git")],
        ["git", "-C", str(files / "r.git"), "update-server-info"],
    ):
        subprocess.run(words, check=True, env=quiet, capture_output=True)


def need(tool: str) -> None:
    """Skip where the host has no such program."""
    if shutil.which(tool, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"this host has no {tool}")


def test_curl(site: Site) -> None:
    """As http through the proxy, and as https that the door ends."""
    need("curl")
    both = f"curl -sS http://{site.host}/echo && curl -sS https://{site.host}/echo"
    done = site.run("sh", "-c", both)
    assert done.state == "finished", done.output
    assert site.keys(2) == [f"Bearer {VALUE}"] * 2
    assert VALUE not in done.output
    assert done.output.count("[secret:KEY]") == 2
    wait_until(lambda: bool(_used(site, done.job)), "the door's counts")
    (counts,) = _used(site, done.job)
    assert (counts["connections"], counts["refused"], counts["keyed"], counts["masked"]) == (2, 0, 2, 2)
    assert int(counts["received_bytes"]) > 0


def test_a_base_url_needs_neither_proxy_nor_authority(site: Site) -> None:
    """A program that knows nothing but a URL reaches the secret's host by its route."""
    code = (
        "import os, http.client as h, urllib.parse as p;"
        "url = p.urlsplit(os.environ['RINGFENCE_URL_KEY']); link = h.HTTPConnection(url.netloc);"
        "link.request('GET', url.path + '/echo'); print(link.getresponse().status)"
    )
    done = site.run("/usr/bin/python3", "-c", code, env={"HTTP_PROXY": "", "SSL_CERT_FILE": "/none"})
    assert (done.state, done.output.strip()) == ("finished", "200")
    assert site.keys() == [f"Bearer {VALUE}"]


def test_git_over_https(site: Site) -> None:
    """A clone from a server that wants a key."""
    need("git")
    clone = f"git clone -q https://{site.host}/r.git r && git -C r log --format=%s"
    done = site.run("sh", "-c", clone)
    assert (done.state, done.output.strip()) == ("finished", "the commit")
    assert set(site.keys(3)) == {f"Bearer {VALUE}"}


def test_python_and_its_environment(site: Site) -> None:
    """urllib by https; the variable of the secret's name holds a stand-in, so that libraries start."""
    code = (
        "import os, urllib.request as u;"
        f"print(os.environ['KEY'], u.urlopen('https://{site.host}/echo').status, os.environ['SSL_CERT_FILE'])"
    )
    done = site.run("/usr/bin/python3", "-c", code)
    assert done.output.split()[:2] == ["ringfence-proxied", "200"]
    assert site.keys() == [f"Bearer {VALUE}"]


def test_node(site: Site) -> None:
    """Node's own https client through a tunnel, with the authority from its variable."""
    need("node")
    code = f"""
const http = require('http'), tls = require('tls');
http.request({{host: '127.0.0.1', port: 3128, method: 'CONNECT', path: '{site.host}'}}).on('connect', (_, socket) => {{
  const safe = tls.connect({{socket, servername: 'localhost'}}, () =>
    safe.write('GET /echo HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n'));
  safe.on('data', data => process.stdout.write(data));
}}).end();
"""
    done = site.run("node", "-e", code)
    assert "200 OK" in done.output
    assert site.keys() == [f"Bearer {VALUE}"]


def test_attack_15_a_job_that_looks_for_it_everywhere_finds_nothing(site: Site) -> None:
    """Environments, arguments, files, its own memory after an answer that echoed it: no value."""
    words = ("/usr/bin/python3", "-c", SEARCH, VALUE[:10], str(len(VALUE)), sha256(VALUE.encode()).hexdigest())
    done = site.run(*words, f"http://{site.host}/echo")
    assert done.output.strip() == "found [] True"
    assert site.keys() == [f"Bearer {VALUE}"]
    # The counter-check: a job that is handed the value finds it in all of these places.
    handed = site.run(*words, "", secret=Secret("KEY", env="TOKEN"))
    assert handed.output.strip() == "found ['TOKEN', 'environ', 'memory'] False"


def test_the_value_is_nowhere_else(site: Site) -> None:
    """Not in the store's dump, the record, any log, events, results, `ps`, nor (as root) the agent's memory."""
    need("curl")
    done = site.run("curl", "-sS", f"http://{site.host}/echo")
    assert site.keys() == [f"Bearer {VALUE}"]
    texts = [path.read_bytes() for path in site.fleet.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(b'"mode":"proxy"' in text for text in texts)
    assert not any(VALUE.encode() in text for text in texts)
    shown = [*map(repr, site.app.events()), repr(site.app.job(done.job).status()), site.fleet.log.read_text()]
    assert "[secret:KEY]" in done.output
    assert VALUE not in done.output + "".join(shown)
    assert VALUE.encode() not in _dump(site.fleet)
    everybody = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path)]
    assert not any(VALUE.encode() in line for line in everybody)
    if os.geteuid() == 0:
        agent = daemon(site.fleet, "node_agent")
        assert holds(agent, os.fsencode(site.fleet.home)), "the search finds nothing at all"
        assert not holds(agent, VALUE.encode())


def test_without_the_grant_or_beyond_the_policy(site: Site) -> None:
    """Without the grant nothing is reached; another host is refused by the node, a rule without proxy by the broker."""
    need("curl")
    alone = site.app.command(["curl", "-sS", "-m", "5", f"http://{site.host}/echo"])
    wait_until(lambda: alone.status().state == "failed", "a job without the grant to fail")
    done = site.run("true", secret=Secret("KEY", proxy="127.0.0.1:9"))
    assert (done.state, site.app.job(done.job).status().reason) == ("refused", "policy")
    before = (site.fleet.home / "vault-policy.toml").read_text()
    with ruled(site.fleet, before.replace('modes = ["proxy", "get", "file", "env"]', 'modes = ["get"]')):
        done = site.run("true")
        assert (done.state, site.app.job(done.job).status().reason) == ("refused", "secret_denied")


def test_a_kill_ends_it(site: Site) -> None:
    """While a job streams: after its kill nothing of it asks the host for anything any more."""
    need("curl")
    loop = f"while :; do curl -sS http://{site.host}/bytes/10 >/dev/null; done"
    job = site.app.command(["sh", "-c", loop], grants=Grants(secrets=(Secret("KEY", proxy=site.host),)))
    count = len(site.web.asked)
    wait_until(lambda: len(site.web.asked) > count + 3, "requests of the job")
    assert job.kill().survivors == 0
    count = len(site.web.asked)
    wait_until(lambda: job.status().state == "killed", "the end to be written")
    assert len(site.web.asked) == count


MINI = """
agent:
  {system_template: "You work.", instance_template: "{{task}}", step_limit: 5, cost_limit: 0, mode: yolo,
   confirm_exit: false}
environment: {environment_class: local}
model: {model_class: http_model.HttpModel, model_name: fake-1}
"""
MINI_MODEL = """
import os
from minisweagent.models.openrouter_model import OpenRouterModel
class HttpModel(OpenRouterModel):
    def __init__(self, **given):
        super().__init__(**given)
        self._api_url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
"""
PYDANTIC = """
import os, subprocess
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
base = os.environ["OPENAI_BASE_URL"]
agent = Agent(OpenAIChatModel("fake-1", provider=OpenAIProvider(base_url=base, api_key=os.environ["OPENAI_API_KEY"])))
@agent.tool_plain
def bash(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
print("RESULT", agent.run_sync("go").output)
"""
OPENAI = """
import os, openai
client = openai.OpenAI()
ask = dict(model="fake-1", messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}] * 3)
print("RESULT", client.chat.completions.create(**ask).choices[0].message.content)
parts = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
print("STREAM", "".join(part.choices[0].delta.content or "" for part in parts if part.choices))
"""
STREAMED = """
import asyncio, os, subprocess
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled
set_tracing_disabled(True)
set_default_openai_api("chat_completions")
@function_tool
def bash(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
async def main():
    settings = ModelSettings(include_usage=True)
    agent = Agent(name="a", instructions="work", tools=[bash], model="fake-1", model_settings=settings)
    run = Runner.run_streamed(agent, "go")
    kinds = {event.type async for event in run.stream_events()}
    print("RESULT", sorted(kinds), run.final_output)
asyncio.run(main())
"""
SMOL = """
import os, subprocess
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def bash(command: str) -> str:
    \"\"\"Run a command.

    Args:
        command: what to run
    \"\"\"
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel(model_id="fake-1", api_base=base, api_key=key)
print("RESULT", ToolCallingAgent(tools=[bash], model=model, max_steps=2, verbosity_level=0).run("go"))
"""


@pytest.mark.parametrize(
    ("name", "scheme"),
    [(name, scheme) for name in ("mini-swe-agent", "pydantic-ai", "openai") for scheme in ("http", "https", "route")]
    + [("openai-agents", "route"), ("smolagents", "route")],
)
def test_real_agents(site: Site, name: str, scheme: str) -> None:
    """They start with a stand-in for their key, the server gets the real one each time, and its tokens are counted."""
    python = os.environ.get(AGENTS)
    if not python:
        pytest.skip(f"{AGENTS} names no interpreter with the agents of requirements/agents.in")
    count, counted = len(site.web.asked), len(site.web.tokens)
    folder = site.fleet.work / f"{name}-{scheme}"
    folder.mkdir(mode=0o755)
    (folder / "http_model.py").write_text(MINI_MODEL)
    (folder / "mini.yaml").write_text(MINI)
    (folder / "smol.py").write_text(SMOL)  # it looks for its tools' source
    words = {
        "mini-swe-agent": [
            str(Path(python).with_name("mini")), "-c", f"{folder}/mini.yaml", "-t", "go", "-y", "--exit-immediately"
        ],
        "pydantic-ai": [python, "-c", PYDANTIC],
        "openai": [python, "-c", OPENAI],
        "openai-agents": [python, "-c", STREAMED],
        "smolagents": [python, f"{folder}/smol.py"],
    }[name]  # fmt: skip # several to a line
    # Over the route nothing is said: the job is told where, because the secret's name begins as the library's does.
    own = {} if scheme == "route" else {"OPENAI_BASE_URL": f"{scheme}://{site.host}/v1"}
    env = {
        **own,
        "PYTHONPATH": str(folder),
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    grants = Grants(read=(str(Path(python).parent.parent), str(folder)))
    key = f"agent-{name}-{scheme}"
    budget = Budget(key, tokens=10**9)
    done = site.run(*words, env=env, grants=grants, secret=Secret("OPENAI_KEY", proxy=site.host), budget=budget)
    assert done.state == "finished", done.output
    assert len(site.web.asked) > count
    assert {text for asked in site.web.asked[count:] for text in asked.header("authorization")} == {f"Bearer {VALUE}"}
    assert VALUE not in done.output
    assert "the model's last word" in done.output
    taken = site.web.tokens[counted:]
    wait_until(lambda: bool(_used(site, done.job)), "the door's counts")
    (counts,) = _used(site, done.job)
    assert (counts["tokens_in"], counts["tokens_out"]) == tuple(sum(part) for part in zip(*taken, strict=True))
    assert (counts["unknown"], counts["requests"]) == (0, len(taken))
    wait_until(lambda: _spent(site, key) == sum(map(sum, taken)), "the budget to have every token")


def test_e4_a_loop_of_requests_is_held_by_its_budget_approved_once_and_then_killed(site: Site) -> None:
    """The tokens that the budget counts are those that the model server gave; after the no, nobody survives."""
    counted = len(site.web.tokens)
    code = (
        "import itertools, json, os, urllib.request as r\n"
        "for n in itertools.count():\n"
        "    body = json.dumps({'model': 'small-1', 'messages': [{'role': 'user', 'content': f'turn {n}'}]}).encode()\n"
        "    head = {'Content-Type': 'application/json'}\n"
        "    r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)).read()\n"
    )
    job = site.app.command(
        ("/usr/bin/python3", "-c", code),
        grants=Grants(secrets=(Secret("OPENAI_KEY", proxy=site.host),)),
        budget=Budget("e2e-tokens", tokens=TOKENS),
    )
    wait_until(lambda: job.status().state == "paused", "the budget to be used up", 30)
    (view,) = [view for view in site.app.waiting() if view.budget == "e2e-tokens"]
    assert "tokens" in view.why
    held = sum(map(sum, site.web.tokens[counted:]))
    assert site.app.budget("e2e-tokens").approve()[0].outcome == "approved"
    wait_until(
        lambda: sum(event.type == "job.paused" and event.job == job.id for event in site.app.events()) == 2,
        "as much again to be used up",
        30,
    )
    assert sum(map(sum, site.web.tokens[counted:])) > max(held, 2 * TOKENS)
    assert site.app.budget("e2e-tokens").deny(reason="enough")[0].outcome == "denied"
    wait_until(lambda: job.status().state == "killed", "the no", 30)
    (ended,) = [event for event in site.app.events() if event.type == "job.ended" and event.job == job.id]
    assert "budget e2e-tokens: tokens" in str(ended.detail["kill_reason"])
    tokens = sum(map(sum, site.web.tokens[counted:]))
    wait_until(lambda: _spent(site, "e2e-tokens") == tokens, "every token to be counted")


def test_a_looping_agent_is_held_by_loop_and_by_budget_approved_once_and_killed(site: Site) -> None:
    """Equal requests are a loop; let go on, it spends its budget; approved once, a kill leaves no survivor."""
    key = "e2e-loop"
    code = (
        "import itertools, json, os, urllib.request as r\n"
        "for n in itertools.count():\n"
        "    say = f'turn {max(n, 12)}'\n"
        "    body = json.dumps({'model': 'small-1', 'messages': [{'role': 'user', 'content': say}]}).encode()\n"
        "    head = {'Content-Type': 'application/json'}\n"
        "    r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)).read()\n"
    )
    job = site.app.command(
        ("/usr/bin/python3", "-c", code),
        grants=Grants(secrets=(Secret("OPENAI_KEY", proxy=site.host),)),
        budget=Budget(key, tokens=TOKENS),
    )
    wait_until(lambda: _signalled(site, job.id, "LOOP"), "the loop to be seen", 30)
    wait_until(lambda: job.status().state == "paused", "the loop to be held", 30)
    assert _spent(site, key) < TOKENS
    job.resume(reason="looked at it")
    wait_until(lambda: any(view.budget == key for view in site.app.waiting()), "the budget to be used up", 30)
    wait_until(lambda: job.status().state == "paused", "the budget to hold it", 30)
    held = _spent(site, key)
    assert site.app.budget(key).approve()[0].outcome == "approved"
    # More than what one request on its way at the hold may bring.
    wait_until(lambda: _spent(site, key) > held + 1000, "it to go on", 30)
    receipt = job.kill(reason="enough")
    assert (receipt.outcome, receipt.survivors) == ("killed", 0)


def _signalled(site: Site, job: str, name: str) -> bool:
    events = [event for event in site.app.events(job=job) if event.type == "job.signalled"]
    return any(event.detail.get("signal") == name for event in events)


def _spent(site: Site, key: str) -> float:
    """Return the tokens that the store has of a budget."""
    store = Redis.from_url(json.loads((site.fleet.home / "client.json").read_text())["redis_url"])
    try:
        return float(cast("bytes", store.hget(Keys().budget("main", key), "tokens")))
    finally:
        store.close()


def _used(site: Site, job: str) -> list[dict[str, str | int | float | bool]]:
    return [event.detail for event in site.app.events() if event.type == "net.used" and event.job == job]


def _dump(fleet: Fleet) -> bytes:
    """Return every key and value of the fleet's store."""
    url = json.loads((fleet.home / "client.json").read_text())["redis_url"]
    store = Redis.from_url(url)
    try:
        return b"".join(key + b"=" + (store.dump(key) or b"") for key in store.scan_iter(count=1000))
    finally:
        store.close()


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
