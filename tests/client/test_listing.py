"""What ps, show and nodes read."""

from __future__ import annotations

from tests.client.paper import KEYS, Fleet


def test_jobs_are_listed_newest_first(fleet: Fleet) -> None:
    """Every job of the tenant appears with what is known; a foreign id in the list harms nobody."""
    node = fleet.node("n1")
    first, second = fleet.app.command(["one"], tags={"a": "b"}), fleet.app.command(["two"])
    other = fleet.app.command(["x"], tenant="acme")
    node.claim(second.id)
    node.finish(first.id, "failed", reason="exit", exit_code=2)
    fleet.store.zadd(KEYS.active("main"), {"\x1b]0;x": 99, "main-none": 98})
    listed = fleet.app.jobs()
    assert [(view.job, view.task, view.state) for view in listed] == [
        (second.id, "two", "running"),
        (first.id, "one", "failed"),
    ]
    assert (listed[0].node, listed[0].attempt, listed[0].verified) == ("n1", 1, False)
    assert (listed[1].exit_code, listed[1].tags, listed[1].verified) == (2, {"a": "b"}, True)
    assert listed[0].enqueued_at is not None
    assert listed[0].enqueued_at.endswith("Z")
    assert [view.job for view in fleet.app.jobs(tenant="acme")] == [other.id]
    fleet.store.zrem(KEYS.active("main"), "\x1b]0;x", "main-none")
    assert [view.job for view in fleet.app.jobs(limit=1)] == [second.id]


def test_show_says_why_a_job_waits(fleet: Fleet) -> None:
    """A queued job compares its lane with the live nodes."""
    job = fleet.app.command(["x"], queue="q", labels={"gpu": "yes"})
    assert (job.status().waiting or "").startswith("no node is alive")
    node = fleet.node("n1")
    node.join(queues=("other",))
    assert job.status().waiting == "no live node serves queue q"
    node.join(queues=("q",))
    assert job.status().waiting == "no live node of queue q meets gpu=yes"
    plain = fleet.app.command(["x"], queue="q")
    assert plain.status().waiting is None
    node.join(busy=2)
    assert plain.status().waiting == "every slot of the fitting nodes is busy"


def test_a_node_without_a_lease_is_lost(fleet: Fleet) -> None:
    """Nodes are listed by name, with the state that the lease shows; broken records are left out."""
    fleet.node("b").join()
    fleet.node("a").join(lease_ms=-1)
    fleet.store.hset(KEYS.nodes(), "c", "{}")
    assert [(node.name, node.state, node.slots) for node in fleet.app.nodes()] == [("a", "lost", 2), ("b", "ready", 2)]
