"""The grants of kept files: how they are asked for, bounded, and allowed by policy."""

from __future__ import annotations

import dataclasses

import pytest

from node_agent.policy import decide, parse
from runner import Grants
from runner.errors import UsageError
from runner.wire import record, spec
from runner.wire.errors import WireError
from runner.wire.grants import Grants as Asked
from tests.agent import build

RULE = 'version = 1\n[[allow]]\ncommands = ["*"]\ntasks = ["*"]\n'


def test_sizes_and_names_are_checked_where_they_are_written() -> None:
    """A size is text or bytes, a name follows the grammar of names; anything else is refused at once."""
    wire = Grants(state="16M", agent="ann").to_wire()
    assert (wire.state_bytes, wire.agent) == (16 << 20, "ann")
    assert Grants().to_wire().state_bytes is None
    for wrong in ({"state": "much"}, {"state": 0}, {"agent": "a/b"}, {"agent": ""}, {"agent": "a:b"}):
        with pytest.raises(UsageError):
            Grants(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"state_bytes": 0}, {"state_bytes": (64 << 20) + 1}, {"agent": "a:b"}, {"agent": "*"}]
)
def test_a_signed_job_with_a_grant_out_of_bounds_is_no_job(wrong: dict[str, object]) -> None:
    """What no client of ours writes is refused by every node: more than 64 MiB, and names that a key could misread."""
    good = build.job(grants=Asked(state_bytes=64 << 20, agent="ann"))
    assert spec.decode(record.dumps(good)) == good
    data = record.encode(good)
    data["grants"] = {**record.encode(good.grants), **wrong}
    with pytest.raises(WireError):
        record.decode(spec.JobSpec, data)


def test_policy_gives_neither_by_default() -> None:
    """A rule has to name the size and the name; more, or another one, is denied."""
    asked = build.job(grants=Asked(state_bytes=1 << 20, agent="ann"))
    only_state = dataclasses.replace(asked, grants=Asked(state_bytes=1 << 20))
    for more, job, allowed in (
        ("", asked, False),
        ('state = "1M"\n', asked, False),
        ('state = "1M"\n', only_state, True),
        ('state = "1M"\nagents = ["a*"]\n', asked, True),
        ('state = "1023K"\nagents = ["a*"]\n', asked, False),
        ('state = "1M"\nagents = ["b*"]\n', asked, False),
    ):
        assert decide(parse(RULE + more), job, "a" * 16).allowed is allowed, more
    denied = parse(RULE + 'state = "1M"\nagents = ["*"]\n[[deny]]\nagents = ["ann"]\n')
    assert not decide(denied, asked, "a" * 16).allowed
