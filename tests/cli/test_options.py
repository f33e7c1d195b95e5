"""Options become what the API takes, or an error that says which form is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.options import build_grants, json_value, pairs
from runner.errors import UsageError
from runner.wire.grants import Grants as WireGrants

NOTHING = {"read": None, "write": None, "net": None, "secret": None}
NO_TOTALS = {"memory": None, "cpus": None, "pids": None, "disk": None}


def grants(**options: object) -> WireGrants:
    """Return the grants of these options, in the form that is signed."""
    return build_grants(**{**NOTHING, **NO_TOTALS, **options}).to_wire()  # type: ignore[arg-type]  # options by name


def test_no_option_grants_nothing() -> None:
    """An empty command line asks for the bare sandbox."""
    assert grants() == WireGrants()


def test_paths_are_absolute_and_without_links(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the operator's current folder, a link the place it leads to."""
    (home / "place").mkdir()
    (home / "link").symlink_to("place")
    monkeypatch.chdir(home)
    found = grants(read=["place"], write=["link:all"]).paths
    real = str((home / "place").resolve())
    assert [(grant.path, grant.mode, grant.all) for grant in found] == [(real, "read", False), (real, "write", True)]


def test_net_none_stands_alone() -> None:
    """`none` beside a destination is a contradiction."""
    assert grants(net=["none"]).net == ()
    with pytest.raises(UsageError):
        grants(net=["none", "example.com:443"])


@pytest.mark.parametrize(
    ("word", "mode", "target"),
    [
        ("KEY", "get", None),
        ("KEY:get", "get", None),
        ("KEY:file", "file", None),
        ("KEY:env=VAR", "env", "VAR"),
        ("KEY:proxy=api.example.com", "proxy", "api.example.com"),
    ],
)
def test_secrets_have_four_ways(word: str, mode: str, target: str | None) -> None:
    """NAME, NAME:get, NAME:file, NAME:env=VAR, NAME:proxy=HOST."""
    (secret,) = grants(secret=[word]).secrets
    assert (secret.name, secret.mode, secret.target) == ("KEY", mode, target)


@pytest.mark.parametrize("word", ["KEY:", "KEY:env", "KEY:env=", "KEY:proxy=", "KEY:file=x", "KEY:magic", ":get", ""])
def test_other_ways_are_refused(word: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError):
        grants(secret=[word])


@pytest.mark.parametrize(
    "options",
    [{"memory": "1X"}, {"memory": "0"}, {"cpus": 0.0}, {"cpus": float("nan")}, {"pids": 0}, {"net": ["example.com"]}],
)
def test_totals_are_positive(options: dict[str, object]) -> None:
    """A size, number or destination that means nothing is an error."""
    with pytest.raises(UsageError):
        grants(**options)


def test_pairs_name_each_key_once() -> None:
    """K=V with any value; the same key twice is an error."""
    assert pairs(["a=1", "b=x=y", "c="], "--tag") == {"a": "1", "b": "x=y", "c": ""}
    for words in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--tag"):
            pairs(words, "--tag")


def test_arguments_are_json() -> None:
    """A bare word is an error that shows the form."""
    assert json_value('{"a": [1]}', "--arg") == {"a": [1]}
    with pytest.raises(UsageError, match="--arg"):
        json_value("solar", "--arg")
