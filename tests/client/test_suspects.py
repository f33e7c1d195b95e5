"""What looks like a secret in the open is warned about by its place, and nothing else is."""

from __future__ import annotations

import warnings

import pytest

from runner import Sealed, request
from runner.suspects import PlainSecretWarning, suspects

VALUE = "sk-" + "a1B2" * 6
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"


@pytest.mark.parametrize(
    ("argv", "args", "kwargs", "env", "places"),
    [
        (None, [VALUE], {}, {}, ("args/0",)),
        (None, ["x", PEM, "postgres://app:pw@db/x"], {}, {}, ("args/1", "args/2")),
        (None, [], {"password": "hunter2", "api_key": "x"}, {}, ("kwargs/password", "kwargs/api_key")),
        (None, [], {"x": VALUE}, {}, ("kwargs/x",)),
        (["tool"], [], {}, {"OPENAI_API_KEY": "x", "GH_TOKEN": "y"}, ("env/OPENAI_API_KEY", "env/GH_TOKEN")),
        (["tool", "--token", "abc", "--password=x"], [], {}, {}, ("argv/1", "argv/3")),
        (["curl", "-H", "Authorization: Bearer abcdefghij"], [], {}, {}, ("argv/2",)),
        (["curl", "--header=Authorization: Basic dXNlcjpwYXNz"], [], {}, {}, ("argv/1",)),
    ],
)  # fmt: skip # several to a line
def test_what_looks_like_one(
    argv: list[str] | None,
    args: list[object],
    kwargs: dict[str, object],
    env: dict[str, object],
    places: tuple[str, ...],
) -> None:
    """Names that say it, and values of a kind that only secrets have, wherever they stand."""
    assert suspects(argv, args, kwargs, env) == places


@pytest.mark.parametrize(
    ("argv", "args", "kwargs", "env"),
    [
        (None, ["solar", 7, None, b"sk-", "https://example.com/a:b@c", "sk-learn"], {}, {}),
        (None, [], {"max_tokens": "100", "key": "name", "secret": "", "token": 5, "tokens": ["a"]}, {}),
        (["pytest", "--token", "-x", "--no-password", "sort", "-k", "2"], [], {}, {"PATH": "/bin", "KEYS": "a"}),
        (["tool", "--token"], [], {"password": Sealed("hunter2")}, {"API_KEY": Sealed("x")}),
    ],
)
def test_what_does_not(
    argv: list[str] | None, args: list[object], kwargs: dict[str, object], env: dict[str, object]
) -> None:
    """Ordinary names and texts, empty values, numbers and what is sealed pass in silence."""
    assert suspects(argv, args, kwargs, env) == ()


def test_scenario_a_s01_the_caller_is_warned() -> None:
    """The warning names places and the caller's line, and holds no value; the job is made all the same."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        spec = request.build({"env": {"API_KEY": "hunter2"}}, task="m:t", kwargs={"password": VALUE})
    assert spec.kwargs == {"password": VALUE}
    (one,) = told
    assert one.category is PlainSecretWarning
    assert one.filename == __file__
    assert "kwargs/password, env/API_KEY: looks like a secret" in str(one.message)
    assert VALUE not in str(one.message)
    assert "hunter2" not in str(one.message)
