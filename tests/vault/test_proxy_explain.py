"""`vault explain` of a proxied secret says what a job would get, for the host in any spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.commands import run_words
from tests.support import scratch

RULES = """
version = 1
[[allow]]
secrets = ["KEY"]
tenants = ["*"]
tasks = ["*"]
hosts = ["api.example.com"]
header = "x-api-key: {value}"
requests = ["GET /v1/*"]
"""


def explained(home: Path, host: str, *more: str) -> int:
    """Run the command; return its exit code."""
    words = ["vault", "explain", "KEY", "--task", "a:b", "--mode", "proxy", "--host", host, *more]
    return run_words(["--home", str(home), *words])


@pytest.mark.parametrize(
    ("host", "code"), [("API.example.com.", 0), ("api.example.com:443", 0), ("api.example.com:1", 1)]
)
def test_explain_of_a_proxied_secret(host: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The header is shown where the rule allows it; another port is another host."""
    with scratch.folder() as home:
        home.chmod(0o700)
        (home / "vault-policy.toml").write_text(RULES)
        (home / "vault-policy.toml").chmod(0o600)
        (home / "vault").mkdir(mode=0o700)
        assert explained(home, host) == code
        out = capfd.readouterr().out
        assert ("x-api-key" in out) == ("requests=GET /v1/*" in out) == (code == 0)
        assert explained(home, host, "--request", "GET /v1/x?y") == code
        assert explained(home, host, "--request", "POST /v1/x") == 1


def test_explain_of_a_field_and_bounds(capfd: pytest.CaptureFixture[str]) -> None:
    """They are shown instead of the header; a model's host is refused with the reason."""
    with scratch.folder() as home:
        home.chmod(0o700)
        rules = RULES.replace('header = "x-api-key: {value}"', 'field = "query:k"\nbody_bytes = 9\nat_once = 2')
        assert rules != RULES
        (home / "vault-policy.toml").write_text(rules.replace('hosts = ["api.example.com"]', 'hosts = ["*"]'))
        (home / "vault-policy.toml").chmod(0o600)
        (home / "vault").mkdir(mode=0o700)
        assert explained(home, "api.example.com") == 0
        out = capfd.readouterr().out
        assert "field='query:k'" in out
        assert "body_bytes=9 at_once=2" in out
        assert "header" not in out
        assert explained(home, "api.openai.com") == 1
        assert "words" in capfd.readouterr().out
