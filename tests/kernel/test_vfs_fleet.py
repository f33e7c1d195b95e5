"""Files on real nodes: a state that outlives a kill and changes the node, a memory that two agents share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import Grants
from runner.cli.ceiling import Import
from tests.support.rig import Rig, rigged

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def agents() -> Iterator[Rig]:
    """Two nodes with two slots each that serve the tasks."""
    with rigged(slots=2, heartbeat_s=5.0, imports=(Import("file_tasks", PROGRAMS),)) as found:
        found.start("a")
        found.start("b")
        yield found


def test_row_v5_state_is_shared_over_a_kill_and_a_retry_on_another_node(rig: Rig) -> None:
    """The second attempt, on another node, goes on from the whole files of the first one, and from nothing half."""
    first, second = rig.nodes["a"].name, rig.nodes["b"].name
    rig.app.drain(second)
    held = Grants(agent="ann", state="1M")
    job = rig.app.call("file_tasks:works", grants=held, retries=1)
    rig.wait_output(job, "ready")
    rig.app.undrain(second)
    rig.app.drain(first, wait=0)
    other = rig.app.call("file_tasks:says_go", grants=Grants(agent="ann"))
    assert other.result(timeout=40) == "one two three EACCES"
    assert job.result(timeout=40) == {
        "attempt": 2,
        "page": {"n": 7},
        "big": True,
        "names": ["/state/big", "/state/page.json"],
    }
    rig.app.undrain(first)


def test_a_command_job_reaches_its_files_from_a_shell(rig: Rig) -> None:
    """`ringfence-guest files` writes, appends, lists, renames, reads and removes; a refusal is an exit code and why."""
    script = (
        "g='ringfence-guest files'; echo hello | $g put /state/a && echo world | $g append /state/a && "
        "$g mkdir /state/d && $g mv /state/a /state/d/b && $g ls /state && $g get /state/d/b && "
        "$g rm /state/d/b && $g ls /state/d && $g get /policy/grants.json && $g get /etc/passwd; echo $?"
    )
    job = rig.command("sh", "-c", script, grants=Grants(state="64K"))
    job.result(timeout=40)
    said = rig.logs(job)
    assert "d/\nhello\nworld\n" in said
    assert '"state_bytes":65536' in said
    assert "there is no /etc" in said
    assert said.rstrip().endswith("1")
