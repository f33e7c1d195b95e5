"""Who may do what in the store: the store's users by role, beside the key table (keys.py).

Called by deploy/users.py, which writes deploy/redis/users.acl, and by the tests, which try each role on a real server.
Must never name a key that is not in the key table or RQ's, nor give a role what none of its calls needs.

A script runs with its caller's rights: the first grant of a role lets it be called at all, the others are what its
commands may touch. Each grant is a selector of its own, so that a right on one key is none on another. What the store
can't tell apart is told by signatures: whoever may write a job's hash may write nonsense into it, but nothing that a
node or a client believes.

    client      enqueue, kill, pause and look, for every tenant
    tenant      the same for the keys of one tenant; of what all share it may add and remove entries, never delete
    agent       one node: turns, leases, events, results; reads tombstones, cutoffs and suspended queues, writes none
    controller  kill, pause, drain, suspend, RQ's stop command, and look; can't enqueue
    viewer      look, with RQ's own tools, too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runner.wire import ids
from runner.wire.keys import Keys

__all__ = ["Grant", "Role", "agent", "client", "controller", "tenant", "viewer"]

_CONNECT: Final = "auth hello ping info time select client|setname multi exec discard"
_READ: Final = (
    "exists ttl pttl type get mget strlen hget hmget hgetall hexists hlen hstrlen hkeys llen lrange lindex lpos scard "
    "smembers sismember zcard zcount zrange zrangebyscore zrevrange zrevrangebyscore zrank zscore xlen xrange "
    "xrevrange xread"
)
_WRITE: Final = (
    "set del expire pexpire persist hset hdel hincrby sadd srem zadd zrem zremrangebyrank zremrangebyscore xadd"
)
#: What a turn and its siblings need besides.
_SERVE: Final = (
    "lpush rpush lpop blpop lrem ltrim incr srandmember xreadgroup xack xgroup|create xinfo|stream eval evalsha "
    "script|load"
)
#: Keys that name a tenant; each ``{}`` is its name.
_OF_TENANT: Final = (
    *("rq:job:{}-*", "rf:act:{}", "rf:named:{}", "rf:ev:{}", "rf:tomb:{}-*", "rf:cut:{}", "rf:schedules:{}"),
    *("rf:open:{}-*", "rf:then:{}-*", "rf:uniq:{}:*", "rf:rate:{}:*", "rf:plan:{}:*", "rf:conc:{}:*", "rf:line:{}:*"),
)
#: Which numbers of children are given: by nodes alone, so that nobody hides a child from a kill of its parent.
_KIDS: Final = ("rf:kids:{}-*",)
_SEEN_BY_TENANT: Final = (
    *("rq:results:{}-*", "rf:log:{}-*", "rf:jev:{}-*", "rf:art:{}-*", *_KIDS),
    *("rf:ev:-nodes", "rf:rep:*", "rf:cards", "rf:nodes", "rf:leases", "rf:clock"),
    *("rf:suspended", "rf:cut", "rf:horizon", "rf:seq", "rf:lanes", "rf:ticks", "rf:leader"),
)
#: Written by nodes and by operators' words, so that nobody lifts a budget of his own.
_ASKED: Final = ("rf:ask:{}-*", "rf:asks:{}", "rf:budget:{}:*")
_QUOTAS: Final = ("rf:quota:{}:*",)
#: What jobs keep: their nodes' alone.
_KEPT: Final = ("rf:state:{}-*", "rf:statedata:{}-*", "rf:mem:{}:*", "rf:memdata:{}:*")
#: What jobs write to each other: their nodes' alone.
_MAIL: Final = ("rf:mail:{}:*", "rf:box:{}:*", "rf:dead:{}:*")
_POST: Final = "xdel xclaim xpending xreadgroup xack xgroup|create xgroup|destroy xinfo|groups"
#: What reads a stream of anchors, and says what it has lost.
_HEADS: Final = "type xlen xrange xrevrange xread xinfo|stream"
_REGISTRIES: Final = ("rq:scheduled:*", "rq:deferred:*", "rq:canceled:*")


@dataclass(frozen=True, slots=True)
class Grant:
    """Commands on keys. ``read``: only what reads them."""

    commands: str
    keys: tuple[str, ...]
    read: bool = False

    def words(self, keys: Keys) -> str:
        """Return it in the form of the store's rules."""
        mark = "%R~" if self.read else "~"
        names = [mark + _prefixed(name, keys) for name in self.keys]
        return " ".join([*names, *(f"+{command}" for command in self.commands.split())])


@dataclass(frozen=True, slots=True)
class Role:
    """One user of the store. ``whole``: what it may do anywhere among these keys; ``grants``: each for itself.

    ``publishes``, ``listens``: channels of RQ's own commands.
    """

    user: str
    grants: tuple[Grant, ...]
    whole: Grant | None = None
    publishes: str = ""
    listens: str = ""

    def line(self, keys: Keys | None = None, *, password_sha256: str | None = None) -> str:
        """Return the user's line of an ACL file; without a password nobody can log in as it."""
        names = keys or Keys()
        login = f"#{password_sha256}" if password_sha256 else ""
        head = f"user {self.user} on resetpass {login} resetkeys resetchannels -@all"
        words = [*head.split(), *(f"+{command}" for command in _CONNECT.split())]
        for channels, commands in ((self.publishes, "publish"), (self.listens, "psubscribe punsubscribe")):
            if channels:
                words += [f"&{_prefixed(channels, names)}", *(f"+{command}" for command in commands.split())]
        if self.whole is not None:
            words.append(self.whole.words(names))
        words += [f"({grant.words(names)})" for grant in self.grants]
        return " ".join(words)


def client() -> Role:
    """Return the user of applications that enqueue for every tenant."""
    return Role("client", _asking("*", ("*",)))


def tenant(name: str, queues: Sequence[str] = ("*",)) -> Role:
    """Return the user of one tenant's applications, for its queues. Raises GrammarError."""
    return Role(f"tenant-{ids.check_tenant(name)}", _asking(name, queues))


def agent(node: str, tenants: Sequence[str] = ("*",), queues: Sequence[str] = ("*",)) -> Role:
    """Return the user of one node, for the tenants and queues that its card names. Raises GrammarError."""
    ids.check_node(node)
    names = (*_OF_TENANT, "rq:results:{}-*", "rf:log:{}-*", "rf:jev:{}-*", "rf:art:{}-*", *_KIDS, *_ASKED, *_QUOTAS)
    own = tuple(name.format(one) for one in tenants for name in names)
    mine = tuple(name for name in own if not name.startswith(("rf:tomb:", "rf:cut:")))
    theirs = tuple(name for name in own if name.startswith(("rf:tomb:", "rf:cut:")))
    shared = (
        *("rf:seq", "rf:wake:*", "rf:lanes", "rf:clock", "rf:horizon", "rf:due", "rf:ticks", "rf:leader", "rf:leases"),
        *("rf:claims:*", "rf:nodes", "rf:hosts", "rf:cards", "rf:doomed", f"rf:ctl:{node}", "rf:ctl:all", "rf:rep:*"),
        *("rf:ev:-nodes", "rq:queues", "rq:workers", "rq:workers:*", "rq:worker:*", "rq:execution:*"),
        *("rq:executions:*", "rq:wip:*", "rq:finished:*", "rq:failed:*", *_REGISTRIES),
    )
    everything = Grant(f"{_READ} {_WRITE} {_SERVE}", (*shared, *mine, *_lists(queues)))
    # The names that a script is given; what it then does to them is asked again, command by command.
    named = Grant("eval evalsha", ("rf:*", "rq:*"))
    seen = Grant(_READ, (*theirs, "rf:cut", "rf:suspended"), read=True)
    mail = Grant(f"{_READ} {_WRITE} {_POST}", tuple(name.format(one) for one in tenants for name in _MAIL))
    held = tuple(name.format(one) for one in tenants for name in _KEPT)
    kept = Grant("type hget hmget hgetall hkeys hlen hstrlen hset hdel expire del", held)
    # The record's heads are added, and read to compare; nothing there is taken back (attack 31).
    anchors = (Grant("xadd", (f"rf:anchor:{node}",)), Grant(_HEADS, (f"rf:anchor:{node}",), read=True))
    bells = Grant("xadd xread expire del", ("rf:bell:*",))
    return Role(f"agent-{node}", (named, seen, mail, kept, *anchors, bells), everything, listens=f"rq:pubsub:{node}.*")


def controller() -> Role:
    """Return the user of operators."""
    held = tuple(name.format("*") for name in (*_OF_TENANT, *_ASKED))
    return Role(
        "controller",
        (
            Grant("eval evalsha", ("rf:*", "rq:*")),
            Grant(_READ, ("rf:*", "rq:*"), read=True),
            Grant(_WRITE, (*held, "rf:cut")),
            Grant("hset hdel", ("rf:suspended",)),
            Grant("xadd", ("rf:ctl:*",)),
            Grant(_HEADS, ("rf:anchor:*",), read=True),
            Grant("zadd zrem", ("rf:due", "rf:doomed", *_REGISTRIES)),
            Grant("lrem lpush", ("rq:queue:*",)),
            Grant("llen lpush ltrim expire", ("rf:wake:*",)),
        ),
        publishes="rq:pubsub:*",
    )


def viewer() -> Role:
    """Return the user of those who only look. RQ's tools tidy its registries when they count them."""
    registries = ("rq:finished:*", "rq:failed:*", "rq:executions:*", "rq:canceled:*", "rq:wip:*")
    heads = Grant(_HEADS, ("rf:anchor:*",), read=True)
    return Role("viewer", (Grant(_READ, ("rf:*", "rq:*"), read=True), heads, Grant("zremrangebyscore", registries)))


def _asking(name: str, queues: Sequence[str]) -> tuple[Grant, ...]:
    own = tuple(key.format(name) for key in _OF_TENANT)
    seen = tuple(key.format(name) for key in (*_SEEN_BY_TENANT, *_ASKED))
    return (
        Grant("eval evalsha", ("rf:*", "rq:*")),
        Grant(_READ, (*own, *seen, *_lists(queues)), read=True),
        Grant(_WRITE, own),
        Grant("incr", ("rf:seq",)),
        Grant("sadd", ("rf:lanes", "rq:queues")),
        Grant("scard sismember", ("rf:lanes",)),
        Grant("set", ("rf:horizon",)),
        Grant("zadd zrem zscore", ("rf:due", "rf:ticks", "rf:doomed", *_REGISTRIES)),
        Grant("rpush lpush lrem", _lists(queues)),
        Grant("llen lpush ltrim expire", ("rf:wake:*",)),
        Grant("xadd", ("rf:ctl:*",)),
        Grant(_HEADS, ("rf:anchor:*",), read=True),
    )


def _lists(queues: Sequence[str]) -> tuple[str, ...]:
    """The lanes of queues: the queue's own, and those with requirements."""
    if "*" in queues:
        return ("rq:queue:*",)
    return tuple(f"rq:queue:{ids.check_name(queue, 'queue')}{rest}" for queue in queues for rest in ("", "@*"))


def _prefixed(name: str, keys: Keys) -> str:
    prefix, rest = name[:3], name[3:]
    return (keys.rq if prefix == "rq:" else keys.rf) + rest
