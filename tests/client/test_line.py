"""The short way of an enqueue: one answer per call, whatever interrupts it, however many call at a time."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.exceptions import ResponseError

from runner import line, request
from runner.errors import StoreError
from runner.line import Line, packed
from tests.client.paper import KEYS, Fleet
from tests.support.valkey import Valkey

TASK = "sample:add"


@pytest.fixture
def client(valkey: Valkey) -> redis.Redis:
    """A client of the store."""
    made = valkey.client()
    made.flushall()
    return made


def test_threads_get_their_own_answers(client: redis.Redis) -> None:
    """Many threads at a time share a few connections, and nobody reads another one's answer."""
    with client:
        short = Line(client)

        def echo(number: int) -> bool:
            word = b"%d" % number
            return short.call(packed([b"ECHO", word])) == word

        with ThreadPoolExecutor(12) as pool:
            assert all(pool.map(echo, range(2000)))
        assert len(short._idle) <= line.MOST_KEPT


def test_an_interrupted_call_leaves_no_answer_behind(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is interrupted between question and answer closes the connection: the next one gets its own answer."""
    with client:
        short = Line(client)
        assert short.call(packed([b"ECHO", b"first"])) == b"first"
        (connection,) = short._idle

        def interrupted(*_: object, **__: object) -> object:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(connection, "read_response", interrupted)
            with pytest.raises(KeyboardInterrupt):
                short.call(packed([b"ECHO", b"second"]))
        assert short._idle == []
        assert short.call(packed([b"ECHO", b"third"])) == b"third"


def test_one_connection_serves_who_does_one_thing_at_a_time(fleet: Fleet) -> None:
    """Enqueues and other calls in turn never hold a connection each."""
    client = fleet.app.client()
    for _ in range(3):
        client.enqueue([request.build({}, task=TASK)])
        assert client.now_ms()
        assert list(fleet.app.jobs())
    assert len(client._redis.connection_pool._in_use_connections) == 0
    assert len(client._redis.connection_pool._available_connections) == 1


def test_an_error_of_the_store_is_an_answer(client: redis.Redis) -> None:
    """A refused command keeps its connection."""
    with client:
        short = Line(client)
        with pytest.raises(ResponseError):
            short.call(packed([b"NOSUCHCOMMAND"]))
        assert len(short._idle) == 1
        assert short.call(packed([b"ECHO", b"next"])) == b"next"


def test_a_fork_opens_its_own_connection(client: redis.Redis) -> None:
    """A child never writes to its parent's connection."""
    with client:
        short = Line(client)
        mine = short.call(packed([b"CLIENT", b"ID"]))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = os.fork()
            if child == 0:
                found = -1
                try:
                    found = short.call(packed([b"CLIENT", b"ID"]))  # type: ignore[assignment]  # a number
                finally:
                    theirs.send(b"%d" % found)
                    os._exit(0)
            other = int(ours.recv(32))
            os.waitpid(child, 0)
        assert other not in (-1, mine)
        assert short.call(packed([b"CLIENT", b"ID"])) == mine


def test_connections_that_the_store_closed_lose_no_job(fleet: Fleet) -> None:
    """After the store closed every connection the next enqueue arrives, once."""
    client = fleet.app.client()
    jobs = [request.build({}, task=TASK) for _ in range(3)]
    client.enqueue(jobs[:1])
    fleet.store.client_kill_filter(_type="normal", skipme=True)
    assert client.enqueue(jobs[1:2]) == [2]
    fleet.store.script_flush()
    assert client.enqueue(jobs[2:]) == [3]
    assert fleet.store.llen(KEYS.queue("agents")) == 3


def test_an_answer_that_got_lost_makes_no_second_job(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way fails after the script ran: the long way finds the jobs of the batch, and returns their numbers."""
    client = fleet.app.client()
    batch = [request.build({}, task=TASK) for _ in range(3)]
    honest = client._line.call

    def lose(command: bytes) -> object:
        honest(command)
        raise redis.exceptions.ConnectionError("lost")

    client.enqueue([request.build({}, task=TASK)])
    monkeypatch.setattr(client._line, "call", lose)
    assert client.enqueue(batch) == [2, 3, 4]
    assert fleet.store.llen(KEYS.queue("agents")) == 4


def test_a_store_that_is_away_is_a_store_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way has an answer: the caller learns that nothing is known."""
    client = fleet.app.client()

    def away(*_: object) -> object:
        raise redis.exceptions.TimeoutError("no answer")

    monkeypatch.setattr(client._line, "call", away)
    monkeypatch.setattr(client._redis, "evalsha", away)
    with pytest.raises(StoreError):
        client.enqueue([request.build({}, task=TASK)])


def test_what_is_not_plain_never_takes_the_plain_script(fleet: Fleet) -> None:
    """A job with a rule, in a batch of plain ones, has its rule kept; by itself the plain script refuses it."""
    client = fleet.app.client()
    plain, later = request.build({}, task=TASK), request.build({"countdown": 60.0}, task=TASK)
    client.enqueue([plain, later])
    assert fleet.store.llen(KEYS.queue("agents")) == 1
    assert fleet.store.zcard(KEYS.due()) == 1
    seen = threading.Event()
    original = client._put

    def forced(_: str, keys: object, args: object) -> object:
        seen.set()
        return original("enqueue_plain", keys, args)  # type: ignore[arg-type]  # as given

    client._put = forced  # type: ignore[method-assign,assignment]  # the client of this test alone
    with pytest.raises(StoreError, match="NO_RULES"):
        client.enqueue([request.build({"countdown": 60.0}, task=TASK)])
    assert seen.is_set()
    assert fleet.store.llen(KEYS.queue("agents")) == 1
