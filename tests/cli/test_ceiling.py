"""What `up` lets its jobs have: never a whole machine by default."""

from __future__ import annotations

import posixpath
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.policy import parse
from runner.cli import ceiling
from runner.cli.ceiling import Import
from runner.errors import UsageError


@pytest.mark.parametrize("place", [Path("/"), Path("/root"), Path.home()])
def test_root_and_homes_are_no_default(place: Path, home: Path) -> None:
    """Standing in / or in a home folder grants nothing."""
    assert ceiling.default_path(place, home)[0] is None


def test_the_folder_around_the_home_is_no_default(home: Path) -> None:
    """A folder that holds Ringfence's own home grants nothing, also through a link."""
    link = home / "link"
    link.symlink_to(home)
    assert ceiling.default_path(home, home / "a" / "b")[0] is None
    assert ceiling.default_path(link, home / "a")[0] is None


def test_an_ordinary_folder_is_the_default(home: Path) -> None:
    """Any other current folder is what jobs may be granted."""
    (home / "work").mkdir()
    assert ceiling.default_path(home / "work", home / "rf") == (home / "work", "")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), max_size=3))
def test_the_policy_file_says_what_was_meant(names: list[str]) -> None:
    """Whatever a path holds, the file that is written reads back to exactly that path."""
    # As allowed_paths leaves them: absolute and normalised.
    paths = [Path(posixpath.normpath(f"/{name.lstrip('/')}")) for name in names]
    text = ceiling.policy_text(paths, [Import("jobs", None)])
    rule = tomllib.loads(text)["allow"][0]
    assert rule["read"] == rule["write"] == [str(path) for path in paths]
    assert rule["tasks"] == ["jobs:*"]
    assert len(parse(text).rules) == 1


def test_the_rules_of_a_file_stand_beside_what_up_allows(home: Path) -> None:
    """Tools and rules for calls are added, with or without a version; one with [[allow]] rules lets jobs in alone."""
    file = home / "rules.toml"
    for head in ("", "version = 1\n"):
        file.write_text(
            f'{head}calls = "listed"\n[[deny]]\ntasks = ["jobs:no"]\n[[tool]]\nname = "t"\nargv = ["/bin/true"]\n'
        )
        rules, whole = ceiling.read_rules(file)
        policy = parse(ceiling.policy_text([], [Import("jobs", None)], (), rules))
        assert (whole, policy.calls.listed, list(policy.tools)) == (False, True, ["t"])
        assert sorted(rule.effect for rule in policy.rules) == ["allow", "deny"]
    file.write_text('[[allow]]\ntasks = ["jobs:*"]\n')
    assert ceiling.read_rules(file)[1]
    file.write_text("no toml")
    with pytest.raises(UsageError, match="line 1"):
        ceiling.read_rules(file)


def test_imports_are_checked_at_once(home: Path) -> None:
    """A module that is not there ends `up` before anything starts."""
    (home / "jobs.py").write_text("")
    assert ceiling.parse_import(f"jobs:{home}") == Import("jobs", home.resolve())
    assert ceiling.parse_import("runner") == Import("runner", None)
    for text in (f"other:{home}", "no_such_module_here", "a b", "x;y:/tmp", ""):
        with pytest.raises(UsageError):
            ceiling.parse_import(text)


def test_a_named_path_has_to_exist(home: Path) -> None:
    """A misspelt --allow is an error, not an empty permission."""
    assert ceiling.allowed_paths([home]) == (home.resolve(),)
    broken = home / "\udcff"
    broken.mkdir()
    with pytest.raises(UsageError, match="UTF-8"):
        ceiling.allowed_paths([broken])
    with pytest.raises(UsageError):
        ceiling.allowed_paths([home / "nothing"])
