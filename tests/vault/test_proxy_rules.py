"""What a rule says of a proxied secret's library, field and bounds: who is told, and that a reload only narrows."""

from __future__ import annotations

import asyncio
import base64
import json
import socket

import pytest

from broker.client import LeaseRefused, SecretAsk
from broker.vault.leases import Leases
from broker.vault.rules import Ask, parse
from tests.support import scratch
from tests.vault.conftest import LEVELS, VALUES
from tests.vault.stand import Job, Stand

RULE = """
[[allow]]
secrets = ["{name}"]
tenants = ["*"]
tasks = ["*"]
hosts = ["*"]
{more}
"""


def policy(**rules: str) -> str:
    """Return a policy with a rule for each secret."""
    return "version = 1\n" + "".join(RULE.format(name=name, more=more) for name, more in rules.items())


def test_a_lease_says_which_library_and_a_use_says_the_bounds() -> None:
    """The agent learns the library of each secret; the egress process the field and the bounds, with each use."""
    rules = policy(KEY='sdk = "anthropic"\nbody_bytes = 9\nat_once = 2', OTHER='field = "query:k"\nbody_bytes = 5')

    async def work(own: Stand) -> None:
        job, client = Job("main-1.1", LEVELS[0]), own.client()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near, far:
            opening = await client.open(
                job.ask(SecretAsk("KEY", "proxy", "a.example"), SecretAsk("OTHER", "proxy", "b.example")), job.fds
            )
            assert (opening.pending, opening.sdks) == ((), {"KEY": "anthropic"})
            await client.proxy("main-1.1", near.fileno())
            far.settimeout(5)
            for _ in range(2):
                far.send(b'{"op":"use","id":1,"host":"a.example"}')
                told = json.loads(far.recv(1 << 16))
                assert (told["body_bytes"], told["at_once"]) == (9, 2)
            far.send(b'{"op":"use","id":1,"host":"b.example"}')
            told = json.loads(far.recv(1 << 16))
            (key,) = told["keys"]
            assert (key["field"], "header" in key, "at_once" in told) == ("query:k", False, False)
            assert base64.b64decode(key["text"]) == base64.b64decode(key["value"]) == VALUES["OTHER"]
        await client.close("main-1.1")
        await client.stop()
        job.end()

    with scratch.folder() as home:
        own = Stand(home, VALUES, rules)
        own.start()
        asyncio.run(work(own))
        assert own.stop() == 0


def test_attack_15_a_field_for_a_model_s_host_is_refused_before_the_start() -> None:
    """A rule with a pattern gives its secret for other hosts; the job that wants it for a model's does not start."""

    async def work(own: Stand) -> None:
        job, client = Job("main-1.1", LEVELS[0]), own.client()
        with pytest.raises(LeaseRefused, match="words"):
            await client.open(job.ask(SecretAsk("KEY", "proxy", "api.openai.com")), job.fds)
        await client.stop()
        job.end()

    with scratch.folder() as home:
        own = Stand(home, VALUES, policy(KEY='field = "json:prompt"'))
        own.start()
        asyncio.run(work(own))
        assert own.stop() == 0


def test_a_reload_narrows_bounds_and_never_widens_them() -> None:
    """A smaller bound holds for live leases, a larger one and none do not; field and library stay as they were."""
    ask = Ask("KEY", "proxy", "main", "q", task="t", host="a.example")
    leases = Leases(parse(policy(KEY='body_bytes = 9\nsdk = "openai"')))
    lease = leases.open("main-1.1", "main-1", [ask], ["KEY"], 0.0).lease
    assert lease is not None
    granted = lease.grants["KEY"]
    for rule, body, at_once in (
        ("body_bytes = 20", 9, None),
        ("body_bytes = 5\nat_once = 3", 5, 3),
        ("at_once = 4", 5, 3),
        ('field = "query:k"', 5, 3),
    ):
        assert leases.reload(parse(policy(KEY=rule))) == ()
        assert (granted.body_bytes, granted.at_once, granted.sdk, granted.field) == (body, at_once, "openai", "")


def test_two_fields_share_a_host_and_two_headers_do_not() -> None:
    """A header and fields go into one request; two secrets for one header are refused as before."""
    rules = parse(policy(A='field = "query:a"', B='field = "query:b"', C="", D=""))

    def opened(*names: str) -> str:
        asks = [Ask(name, "proxy", "main", "q", task="t", host="a.example") for name in names]
        return Leases(rules).open("main-1.1", "main-1", asks, ["A", "B", "C", "D"], 0.0).message

    assert opened("A", "B", "C") == ""
    assert "one header" in opened("C", "D")
