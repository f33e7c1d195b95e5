"""Tasks and flows in this process: the same values as over the wire, the same ends, no queue."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner import JobFailed, JobRefused, NotInJobError, Sealed, chain, chord, current_job, group
from runner.testing import in_place
from runner.wire.errors import ValueTypeError
from tests.flow_shape.jobs import flow_jobs as jobs


def test_calls_and_shapes_return_what_a_fleet_would() -> None:
    """Chains pass results on, groups return lists, bodies get them."""
    assert in_place(jobs.add.s(1, 2)) == 3
    assert in_place(chain(jobs.add.s(1, 2), jobs.add.s(10), jobs.add.s(b=100))) == 113
    assert in_place(chord(group(jobs.add.s(number) for number in range(6)), jobs.total.s())) == 21
    assert in_place(jobs.add.map([1, 2])) == [2, 3]
    assert in_place(chain(jobs.add.s(1), jobs.add.si(5))) == 6


def test_values_take_the_way_over_the_wire() -> None:
    """Tuples arrive as lists, classes of the annotations as themselves, others as plain data."""
    assert in_place(jobs.same.s((1, 2))) == [1, 2]
    drawing = jobs.Drawing([jobs.Point(1, 2.0)])
    assert in_place(jobs.turn.s(drawing, jobs.Colour.RED)) == jobs.Drawing([jobs.Point(2, 1)], jobs.Colour.RED)
    assert in_place(jobs.kinds.s([jobs.Point(1, 2.0), jobs.Colour.RED])) == ["dict", "str"]
    assert in_place(jobs.same.s({"token": Sealed("secret"), "raw": [Sealed(b"\xff")]})) == {
        "token": "secret",
        "raw": [b"\xff"],
    }
    with pytest.raises(ValueTypeError, match=r"^args\[0\]: set has no form on the wire"):
        in_place(jobs.same.s({1}))


def test_the_current_job_is_there_meanwhile() -> None:
    """Its task and tags are those of the call; afterwards there is none."""
    job_id, task, attempt, tag = in_place(jobs.here.s().set(tags=["a=b"]))
    assert (job_id.startswith("main-"), task, attempt, tag) == (True, f"{jobs.__name__}:here", "1", "b")
    with pytest.raises(NotInJobError):
        _ = current_job.id


def test_a_task_has_its_own_options_and_those_of_the_call() -> None:
    """Tags of both join, as in a fleet; a task's own on_failure counts."""
    here = jobs.app.task(tags=["own=1"])(jobs.here.function)
    assert in_place(here.s().set(tags=["call=2"]))[3:] == ["1", "2"]
    tell = jobs.app.task(on_failure="run")(jobs.tell.function)
    assert in_place(chord([jobs.fail.s()], tell.s())) == ["failed(exception)"]


def test_what_goes_wrong_raises_what_a_handle_would() -> None:
    """The exception itself is the cause; results that can't travel are told apart; later steps are refused."""
    with pytest.raises(JobFailed, match="ValueError: on purpose") as failed:
        in_place(jobs.fail.s())
    assert isinstance(failed.value.__cause__, ValueError)
    assert failed.value.error["type"] == "ValueError"
    with pytest.raises(JobFailed, match="result_not_storable"):
        in_place(jobs.unstorable.s("set"))
    with pytest.raises(JobRefused, match="dependency_failed"):
        in_place(chain(jobs.fail.s(), jobs.add.s(1)))
    body = jobs.tell.s().set(on_failure="run")
    assert in_place(chord([jobs.add.s(1), jobs.fail.s()], body)) == ["2", "failed(exception)"]


def test_the_fixture_is_there_where_the_plugin_is_named(tmp_path: Path) -> None:
    """`-p runner.testing_pytest` brings the fleet, with the modules that the application's conftest names."""
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture(scope='session')\ndef ringfence_imports():\n    return ['app']\n"
    )
    (tmp_path / "test_app.py").write_text("def test_app(ringfence_fleet):\n    pass\n")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "runner.testing_pytest",
        "--setup-plan",
        ".",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert "SETUP    S ringfence_fleet (fixtures used: ringfence_imports)" in done.stdout
