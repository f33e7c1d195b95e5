"""Policy: default deny, deny beats allow, one rule covers the whole job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.errors import PolicyError
from node_agent.policy import Policy, decide, parse
from runner.wire.grants import Grants, NetGrant, PathGrant, SecretGrant
from tests.agent.build import job

HEAD = "version = 1\n"


def test_an_empty_policy_denies_everything() -> None:
    """Without a rule no job is allowed."""
    decision = decide(parse(HEAD), job(), "k")
    assert not decision.allowed
    assert "no [[allow]] rule" in decision.message


def test_a_rule_allows_what_it_names_and_nothing_else() -> None:
    """A rule for one command does not allow another."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["sh"]\n')
    assert decide(policy, job(), "k").allowed
    assert not decide(policy, job(argv=("bash",)), "k").allowed
    assert not decide(policy, job(task="m:f"), "k").allowed


def test_one_rule_must_cover_the_whole_job() -> None:
    """Two rules that each allow a part do not add up."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["sh"]\n[[allow]]\ntasks = ["*"]\nwrite = ["/srv"]\n')
    asks = Grants(paths=(PathGrant("/srv/x", "write"),))
    decision = decide(policy, job(grants=asks), "k")
    assert not decision.allowed
    assert "write /srv/x" in decision.message or "command" in decision.message


def test_deny_beats_allow_also_for_a_parent_of_a_denied_path() -> None:
    """A grant of a folder that contains a denied path is denied."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["*"]\nwrite = ["/srv"]\n[[deny]]\nwrite = ["/srv/secret"]\n')
    for path in ("/srv/secret", "/srv/secret/a", "/srv"):
        assert not decide(policy, job(grants=Grants(paths=(PathGrant(path, "write"),))), "k").allowed
    assert decide(policy, job(grants=Grants(paths=(PathGrant("/srv/open", "write"),))), "k").allowed


def test_a_denied_read_denies_the_write() -> None:
    """Who may write may read: a tree that is closed to readers is closed to writers, too."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["*"]\nwrite = ["/srv"]\n[[deny]]\nread = ["/srv/secret/"]\n')
    for path in ("/srv/secret", "/srv/secret/a", "/srv"):
        assert not decide(policy, job(grants=Grants(paths=(PathGrant(path, "write"),))), "k").allowed
    assert decide(policy, job(grants=Grants(paths=(PathGrant("/srv/open", "write"),))), "k").allowed


def test_a_path_prefix_is_no_parent() -> None:
    """/srvx is not below /srv."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["*"]\nread = ["/srv"]\n')
    assert not decide(policy, job(grants=Grants(paths=(PathGrant("/srvx", "read"),))), "k").allowed


@pytest.mark.parametrize(
    ("grants", "word"),
    [
        (Grants(net=(NetGrant("api.example.com", 443),)), "network destination"),
        (Grants(secrets=(SecretGrant("KEY", "get"),)), "secret KEY"),
        (Grants(service=True), "--service"),
        (Grants(unix=True), "--unix"),
        (Grants(tools=("search",)), "tool search"),
        (Grants(memory_bytes=2 << 30), "memory"),
        (Grants(pids=10_000), "pids"),
    ],
)
def test_every_kind_of_grant_needs_a_rule(grants: Grants, word: str) -> None:
    """What the rule does not name is refused by name."""
    policy = parse(HEAD + '[[allow]]\ncommands = ["*"]\nmax_memory = "1G"\nmax_pids = 100\n')
    decision = decide(policy, job(grants=grants), "k")
    assert not decision.allowed
    assert word in decision.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version = 2",
        "version = 1\nfoo = 1",
        "version = 1\n[[allow]]\nfoo = 1",
        "version = 1\n[[allow]]\ncommands = 'sh'",
        "version = 1\n[[allow]]\nread = ['relative']",
        "version = 1\n[[deny]]\nread = ['/srv/../secret']",
        "version = 1\n[[deny]]\nwrite = ['/srv/./secret']",
        "version = 1\n[[deny]]\nread = ['//srv']",
        "version = 1\n[[deny]]\nread = ['/srv//secret']",
        "version = 1\n[[allow]]\nmax_memory = '1Q'",
        "version = 1\n[[allow]]\ntrusted = 1",
        "version = 1\n[[allow]]\nmax_pids = -1",
        "version = 1\nallow = 3",
        "not toml [",
    ],
)
def test_what_is_not_understood_does_not_load(text: str) -> None:
    """An unknown key or a wrong type refuses the whole file."""
    with pytest.raises(PolicyError):
        parse(text)


@given(st.lists(st.sampled_from(["sh", "ls", "*", "py*"]), max_size=3), st.sampled_from(["sh", "ls", "python"]))
def test_a_deny_rule_never_widens(patterns: list[str], command: str) -> None:
    """Adding any deny rule never allows a job that was denied."""
    allow = parse(HEAD + '[[allow]]\ncommands = ["sh", "py*"]\n')
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
    deny = parse(HEAD + f"[[deny]]\ncommands = [{quoted}]\n")
    spec = job(argv=(command,))
    if decide(Policy(allow.rules + deny.rules), spec, "k").allowed:
        assert decide(allow, spec, "k").allowed
