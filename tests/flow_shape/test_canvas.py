"""Shapes of calls: what each call gets, what it waits for, and what is refused before anything is signed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import InsideJobError, Signature, TaskNameError, UsageError, chain, chord, context, group
from runner.canvas import Chain, Group, Output, Step, lower, signatures
from runner.wire.flow import MAX_AFTER
from runner.wire.values import ResultOf
from tests.flow_shape.jobs import flow_jobs as jobs


class Bench:
    """Gives every call a number for an id and remembers what it was made with."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[Signature[Any], tuple[object, ...], tuple[str, ...]]] = {}

    def make(self, call: Signature[Any], args: tuple[object, ...], after: tuple[str, ...]) -> str:
        name = str(len(self.made))
        self.made[name] = (call, args, after)
        return name


def lowered(step: Step) -> tuple[Output, list[tuple[tuple[object, ...], tuple[str, ...]]]]:
    """Return the output of a shape, and (arguments, waits for) of its calls in order."""
    bench = Bench()
    output = lower(step, bench.make)
    return output, [(args, after) for _, args, after in bench.made.values()]


def test_a_chain_passes_each_result_first() -> None:
    """A `.si` call waits all the same, and takes nothing."""
    output, calls = lowered(chain(jobs.add.s(1), jobs.add.s(2), jobs.add.si(3)))
    assert calls == [((1,), ()), ((ResultOf("0"), 2), ("0",)), ((3,), ("1",))]
    assert output == ResultOf("2")


def test_a_chord_passes_the_list_of_all_results() -> None:
    """Nested lists where groups are nested; the body waits for every one of them."""
    output, calls = lowered(chord(group(jobs.add.s(1), group(jobs.add.s(2), jobs.add.s(3))), jobs.total.s()))
    assert calls[-1] == (([ResultOf("0"), [ResultOf("1"), ResultOf("2")]],), ("0", "1", "2"))
    assert output == ResultOf("3")


def test_a_group_inside_a_chain_gets_the_result_before_it() -> None:
    """Each of its calls waits for the step before."""
    output, calls = lowered(chain(jobs.add.s(1), group(jobs.add.s(), chain(jobs.add.s(2), jobs.add.s(3)))))
    assert calls[1:] == [((ResultOf("0"),), ("0",)), ((ResultOf("0"), 2), ("0",)), ((ResultOf("2"), 3), ("2",))]
    assert output == [ResultOf("1"), ResultOf("3")]


CALLS: st.SearchStrategy[Step] = st.builds(
    lambda number, fixed: Signature(jobs.add, (number,), immutable=fixed), st.integers(0, 9), st.booleans()
)
STEPS: st.SearchStrategy[Step] = st.recursive(
    CALLS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4)
        .map(tuple)
        .flatmap(lambda steps: st.sampled_from([Chain(steps), Group(steps)]))
    ),
    max_leaves=20,
)


@settings(max_examples=60)
@given(STEPS)
def test_every_call_becomes_one_job_after_those_that_it_waits_for(step: Step) -> None:
    """Whatever the shape: no call is lost or doubled, and the order of enqueue is one in which all are known."""
    bench = Bench()
    output = lower(step, bench.make)
    assert [call for call, _, _ in bench.made.values()] == list(signatures(step))
    for name, (call, args, after) in bench.made.items():
        assert all(int(other) < int(name) for other in after)
        assert len(set(after)) == len(after)
        assert args[-len(call.args) :] == call.args
        assert (len(args) > len(call.args)) == (bool(after) and not call.immutable)
    assert _leaves(output) <= set(bench.made)


def _leaves(output: Output) -> set[str]:
    return {output.job} if isinstance(output, ResultOf) else {job for each in output for job in _leaves(each)}


def test_empty_shapes_and_strangers_are_refused() -> None:
    """The message says what is missing."""
    for make in (chain, group, lambda: chain([]), lambda: chord([], jobs.total.s())):
        with pytest.raises(UsageError, match="give it at least one call"):
            make()
    with pytest.raises(UsageError, match=r"made of calls such as task\.s"):
        chain(jobs.add)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UsageError, match="empty group"):
        jobs.add.map([]).delay()


def test_a_body_waits_for_a_thousand_jobs_at_most() -> None:
    """The rule of the wire is told before anything is made of it."""
    with pytest.raises(UsageError, match=f"wait for {MAX_AFTER} jobs, not {MAX_AFTER + 1}"):
        lowered(chord(group(jobs.add.s(number) for number in range(MAX_AFTER + 1)), jobs.total.s()))


def test_calls_that_can_not_be_carried_out_are_refused_before_the_first_is_sent() -> None:
    """Arguments that do not fit, a group of one's own, two tenants, and a flow inside a job."""
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        chain(jobs.add.s(1), jobs.add.s(c=1)).delay()
    with pytest.raises(TypeError, match="too many positional arguments"):
        chain(jobs.add.s(1), jobs.add.s(2, 3)).delay()
    with pytest.raises(UsageError, match="a group of its own"):
        chain(jobs.add.s(1).set(group="mine")).delay()
    with pytest.raises(UsageError, match="one tenant"):
        group(jobs.add.s(1).set(tenant="red"), jobs.add.s(1).set(tenant="blue")).delay()
    with pytest.raises(UsageError, match="no option 'colour'"):
        group(jobs.add.s(1).set(colour="red")).delay()  # type: ignore[call-arg]  # the mistake
    context.enter(context.Attempt("main-1", 1))
    try:
        with pytest.raises(InsideJobError, match="does not work inside a job"):
            chain(jobs.add.s(1)).delay()
    finally:
        context.leave()


def test_a_task_of_the_program_itself_is_no_step() -> None:
    """No node could import it."""
    task = type(jobs.add)(_local, jobs.app.place, {})
    task.name = "__main__:local"
    with pytest.raises(TaskNameError, match="in the program itself"):
        group(task.s()).delay()


def _local(a: int, b: int = 1) -> int:
    """Never run."""
    return a + b
