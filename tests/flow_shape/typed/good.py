"""What applications write, as type checkers must accept it; test_typing.py runs mypy on this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

from runner import App, Chain, Flow, Group, Job, Signature, chain, chord, group

app = App()


@app.task
def double(number: int, *, times: int = 1) -> int:
    """Keeps its signature."""
    return 2 * number * times


@app.task(queue="agents", retries=2)
def told(texts: list[str]) -> str:
    """Keeps it with options, too."""
    return " ".join(texts)


def calls() -> None:
    """Each way to call keeps what the function takes and returns."""
    assert_type(double(1), int)
    assert_type(double.delay(1, times=2), Job[int])
    assert_type(double.delay(1).result(timeout=5), int)
    assert_type(told.apply_async([["a"]], tags={"a": "b"}).result(), str)
    assert_type(double.s(1), Signature[int])
    assert_type(double.si(1, times=3), Signature[int])
    assert_type(double.si(1).set(on_failure="run").delay(), Job[int])
    assert_type(double.map([1, 2]), Group[list[int]])
    assert_type(double.map([1, 2]).delay().result(), list[int])
    assert_type(chord(group(double.s(1)), told.s()), Chain[str])
    assert_type(chord([double.s(1)], told.s()).delay(), Flow[str])
    chain(double.s(1), group(double.s(), double.s()), told.s()).apply_async(group="night", expires=60.0)
    app.enqueue_many([double.s(1), told.s(["a"])])
    double.apply_async([1], after=[double.delay(1), "main-1"], on_failure="run")


async def twins() -> None:
    """The asynchronous twins return the same."""
    job = await double.adelay(1, times=2)
    assert_type(job, Job[int])
    assert_type(await job.aresult(), int)
    assert_type(await double.map([1]).adelay(), Flow[list[int]])
    assert_type(await double.map([1]).delay().aresult(5.0), list[int])
    assert_type(await app.acommand(["true"]), Job[None])
    assert_type((await app.acall("m:t", [1])), Job[object])
    await app.akill(tag="a:b", grace=1.0)
