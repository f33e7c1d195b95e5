"""``exec=False``: signed, kept or refused, and demanded by policy where the operator wants it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from node_agent.admission import asked_of
from node_agent.containment.promises import Facts, promises
from node_agent.errors import PolicyError
from node_agent.policy import decide, parse
from node_agent.sandbox import Defaults, plan_of
from runner import Grants
from runner.cli.options import build_grants
from runner.wire import grants as forms
from tests.agent.build import job

NOT_ASKED = forms.Grants()
ASKED = forms.Grants(no_exec=True, service=False)
NO_OPTIONS: dict[str, Any] = dict.fromkeys(("read", "write", "net", "secret", "memory", "cpus", "pids", "disk"))


def test_the_api_and_the_command_line_sign_the_same() -> None:
    """Grants(exec=False) and --no-exec are one grant; the default leaves a job its own programs."""
    assert Grants().to_wire() == NOT_ASKED
    assert Grants(exec=False).to_wire() == ASKED
    for no_exec, wanted in ((True, ASKED), (False, NOT_ASKED)):
        assert build_grants(**NO_OPTIONS, no_exec=no_exec, service=False).to_wire() == wanted


def test_the_plan_follows_the_grant() -> None:
    """What was signed is what the worker is told."""
    for grants, allowed in ((ASKED, False), (NOT_ASKED, True)):
        assert plan_of(job(grants=grants), 1, (), 1, 1, Defaults("B")).allow_exec is allowed


@pytest.mark.parametrize("level", ["A", "B", "C", "D", "E", "F", "none"])
def test_it_is_kept_with_a_view_and_refused_without(level: str) -> None:
    """Where no mount can be noexec, a job that asks for it does not run."""
    name = "no exec"
    assert (name in asked_of(job(grants=ASKED)), name in asked_of(job(grants=NOT_ASKED))) == (True, False)
    found = {each.name: each for each in promises(Facts(level))}[name]
    assert (found.kept, found.asked) == (level in ("A", "B"), True)


def test_a_rule_can_demand_it() -> None:
    """With exec = false a rule covers only jobs that give it up; by default a rule covers both."""
    demanding = parse('version = 1\n[[allow]]\ncommands = ["*"]\nexec = false\n')
    assert decide(demanding, job(grants=ASKED), "k").allowed
    refused = decide(demanding, job(grants=NOT_ASKED), "k")
    assert not refused.allowed
    assert "--no-exec" in refused.message
    plain = parse('version = 1\n[[allow]]\ncommands = ["*"]\n')
    assert all(decide(plain, job(grants=grants), "k").allowed for grants in (ASKED, NOT_ASKED))
    with pytest.raises(PolicyError, match="true or false"):
        parse('version = 1\n[[allow]]\nexec = "no"\n')


def test_the_field_has_no_default_that_grants() -> None:
    """An envelope without the field means what it meant before there was one."""
    field = {each.name: each for each in dataclasses.fields(forms.Grants)}["no_exec"]
    assert field.default is False
