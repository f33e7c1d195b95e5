"""Every script of the kernel on keys that somebody has spoilt: it answers, and leaves nothing without an end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis

from runner.scripts import loader
from runner.wire import ids
from runner.wire.keys import Keys
from tests.support.valkey import Valkey

K = Keys()
JOB = ids.new_job_id("main")
FAR_MS = 9_000_000_000_000
LAST = f"{2**64 - 1}-{2**64 - 1}"
#: Fields that the scripts read as numbers or words of their own.
JUNK = {
    "a": "b",
    "bytes": "zz",
    "count": "-1",
    "used": "nan",
    "next": "1e400",
    "#": "inf",
    "requests": "nan",
    ".version": "9007199254740991",
    ".bytes": "-5",
    ".fence": "0x10",
    "/x": "f 1 1 1 1 - -",
    "w:n1": "zz",
    "s:mail": "x",
    "n:b": "zz",
    "e:b.0": "-1",
    "a:b.0": "{",
    "b:n/b": "1e999",
    f"m:{JOB}": "1 2 3",
}
KINDS = ("string", "list", "zset", "hash", "stream", "full", "letters")
Case = tuple[str, tuple[str, ...], dict[str, object], tuple[bytes, ...]]


def cases() -> Iterator[Case]:
    """Yield (script, keys, document, further arguments) of every call that a node or a client makes."""
    yield from mails()
    asks = (K.ask(JOB), K.asks("main"))
    yield "ask", asks, {"op": "park", "base": "b", "text": "{}", "timeout": 9, "keep": 9, "most": 9, "job": JOB}, ()
    yield "ask", asks, {"op": "use", "base": "b", "era": 0, "job": JOB}, ()
    for op in ("words", "wake"):
        yield "ask", (*asks, K.due()), {"op": op, "job": JOB}, ()
    budget = (K.budget("main", "k"), K.asks("main"))
    charge = {"op": "charge", "from": "n/b", "batch": 1, "used": {"requests": 1}, "ttl": 999}
    yield "budget", budget, charge, ()
    yield "budget", budget, {"op": "hit", "key": "k", "era": 0, "over": "x", "ttl": 999}, ()
    word: dict[str, object] = {"word": "s c", "ask": "b.0", "job": JOB, "key": "k", "command": "c"}
    yield "decide", (*asks, K.due()), {"form": "ask", **word}, ()
    yield "decide", (*budget, K.due()), {"form": "budget", **word}, ()
    for period in (0, 999):
        row = {"count": 1, "period": period, "member": "m"}
        yield "quota", (K.quota("main", "q"),), {"op": "take", "rows": [row], "life": 999}, ()
    for op in ("keep", "drop"):
        yield "quota", (K.quota("main", "q"),), {"op": op, "held": ["m"], "life": 999}, ()
    yield from files()
    artifact = {"gen": "ab", "number": 0, "most": 9999, "ttl": 60, "name": JOB, "attempt": 1, "pieces": 1}
    for op in ("piece", "finish", "drop"):
        yield "artifact", (K.artifacts(JOB),), {"op": op, **artifact}, (b"x y",)


def mails() -> Iterator[Case]:
    """Yield every call about a mailbox and a topic."""
    box = (K.mail("main", "d"), K.box("main", "d"), K.dead("main", "d"))
    for topic in (False, True):
        head = {"tenant": "main", "box": "d", "topic": topic, "group": JOB if topic else "mail", "node": "n1"}
        send = {"sig": "s", "until": FAR_MS, "size": 1, "corr": "c", "confirm": True, "most": 4, "most_bytes": 99}
        receive = {"count": 4, "bytes": 999, "hold_ms": 1, "most_times": 2, "wait": True}
        one = {"id": "1-1", "times": 1, "taken": True, "sig": "s", "corr": "c", "wait": True, "most": 4}
        for op in ("send", "receive", "take", "ack", "keep", "back", "bury", "look"):
            more = {"ids": [["1-1", 1]], "why": "x", **one, **receive, **(send if op == "send" else {})}
            yield "mail", box, {**head, "op": op, **more}, (b"x",)


def files() -> Iterator[Case]:
    """Yield every call about a tree of files."""
    tree = (K.state(JOB), K.state_data(JOB))
    base: dict[str, object] = {"known": 0, "ttl": 60, "depth": 0, "cap": 9999, "file": 99, "entries": 9, "entry": 64}
    data = {"data": 2, "ttl": 0, "token": "t", "skip": 0}
    changes = (
        {"op": "put", "path": "/x", "base": 0, **data},
        {"op": "add", "path": "/x", "base": 1, **data},
        {"op": "dir", "path": "/y"},
        {"op": "del", "path": "/x", "base": 1},
        {"op": "mov", "path": "/x", "base": 1, "to": "/z", "over": 0},
    )
    for fence in (0, 1):
        head = {**base, "owner": "o", "merge": True, "fence": fence}
        for op in ("load", "read"):
            yield "files", tree, {**head, "op": op, "list": [{"path": "/x"}]}, ()
        for change in changes:
            yield "files", tree, {**head, "op": "change", "list": [change]}, (b"zz",)


def spoil(client: redis.Redis, key: str, kind: str) -> None:
    """Make a key something that its readers don't expect; it has an end of its own."""
    client.delete(key)
    if kind == "string":
        client.set(key, "x")
    elif kind == "list":
        client.rpush(key, "a")
    elif kind == "zset":
        client.zadd(key, {"a": 1, "b": float("inf")})
    elif kind == "hash":
        for name, text in JUNK.items():
            client.hset(key, name, text)
    elif kind == "full":
        client.xadd(key, {"a": "b"}, id=LAST)
    else:
        letters = [{"a": "b"}, {"until": str(FAR_MS), "letter": "x", "size": "zz", "count": "-3", "corr": "c"}]
        for letter in letters[: 2 if kind == "letters" else 1]:
            client.xadd(key, letter)  # type: ignore[arg-type] # redis' own field type is invariant
        if kind == "letters":
            client.xgroup_create(key, "mail", "0")
    client.expire(key, 60)


@pytest.mark.parametrize("name", ["artifact", "ask", "budget", "decide", "files", "mail", "quota"])
def test_no_script_of_the_kernel_stops_at_a_spoilt_key(valkey: Valkey, name: str) -> None:
    """Whatever stands in the place of a key: the script answers, and every key that it leaves has an end."""
    with valkey.client() as client:
        for script, keys, document, more in [case for case in cases() if case[0] == name]:
            for key in (*keys, K.bell("n1"), K.job(JOB)):
                for kind in KINDS:
                    if key == K.due():
                        continue
                    client.flushall()
                    spoil(client, key, kind)
                    text = json.dumps({"rq": K.rq, "rf": K.rf, **document})
                    client.eval(loader.load(script).text, len(keys), *keys, text, *more)
                    left = [one for one in client.keys("*") if client.ttl(one) == -1 and one != K.due().encode()]
                    assert left == [], (document, kind, key)
        client.flushall()
