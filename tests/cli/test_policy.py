"""`ringfence policy`, `approve`, `deny` and --budget as their users see them, without a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.commands import run_words
from runner.errors import UsageError
from runner.limits import amounts_of, budget_of, units_of
from runner.wire.flow import Budget

RULES = """version = 1
[[allow]]
tasks = ["app:*"]
tools = ["deploy"]
[[call]]
effect = "ask"
actions = ["tool.call"]
when = [{ attribute = "args.env", op = "eq", value = "prod" }]
"""
CASE = """
[[case]]
name = "production needs a person"
job = { task = "app:ship", grants = { tools = ["deploy"] } }
action = "tool.call"
resource = "deploy"
args = { env = "prod" }
expect = "ask"
[[case]]
job = { argv = ["sh"] }
expect = "deny"
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A policy file."""
    path = tmp_path / "policy.toml"
    path.write_text(RULES)
    return path


def test_e1_check_loads_the_file_as_a_node_does(
    rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells the version; a misspelt call, or a file that is none, is exit 78 with the place."""
    assert run_words(["policy", "check", str(rules), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["policy"]) == 64
    rules.write_text(RULES.replace("tool.call", "read_file"))
    assert run_words(["policy", "check", str(rules)]) == 78
    assert "no call 'read_file'" in capsys.readouterr().err
    assert run_words(["policy", "check", str(tmp_path / "none.toml")]) == 78


def test_check_reads_the_policy_that_up_wrote(rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a policy.toml in the home it is the one of `up`; without any the message names the next step."""
    assert run_words(["--home", str(tmp_path), "policy", "check"]) == 0
    rules.rename(tmp_path / "up-policy.toml")
    assert run_words(["--home", str(tmp_path), "policy", "check"]) == 0
    (tmp_path / "up-policy.toml").unlink()
    assert run_words(["--home", str(tmp_path), "policy", "check"]) == 78
    assert "--home of the node" in capsys.readouterr().err


def test_k4_a_table_of_cases_says_what_the_policy_does(
    rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0 if each case is as expected, 1 with the difference, 2 for cases that are not understood."""
    cases = tmp_path / "cases.toml"
    words = ["policy", "test", str(cases), "--policy", str(rules)]
    cases.write_text(CASE)
    assert run_words(words) == 0
    cases.write_text(CASE.replace('expect = "ask"', 'expect = "allow"'))
    assert run_words(words) == 1
    assert "WRONG production needs a person: ask ([[call]] rule 1 (ask)" in capsys.readouterr().out
    for wrong in (CASE.replace("expect", "expects"), 'case = "x"', "[[case]]\n", CASE.replace("argv", "argw")):
        cases.write_text(wrong)
        assert run_words(words) == 2, wrong


def test_k4_explain_names_the_rule_of_a_job_and_of_a_call(
    rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By options or by a job spec's fields; exit 0 says that it is allowed."""
    where = ["--policy", str(rules), "--json"]
    assert run_words(["policy", "explain", "--task", "app:ship", *where]) == 0
    assert run_words(["policy", "explain", "--command", "sh", *where]) == 1
    capsys.readouterr()
    spec = tmp_path / "job.json"
    spec.write_text(json.dumps({"task": "app:ship", "grants": {"tools": ["deploy"]}}))
    call = ["--action", "tool.call", "--resource", "deploy"]
    assert run_words(["policy", "explain", str(spec), *call, "--arg", 'env="prod"', *where]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["decision"], said["rule"]) == ("ask", "[[call]] rule 1 (ask)")
    assert run_words(["policy", "explain", str(spec), *call, "--arg", 'env="test"', *where]) == 0
    assert run_words(["policy", "explain", str(spec), *call, *where]) == 1
    for words in ([], ["--task", "no task"], [str(tmp_path / "none")], [str(spec), "--arg", "a=1"]):
        assert run_words(["policy", "explain", *words, *where]) == 2, words


@pytest.mark.parametrize(
    "words",
    [
        ["approve"],
        ["deny"],
        ["approve", "main-01hzzzzzzzzzzzzzzzzzzzzzzz", "--budget", "k"],
        ["approve", "--budget", "k", "--ask", "x"],
        ["approve", "--budget", "k", "--add", "pears=3"],
        ["approve", "--budget", "k", "--add", "tokens=-3"],
        ["run", "--budget", "k", "--", "true"],
        ["run", "--budget", "k:tokens=1.5", "--", "true"],
        ["run", "--budget", "k:tokens=1,tokens=2", "--", "true"],
        ["run", "--budget", "k:tokens=1,on_hit=cry", "--", "true"],
    ],
)
def test_wrong_words_of_budgets_exit_2(words: list[str], tmp_path: Path) -> None:
    """A misunderstood bound must never be a missing one."""
    assert run_words(["--home", str(tmp_path), *words]) == 2


def test_a_budget_is_read_as_it_is_written() -> None:
    """Short units, whole counts, and what happens at the bound."""
    assert budget_of("team:tokens=1000,cost=2.5,on_hit=kill") == Budget(
        "team", tokens=1000, cost_usd=2.5, on_hit="kill"
    )
    assert amounts_of(["wall=60", "calls=3"]) == {"wall_s": 60.0, "calls": 3.0}
    assert units_of({"wall": 60, "cpu_s": 1}) == {"wall_s": 60, "cpu_s": 1}
    for wrong in ({"wall": 1.0, "wall_s": 1.0}, {"walls": 1.0}):
        with pytest.raises(UsageError, match="cost, cpu"):
            units_of(wrong)
    with pytest.raises(UsageError):
        amounts_of(["tokens=nan"])
