"""Each role's user of the store can do all that its part does, and nothing of what it must not (attacks 3, 20, 23, 28).

The table is runner/wire/access.py; the file is deploy/redis/users.acl. A whole fleet works under these users, and the
store's own log of refusals has to stay empty.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError

from deploy import users
from runner import App
from runner.errors import StoreError
from runner.wire import access
from runner.wire import keys as keytable
from runner.wire.access import Role
from runner.wire.flow import Concurrency, Rate
from runner.wire.keys import PERMANENT
from tests.support import valkey
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

FILE = Path(users.__file__).parent / "redis" / "users.acl"
PASSWORD = "not-a-secret"
DIGEST = hashlib.sha256(PASSWORD.encode()).hexdigest()
TENANT = "acme"


def roles(node: str) -> tuple[Role, ...]:
    """Return one role of each kind."""
    return (access.client(), access.tenant(TENANT), access.agent(node), access.controller(), access.viewer())


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A store with these users, and one agent that is the node's user there."""
    with rigged() as found:
        node = f"{found.tag}-a"
        for role in roles(node):
            set_user(found, role)
        found.redis.config_set("maxmemory-policy", "allkeys-lru")
        found.start("a", RINGFENCE_REDIS=url(found, f"agent-{node}"))
        wait_until(lambda: _warnings(found), "the agent to look at its store's settings", 10)
        found.redis.config_set("maxmemory-policy", "noeviction")
        found.app.nodes()
        yield found
        found.app.close()


def set_user(rig: Rig, role: Role) -> None:
    """Make a role's user; a selector is one word."""
    head, *selectors = role.line(password_sha256=DIGEST).removeprefix("user ").split(" (")
    ask(rig.redis, "ACL", "SETUSER", *head.split(), *(f"({selector}" for selector in selectors))


def ask(client: redis.Redis, *words: str) -> None:
    """Send one command as it is."""
    client.execute_command(*words)  # type: ignore[no-untyped-call]  # untyped in redis


def url(rig: Rig, user: str) -> str:
    """Return the store's URL for a user."""
    return f"unix://{user}:{PASSWORD}@{rig.store.socket}"


def as_user(rig: Rig, user: str) -> redis.Redis:
    """Return a connection as a user."""
    return redis.Redis(unix_socket_path=str(rig.store.socket), username=user, password=PASSWORD)


def refusals(rig: Rig) -> list[tuple[str, str, str]]:
    """Return what the store has refused since the last look: user, context and what it was about.

    redis-py tells its own version by CLIENT SETINFO, which Redis 7.0 does not know, and does without.
    """
    found = cast("list[dict[str, Any]]", rig.redis.acl_log())
    rig.redis.acl_log_reset()
    told = [(entry["username"], entry["context"], entry["object"]) for entry in found]
    return [one for one in told if one[2] != "client|setinfo"]


def test_the_file_is_written_from_the_table_and_loads(tmp_path: Path) -> None:
    """The committed example is what the table says, has no password, and a real server takes it."""
    text = FILE.read_text()
    assert text == users.render(*users.EXAMPLE), "run `make acl`"
    assert "nopass" not in text
    assert "#" not in text.replace(users.HEAD, "")
    file = tmp_path / "users.acl"
    lines = [line for line in text.splitlines() if line.startswith("user ") and not line.startswith("user default")]
    file.write_text("\n".join(["user default on nopass ~* &* +@all", *lines]) + "\n")
    with valkey.running(("--aclfile", str(file))) as server:
        client = server.client()
        assert {"client", "tenant-acme", "agent-node-1", "controller", "viewer"} < set(client.acl_users())
        client.close()


def test_a_l05_an_agent_warns_of_a_store_that_evicts(rig: Rig) -> None:
    """It starts all the same, says so in its log and as an event, and names the setting."""
    (told,) = _warnings(rig)
    assert "`maxmemory-policy noeviction`" in told
    assert told in rig.nodes["a"].tail()


def _warnings(rig: Rig) -> list[str]:
    return [str(event.detail["what"]) for event in rig.app.events() if event.type == "node.degraded"]


@pytest.mark.parametrize("user", ["client", f"tenant-{TENANT}"])
def test_a_fleet_works_under_its_users(rig: Rig, user: str) -> None:
    """Jobs of every kind are enqueued, run, retried, looked at and killed; the store refuses nothing on the way."""
    rig.redis.acl_log_reset()
    with App(home=rig.home, redis_url=url(rig, user), tenant=TENANT) as app:
        first = app.command(["sh", "-c", "echo hello"])
        assert first.outcome(20).state == "finished"
        assert b"hello" in b"".join(data for _, data in first.logs())
        again = app.command(["sh", "-c", 'test "$RINGFENCE_ATTEMPT" = 2'], retries=1)
        assert again.outcome(20).attempt == 2
        soon = app.command(["true"], eta=datetime.now(UTC) + timedelta(seconds=0.3))
        limited = app.command(["true"], unique="one", rate=Rate("r", 5, 1.0), concurrency=Concurrency("c", 2))
        assert {job.outcome(20).state for job in (soon, limited)} == {"finished"}
        late = app.command(["true"], countdown=3600)
        after = app.command(["true"], after=[late])
        assert [job.status().state for job in (late, after)] == ["scheduled", "deferred"]
        assert {job.kill(wait=20).outcome for job in (after, late)} == {"killed_before_start"}
        running = app.command(["sh", "-c", "echo up; sleep 600"], tags={"k": "v"})
        rig.wait_output(running, "up")
        assert running.pause(wait=20).outcome == "paused"
        assert running.resume(wait=20).outcome == "resumed"
        assert [one.outcome for one in app.kill(tag="k=v", tenant=TENANT, wait=20)] == ["killed"]
        app.schedule("nightly", ["true"], cron="0 3 * * *")
        app.pause_schedule("nightly")
        app.unschedule("nightly")
        failed = app.command(["false"])
        assert failed.outcome(20).state == "failed"
        assert [one.state for one in app.jobs(limit=1)] == ["failed"]
        assert app.nodes()
        assert any(event.type == "job.ended" for event in app.events())
        assert app.retry([failed.id])[0].job
    assert refusals(rig) == []


def test_an_agent_s_user_keeps_the_time(rig: Rig) -> None:
    """The occurrences of a tenant's schedule are enqueued by the agent, under its own user."""
    rig.redis.acl_log_reset()
    with App(home=rig.home, redis_url=url(rig, f"tenant-{TENANT}"), tenant=TENANT) as app:
        app.schedule("soon", ["true"], every=1.0, tags={"of": "soon"})
        wait_until(lambda: any(one.tags == {"of": "soon"} and one.ended_at for one in app.jobs()), "an occurrence", 20)
        app.unschedule("soon")
    assert refusals(rig) == []


def test_an_operator_works_as_the_controller(rig: Rig) -> None:
    """Drains, suspends, kills whatever waits or runs, and looks; nothing of it is refused."""
    waiting = rig.command("true", countdown=3600)
    rig.redis.acl_log_reset()
    with App(home=rig.home, redis_url=url(rig, "controller")) as app:
        node = rig.nodes["a"].name
        assert app.drain(node, wait=20).state == "drained"
        assert app.undrain(node).outcome == "done"
        assert {one.outcome for one in app.suspend("agents")} == {"done"}
        assert {one.outcome for one in app.unsuspend("agents")} == {"done"}
        assert app.job(waiting.id).kill(wait=20).outcome == "killed_before_start"
        assert app.kill(all=True, wait=20) == []
        assert app.jobs()
        assert app.job(waiting.id).status().state == "killed"
    assert refusals(rig) == []


def test_a_viewer_sees_everything(rig: Rig) -> None:
    """Jobs, nodes and events, by our own reads and by RQ's tidying count."""
    rig.command("true").outcome(20)
    rig.redis.acl_log_reset()
    with App(home=rig.home, redis_url=url(rig, "viewer")) as app:
        (job, *_) = app.jobs()
        assert app.job(job.job).status().state
        assert list(app.events())
        assert app.nodes()
    client = as_user(rig, "viewer")
    client.zremrangebyscore(rig.keys.registry("finished", "agents"), 0, 1)
    client.close()
    assert refusals(rig) == []


JOB, FOREIGN = f"{TENANT}-01j00000000000000000000000", "other-01j00000000000000000000000"
DENIED = {
    f"tenant-{TENANT}": [
        f"HGET rq:job:{FOREIGN} data",
        f"HSET rq:job:{FOREIGN} status finished",
        f"SET rf:tomb:{FOREIGN} x",
        "HSET rf:cut all 1",
        "HSET rf:cut:other all 1",
        f"XRANGE rf:log:{FOREIGN} - +",
        "XADD rf:ev:other * event x",
        "XADD rf:ev:-nodes * event x",
        f"XADD rf:log:{JOB} * data x",
        f"XADD rq:results:{JOB} * type 1",
        "XADD rf:rep:command * receipt x",
        "HGETALL rf:schedules:other",
        "DEL rf:due",
        "DEL rf:seq",
        "SET rf:seq 0",
        "INCRBY rf:seq 1000000",
        "DECR rf:seq",
        "DEL rf:lanes",
        "SREM rf:lanes agents",
        "DEL rq:queue:agents",
        "LPOP rq:queue:agents",
        "DEL rf:ctl:all",
        "XTRIM rf:ctl:all MAXLEN 0",
        "HSET rf:suspended agents x",
        "HSET rf:cards node-1 x",
        "HSET rf:nodes node-1 x",
        "ZADD rf:leases 9999999999999 node-1/x",
        "HGETALL rf:claims:node-1/x",
        "PUBLISH rq:pubsub:node-1.x {}",
    ],
    "client": [
        "PUBLISH rq:pubsub:node-1.x {}",
        "HSET rf:cut all 1",
        "LPOP rq:queue:agents",
        "HSET rf:cards node-1 x",
        "DEL rf:due",
        "DEL rf:ctl:all",
    ],
    "agent": [
        f"SET rf:tomb:{JOB} x",
        f"DEL rf:tomb:{JOB}",
        "HSET rf:cut all 1",
        f"HDEL rf:cut:{TENANT} all",
        "HDEL rf:suspended agents",
        "XREADGROUP GROUP other other STREAMS rf:ctl:other >",
        "XADD rf:ctl:other * command x",
        "PUBLISH rq:pubsub:other.x {}",
        "PSUBSCRIBE rq:pubsub:*",
    ],
    "controller": [
        "INCRBY rf:seq 1",
        "SADD rf:lanes x",
        "RPUSH rq:queue:agents x",
        "LPOP rq:queue:agents",
        "HSET rf:cards node-1 x",
        "ZADD rf:leases 9999999999999 node-1/x",
        f"XADD rq:results:{JOB} * type 1",
        "XADD rf:rep:command * receipt x",
    ],
    "viewer": [
        f"HSET rq:job:{JOB} status x",
        f"SET rf:tomb:{JOB} x",
        "XADD rf:ctl:all * command x",
        "RPUSH rq:queue:agents x",
        "ZADD rf:due 1 x",
        "PUBLISH rq:pubsub:node-1.x {}",
    ],
}
NEVER = (
    *("FLUSHALL", "KEYS *", "SCAN 0", "CONFIG GET *", "ACL LIST"),
    *("MONITOR", "SHUTDOWN NOSAVE", "PUBLISH c x", "CLIENT KILL ID 1"),
)


@pytest.mark.parametrize("user", DENIED)
def test_what_a_role_must_not_do_is_refused(rig: Rig, user: str) -> None:
    """Command by command, also from within a script: the store says no."""
    name = f"agent-{rig.nodes['a'].name}" if user == "agent" else user
    client = as_user(rig, name)
    done = [line for line in (*DENIED[user], *NEVER) if not _refused(client, line)]
    scripted = [line for line in DENIED[user] if user != "viewer" and not line.startswith("PSUBSCRIBE")]
    by_script = [line for line in scripted if not _refused_in_script(client, line)]
    client.close()
    rig.redis.acl_log_reset()
    assert (done, by_script) == ([], [])


def test_attack_28_a_tenant_s_user_kills_and_stops_its_own_jobs_alone(rig: Rig) -> None:
    """By API with a key of all tenants, by stream and by raw commands: another tenant's job runs on."""
    other = rig.command("sh", "-c", "echo up; sleep 600", tags={"k": "v"})
    rig.wait_output(other, "up")
    with App(home=rig.home, redis_url=url(rig, f"tenant-{TENANT}"), tenant=TENANT) as app:
        assert app.kill(all=True, tenant=TENANT, wait=10) == []
        assert app.kill(tag="k=v", tenant=TENANT, wait=10) == []
        for call in (lambda: app.kill(all=True), lambda: app.kill(tag="k=v"), app.job(other.id).kill):
            with pytest.raises(StoreError, match="use one whose role may"):
                call()
        with pytest.raises(StoreError, match="use one whose role may"):
            app.suspend("agents")
    client = as_user(rig, f"tenant-{TENANT}")
    assert _refused(client, f"SET rf:tomb:{other.id} x")
    assert _refused(client, f"HSET rq:job:{other.id} rf_state killing")
    client.xadd("rf:ctl:all", {"command": "{}", "sig": "x", "why": "held", "job": other.id})
    client.close()
    assert rig.command("true").outcome(20).state == "finished"
    assert rig.state(other) == "running"
    other.kill(wait=20)
    rig.redis.acl_log_reset()


def test_every_key_of_a_mixed_run_has_a_life(rig: Rig) -> None:
    """After jobs of every kind: each key of ours is one of the key table, and has a TTL or an owner."""
    table = [line.split()[0] for line in (keytable.__doc__ or "").splitlines() if line.startswith("    rf:")]
    table += ["rf:cut:<tenant>", "rf:ctl:all", "rf:hosts"]
    known = [re.sub(r"<[^>]*>", "*", name.rstrip(",")) for name in table]
    keys = [key.decode() for key in rig.redis.scan_iter("rf:*")]
    assert len(keys) > 10
    assert [key for key in keys if not any(fnmatchcase(key, name) for name in known)] == []
    lasting = [key for key in keys if rig.redis.ttl(key) == -1]
    assert [key for key in lasting if not any(fnmatchcase(key, name) for name in PERMANENT)] == []


def test_attack_3_a_limited_node_s_user_reaches_its_tenants_and_queues_alone(rig: Rig) -> None:
    """A cheap node's store user neither pops other lanes nor reads other tenants' jobs."""
    role = access.agent("cheap", (TENANT,), ("batch",))
    set_user(rig, role)
    client = as_user(rig, "agent-cheap")
    assert client.lpop("rq:queue:batch") is None
    assert client.lpop("rq:queue:batch@gpu=yes") is None
    assert client.hget(f"rq:job:{JOB}", "data") is None
    for line in ("LPOP rq:queue:agents", "LPOP rq:queue:batches", f"HGET rq:job:{FOREIGN} data"):
        assert _refused(client, line), line
    client.close()
    rig.redis.acl_log_reset()


def _refused(client: redis.Redis, line: str) -> bool:
    try:
        ask(client, *line.split())
    except NoPermissionError:
        return True
    return False


def _refused_in_script(client: redis.Redis, line: str) -> bool:
    words = line.split()
    text = "return redis.call(unpack(ARGV))"
    try:
        client.eval(text, 1, words[1] if words[0] != "XREADGROUP" else "rf:x", *words)
    except redis.ResponseError as error:
        return "ermission" in str(error) or "NOPERM" in str(error)
    return False
