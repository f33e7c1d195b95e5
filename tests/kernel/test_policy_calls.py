"""What running jobs may do with their grants: default deny, deny beats ask beats allow, errors deny."""

from __future__ import annotations

import asyncio
import time

import pytest

from node_agent.errors import PolicyError
from node_agent.kernel.deciding import Deciding, PolicyPart
from node_agent.policy import decide, parse
from node_agent.policycalls import Calls, Subject, Verdict, judge
from runner.wire.grants import Grants, MailGrant
from tests.agent import build
from tests.kernel import rig

HEAD = "version = 1\n"
TOOLS = Grants(tools=("deploy", "search"))


def calls(text: str, head: str = HEAD) -> Calls:
    """The call rules of a policy file."""
    return parse(head + text).calls


def said(
    rules: Calls, action: str, resource: str = "", args: dict[str, object] | None = None, **job: object
) -> Verdict:
    """The verdict on a call of a job with two tools."""
    spec = build.job(**{"grants": TOOLS, **job})
    return judge(rules, Subject(spec, "k" * 16, 1, "n1"), action, resource, args or {})


def test_k4_a_verdict_is_no_truth_value() -> None:
    """`if verdict:` is an error, so that a denial can't pass for a yes."""
    verdict = said(calls(""), "tool.call", "other")
    assert verdict.effect == "deny"
    with pytest.raises(TypeError):
        bool(verdict)


def test_k4_what_was_not_granted_is_denied_and_what_was_is_allowed() -> None:
    """Without any rule the grants decide."""
    assert said(calls(""), "tool.call", "deploy").effect == "allow"
    for action, resource in (("tool.call", "rm"), ("mail.send", "box"), ("job.spawn", ""), ("file.open", "/state/a")):
        verdict = said(calls(""), action, resource)
        assert verdict.effect == "deny", action
        assert "not granted" in verdict.reason
    both = Grants(mail=(MailGrant("box"),), spawn=1, state_bytes=10, agent="me")
    for action, resource in (
        ("mail.send", "box"),
        ("job.spawn", ""),
        ("file.open", "/state/a"),
        ("file.open", "/mem/x"),
    ):
        assert said(calls(""), action, resource, grants=both).effect == "allow", action


def test_k4_deny_beats_ask_beats_allow_in_any_order() -> None:
    """The order of the file decides nothing."""
    allow = '[[call]]\neffect = "allow"\nactions = ["tool.*"]\n'
    ask = '[[call]]\neffect = "ask"\nactions = ["tool.call"]\nresources = ["deploy"]\n'
    deny = (
        '[[call]]\neffect = "deny"\nactions = ["tool.call"]\nwhen = [{attribute="args.env", op="eq", value="prod"}]\n'
    )
    for text in (allow + ask + deny, deny + ask + allow):
        rules = calls(text)
        assert said(rules, "tool.call", "deploy", {"env": "prod"}).effect == "deny"
        assert said(rules, "tool.call", "deploy", {"env": "test"}).effect == "ask"
        assert said(rules, "tool.call", "search", {"env": "test"}).effect == "allow"


def test_k4_an_allow_rule_gives_nothing_that_was_not_granted() -> None:
    """A rule never widens a job's grants."""
    rules = calls('[[call]]\neffect = "allow"\nactions = ["*"]\n')
    assert said(rules, "tool.call", "rm").effect == "deny"


def test_k4_listed_means_that_a_grant_alone_allows_nothing() -> None:
    """With calls = "listed" an allow rule has to name the call, too."""
    rules = calls('calls = "listed"\n[[call]]\neffect = "allow"\nactions = ["tool.call"]\nresources = ["search"]\n')
    assert said(rules, "tool.call", "search").effect == "allow"
    verdict = said(rules, "tool.call", "deploy")
    assert verdict.effect == "deny"
    assert "listed" in verdict.reason


@pytest.mark.parametrize("effect", ["allow", "deny", "ask"])
def test_e2_a_condition_that_can_t_be_judged_denies_whatever_the_rule_wants(effect: str) -> None:
    """A missing attribute denies with a reason that names it, also in an allow and in an ask rule."""
    when = '[{attribute="args.env", op="ne", value="prod"}]'
    rules = calls(f'[[call]]\neffect = "{effect}"\nactions = ["tool.call"]\nwhen = {when}\n')
    verdict = said(rules, "tool.call", "deploy", {})
    assert verdict.effect == "deny"
    assert "args.env" in verdict.reason


def test_e1_every_decision_carries_the_hash_of_the_whole_file() -> None:
    """Another file has another hash; the same has the same."""
    one, other = parse(HEAD), parse(HEAD + "# changed\n")
    assert one.version == parse(HEAD).version != other.version
    assert len(one.version) == 64
    assert said(one.calls, "tool.call", "deploy").policy == one.version
    assert said(other.calls, "tool.call", "rm").policy == other.version


def test_e3_trees_are_compared_by_component_and_no_other_spelling_slips_past() -> None:
    """/state/outside is not below /state/out; dots and double slashes are denied as they are."""
    state = Grants(state_bytes=1)
    rules = calls('[[call]]\neffect = "deny"\nactions = ["file.*"]\nresources = ["/state/out/"]\n')
    assert said(rules, "file.open", "/state/out", grants=state).effect == "deny"
    assert said(rules, "file.open", "/state/out/a", grants=state).effect == "deny"
    assert said(rules, "file.open", "/state/outside", grants=state).effect == "allow"
    for odd in ("/state/x/../out/a", "/state//out/a", "/state/./out"):
        assert said(rules, "file.open", odd, grants=state).effect == "deny", odd


def test_attack_41_a_hostile_resource_costs_no_time() -> None:
    """A text on which a pattern would work long is denied unseen."""
    rules = calls('[[call]]\neffect = "deny"\nactions = ["*"]\nresources = ["*a*a*a*a*a*a*a*b"]\n')
    started_s = time.process_time()
    assert said(rules, "progress.set", "a" * 60_000).effect == "deny"
    assert said(rules, "progress.set", "a" * 4096).effect == "allow"
    assert time.process_time() - started_s < 0.5


def test_rules_hold_for_whom_they_name() -> None:
    """Tenant, queue, key, task."""
    rules = calls('[[call]]\neffect = "deny"\nactions = ["*"]\nqueues = ["night*"]\ntasks = ["sh"]\n')
    assert said(rules, "tool.call", "deploy", queue="nightly").effect == "deny"
    assert said(rules, "tool.call", "deploy").effect == "allow"
    assert said(rules, "tool.call", "deploy", queue="nightly", argv=("bash",)).effect == "allow"


@pytest.mark.parametrize(
    "text",
    [
        '[[call]]\neffect = "maybe"\nactions = ["*"]\n',
        '[[call]]\neffect = "allow"\n',
        '[[call]]\nactions = ["*"]\n',
        '[[call]]\neffect = "allow"\nactions = ["*"]\naction = ["*"]\n',
        '[[call]]\neffect = "deny"\nactions = ["*"]\nper_minute = 1\n',
        '[[call]]\neffect = "allow"\nactions = ["*"]\non_ask = "wait"\n',
        '[[call]]\neffect = "allow"\nactions = ["*"]\nper_minute = 0\n',
        '[[call]]\neffect = "allow"\nactions = ["*"]\nper_minute = 1.5\n',
        '[[call]]\neffect = "allow"\nactions = ["*"]\nper = "job"\n',
        '[[call]]\neffect = "ask"\nactions = ["*"]\ntimeout_s = 0\n',
        '[[call]]\neffect = "ask"\nactions = ["*"]\nresources = ["/a/../b"]\n',
        'calls = "all"\n',
        "call = 1\n",
    ],
)
def test_a_file_that_is_not_understood_does_not_load(text: str) -> None:
    """Fail closed: a key that would be ignored is an error."""
    with pytest.raises(PolicyError):
        parse(HEAD + text)


def test_k4_a_rule_for_a_call_that_does_not_exist_is_found() -> None:
    """A misspelt action would be a deny rule that never denies: the file does not load."""
    with pytest.raises(PolicyError, match="no call 'read_file'"):
        calls('[[call]]\neffect = "deny"\nactions = ["tool.call", "read_file"]\n')


def test_grants_of_the_kernel_are_denied_by_default() -> None:
    """Mail, /mem, /state, watching and spawning need a rule of the node's policy that names them."""
    asks = {
        "mail": Grants(mail=(MailGrant("team"),)),
        "agents": Grants(agent="me"),
        "watch": Grants(watch=("tag:a=b",)),
        "state": Grants(state_bytes=1024),
        "spawn": Grants(spawn=2),
    }
    allows = {
        "mail": 'mail = ["team"]',
        "agents": 'agents = ["*"]',
        "watch": 'watch = ["tag:a=*"]',
        "state": 'state = "1K"',
        "spawn": "spawn = 2",
    }
    bare = HEAD + '[[allow]]\ncommands = ["*"]\n'
    for name, grants in asks.items():
        assert not decide(parse(bare), build.job(grants=grants), "k").allowed, name
        assert decide(parse(bare + allows[name]), build.job(grants=grants), "k").allowed, name
    assert not decide(parse(bare + "spawn = 1"), build.job(grants=asks["spawn"]), "k").allowed
    assert not decide(parse(bare + 'state = "512"'), build.job(grants=asks["state"]), "k").allowed


async def _asked(text: str, **fields: object) -> object:
    class _Nobody:
        async def take(self, *_: object) -> None:
            raise AssertionError("asking ahead takes nothing")

        decided = use = take

    nobody = _Nobody()
    deciding = Deciding(calls(text), "n1", nobody, nobody)  # type: ignore[arg-type] # neither is ever called
    part = PolicyPart(rig.around(decider=deciding))
    return await rig.ask(part.entries(), rig.caller(tools=("deploy",)), "policy.ask", **fields)


def test_k4_a_job_asks_ahead_and_gets_the_decision_as_an_object() -> None:
    """policy.ask answers with decision, rule, reason and hash; it counts nothing and asks nobody."""
    text = '[[call]]\neffect = "ask"\nactions = ["tool.call"]\nper_minute = 1\n'
    text += 'when = [{attribute="args.env", op="eq", value="prod"}]\n'
    found = asyncio.run(_asked(text, action="tool.call", resource="deploy", args={"env": "prod"}))
    assert isinstance(found, dict)
    assert (found["decision"], found["rule"]) == ("ask", "[[call]] rule 1 (ask)")
    assert len(str(found["policy"])) == 64
    other = asyncio.run(_asked(text, action="tool.call", resource="deploy", args={"env": "test"}))
    assert isinstance(other, dict)
    assert other["decision"] == "allow"
    denied = asyncio.run(_asked(text, action="tool.call", resource="rm", args={"env": "test"}))
    assert isinstance(denied, dict)
    assert denied["decision"] == "deny"
