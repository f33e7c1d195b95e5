"""From a call to a signed job in the store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_type

import pytest

from runner import context, signing
from runner.app import App
from runner.context import Attempt, current_job, enter, leave
from runner.errors import ConfigError, EnqueueError, InsideJobError, NotInJobError, TaskNameError, UsageError
from runner.grants import Grants
from runner.task import REGISTRY, Task
from runner.wire import ids
from runner.wire.envelope import Domain
from runner.wire.errors import ValueTypeError
from tests.client import sample
from tests.client.paper import KEYS, Fleet
from tests.support import scratch

if TYPE_CHECKING:
    assert_type(sample.add(1), int)
    assert_type(sample.add.delay(1).result(), int)
    assert_type(sample.research.apply_async(("x",)).result(), dict[str, str])
    assert_type(App().command(["x"]).result(), None)


def task_of(fleet: Fleet) -> Task[..., int]:
    """The sample task, bound to the test's fleet."""
    return Task(sample.add.function, fleet.app.place, sample.add.options)


def test_a_task_is_still_its_function() -> None:
    """Calling a task runs it in place; it keeps name, docs and signature, and is registered."""
    assert sample.add(1, right=2) == 3
    assert (sample.add.__name__, sample.add.__doc__) == ("add", "Add two numbers.")
    assert REGISTRY["tests.client.sample:add"] is sample.add
    assert sample.add.function.__module__ == "tests.client.sample"


def test_delay_signs_what_was_asked(fleet: Fleet) -> None:
    """The envelope carries task, arguments, grants, limits and tags, and verifies under the client's key."""
    job = task_of(fleet).delay(1, right=2)
    spec, data = fleet.envelope(job.id)
    assert signing.verify(fleet.app.client().signer.public, Domain.JOB, data.envelope, data.signature)
    assert (spec.id, spec.task, spec.args, spec.kwargs) == (job.id, "tests.client.sample:add", (1,), {"right": 2})
    assert (spec.queue, spec.retry.count, spec.limits.timeout_s, spec.tags) == ("agents", 2, 30.0, {"team": "acme"})
    assert spec.grants.memory_bytes == 1 << 30
    assert [(grant.path, grant.mode) for grant in spec.grants.paths] == [("/data", "read")]
    assert fleet.store.lrange(KEYS.queue("agents"), 0, -1) == [job.id.encode()]


def test_a_call_s_options_replace_the_task_s_and_tags_join(fleet: Fleet) -> None:
    """apply_async changes one call only."""
    task = task_of(fleet)
    job = task.apply_async(
        (1,), tags=["run=7"], queue="fast", labels={"gpu": "yes"}, node="n1", retries=0, tenant="acme"
    )
    spec, _ = fleet.envelope(job.id)
    assert (spec.queue, spec.tenant, spec.node, spec.labels) == ("fast", "acme", "n1", {"gpu": "yes"})
    assert (spec.tags, spec.retry.count) == ({"team": "acme", "run": "7"}, 0)
    assert fleet.store.llen(KEYS.queue("fast@gpu=yes,node=n1")) == 1
    assert fleet.envelope(task.delay(1).id)[0].queue == "agents"


def test_a_command_travels_as_words(fleet: Fleet) -> None:
    """app.command signs argv, environment, folder and grants."""
    job = fleet.app.command(
        ["sh", "-c", "echo hi"], grants=Grants(write=("/srv/x:all",), pids=9), env={"A": "1"}, cwd="/srv/x", fresh=True
    )
    spec, _ = fleet.envelope(job.id)
    assert (spec.argv, spec.env, spec.cwd, spec.profile) == (("sh", "-c", "echo hi"), {"A": "1"}, "/srv/x", "fresh")
    assert (spec.grants.paths[0].path, spec.grants.paths[0].all, spec.grants.pids) == ("/srv/x", True, 9)
    assert spec.name == "sh"


def test_wrong_calls_fail_before_anything_is_sent(fleet: Fleet) -> None:
    """Bad arguments, options and values are errors at the call, with the path to the value."""
    task = task_of(fleet)
    with pytest.raises(TypeError):
        task.delay(1, 2, 3)
    with pytest.raises(TypeError):
        sample.add.delay(wrong=1)  # type: ignore[call-arg]  # type checkers see it too
    with pytest.raises(ValueTypeError, match=r"args\[0\]: .*: pass sorted"):
        task.delay({1, 2})
    with pytest.raises(ValueTypeError, match=r"kwargs\.right"):
        task.delay(1, right=float("nan"))
    with pytest.raises(UsageError, match="no option 'etta'"):
        task.apply_async((1,), etta=5)  # type: ignore[call-arg]  # what a typo looks like at run time
    with pytest.raises(UsageError, match="list of words"):
        fleet.app.command("rm -rf /")
    with pytest.raises(UsageError):
        fleet.app.command([])
    with pytest.raises(UsageError):
        fleet.app.command(["a"], queue="no spaces")
    with pytest.raises(UsageError):
        fleet.app.command(["a"], timeout=0)
    with pytest.raises(EnqueueError, match="can't be written"):
        fleet.app.command(["\ud800"])
    with pytest.raises(EnqueueError, match="the limit is"):
        fleet.app.command(["x" * (1 << 20)])
    assert not fleet.store.exists(KEYS.queues())


def test_tasks_need_a_name_that_a_node_can_find(fleet: Fleet) -> None:
    """Inner functions, lambdas, async functions and the program's own functions are refused with the fix."""

    def inner() -> None:
        """Not at the top."""

    async def later() -> None:
        """Not plain."""

    with pytest.raises(TaskNameError, match="top of its module"):
        fleet.app.task()(inner)
    with pytest.raises(UsageError, match=r"asyncio\.run"):
        fleet.app.task()(later)
    main = Task(sample.add.function, fleet.app.place, {})
    main.name = "__main__:add"
    with pytest.raises(TaskNameError, match="move it to a module"):
        main.delay(1)


def test_inside_a_job_nothing_is_enqueued(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """delay and command raise InsideJobError in a guest, be it a task or a command."""
    enter(Attempt("main-x", 2, tags={"a": "b"}))
    try:
        assert (current_job.id, current_job.attempt, dict(current_job.tags)) == ("main-x", 2, {"a": "b"})
        assert current_job
        with pytest.raises(InsideJobError):
            task_of(fleet).delay(1)
    finally:
        leave()
    assert not current_job
    with pytest.raises(NotInJobError):
        _ = current_job.id
    monkeypatch.setenv("RINGFENCE_FDS", "100,101")
    # A process has it from its start.
    monkeypatch.setattr(context, "_outside", 0)
    with pytest.raises(InsideJobError):
        fleet.app.command(["true"])


def test_an_enqueue_that_is_sent_twice_counts_once(fleet: Fleet) -> None:
    """A batch repeated after a lost answer writes nothing and is no error."""
    job = task_of(fleet).delay(1)
    spec, _ = fleet.envelope(job.id)
    assert fleet.app.client().enqueue([spec]) == [1]
    assert fleet.store.llen(KEYS.queue("agents")) == 1


def test_a_batch_gets_numbers_in_order(fleet: Fleet) -> None:
    """Many jobs need few calls, and their sequence numbers follow the order given."""
    spec, _ = fleet.envelope(fleet.app.command(["true"]).id)
    batch = [replace(spec, id=ids.new_job_id(), nonce=ids.new_nonce()) for _ in range(450)]
    assert fleet.app.client().enqueue(batch) == list(range(2, 452))


def test_an_app_reads_nothing_before_its_first_call() -> None:
    """Construction and decoration need no home; the first enqueue says what to do."""
    with scratch.folder() as folder:
        app = App(home=folder / "none", redis_url="unix:///nowhere")
        with pytest.raises(ConfigError, match="ringfence up --home"):
            app.command(["true"])
