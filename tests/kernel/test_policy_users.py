"""Quotas, questions and budgets under the store's users: nodes count, operators answer, nobody lifts his own bound."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from node_agent.kernel.errors import CallError
from node_agent.policycalls import Quota
from runner.scripts import loader
from runner.wire import access
from runner.wire.flow import Budget
from tests.kernel import ledger
from tests.kernel.ledger import KEYS, decision, node, question, run, until, worded
from tests.kernel.test_approval import ASK, call
from tests.kernel.test_budget import frozen, started, told
from tests.support.valkey import Valkey

PASSWORD = "not-a-secret"
DIGEST = hashlib.sha256(PASSWORD.encode()).hexdigest()


@pytest.fixture
def users(valkey: Valkey) -> Iterator[Valkey]:
    """A store with the users of a node, an operator and two clients."""
    roles = (access.agent("n1", ("main",)), access.controller(), access.client(), access.tenant("main"))
    with valkey.client() as client:
        for role in roles:
            head, *selectors = role.line(password_sha256=DIGEST).removeprefix("user ").split(" (")
            client.execute_command("ACL", "SETUSER", *head.split(), *(f"({selector}" for selector in selectors))
        client.acl_log_reset()
        yield valkey
        client.acl_deluser(*(role.user for role in roles))


def _as(users: Valkey, user: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(users.socket), username=user, password=PASSWORD)


def _decide(client: redis.Redis, names: list[str], **document: str) -> object:
    words = json.dumps({"rq": KEYS.rq, "rf": KEYS.rf, **document})
    return client.eval(loader.load("decide").text, len(names), *names, words)


def test_a_node_and_an_operator_can_do_all_of_it_as_their_own_users(users: Valkey) -> None:
    """Counting, asking, holding, answering and parking work, and the store's log of refusals stays empty."""

    async def main() -> None:
        async with node(users, "n1", policy=ASK, wait_s=0.05, password=PASSWORD) as on:
            with _as(users, "controller") as operator:
                (await on.quotas.take("main", "j.1", (Quota("x", 1, 60.0), Quota("y", 1, 0.0))))()
                who = on.caller(ledger.job_of(tools=("deploy",)))
                with pytest.raises(CallError):
                    await call(on, who)
                ask, _ = await question(on, who.job)
                text = worded(decision("approve", job=who.job, ask=ask), on.operator)
                names = [KEYS.ask(who.job), KEYS.asks("main"), KEYS.due()]
                reply = cast("list[bytes]", _decide(operator, names, form="ask", word=text, ask=ask, job=who.job))
                assert reply[0] == b"stored"
                await call(on, who)
                spender = await started(on, ledger.job_of(Budget("k", requests=1)))
                on.budgets.metered(told(spender.attempt, requests=2))
                await until(lambda: frozen(spender), "frozen")
                word = decision("approve", budget="k", add={"requests": 5})
                names = [KEYS.budget("main", "k"), KEYS.asks("main")]
                _decide(operator, names, form="budget", word=worded(word, on.operator), key="k", command=word.id)
                await until(lambda: not frozen(spender), "goes on")

    run(main())
    with users.client() as client:
        log = cast("list[dict[str, Any]]", client.acl_log())
    assert [one for one in log if one["object"] != "client|setinfo"] == []


@pytest.mark.parametrize("user", ["client", "tenant-main"])
def test_who_enqueues_neither_lifts_nor_forgets_a_bound(users: Valkey, user: str) -> None:
    """A client sees how its budget stands; it can't set it back, write a word, or touch a quota."""
    with users.client() as client:
        client.hset(KEYS.budget("main", "k"), "tokens", "5")
        client.expire(KEYS.budget("main", "k"), 60)
    with _as(users, user) as client:
        assert client.hget(KEYS.budget("main", "k"), "tokens") == b"5"
        for command in (
            ("HSET", KEYS.budget("main", "k"), "tokens", "0"),
            ("DEL", KEYS.budget("main", "k")),
            ("HSET", KEYS.ask("main-01hzzzzzzzzzzzzzzzzzzzzzzz"), "w:x", "y"),
            ("ZADD", KEYS.asks("main"), "1", "budget k"),
            ("DEL", KEYS.quota("main", "x")),
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
        with pytest.raises(ResponseError):
            _decide(
                client, [KEYS.budget("main", "k"), KEYS.asks("main")], form="budget", word="x", key="k", command="c"
            )
