"""Policy, environment and rules of jobs with net grants: values in, values out."""

from __future__ import annotations

import pytest

from broker.egress.errors import BadRequestError
from broker.egress.orders import MAX_RULES, dump_rules, load_rules
from broker.egress.rules import Destination, Rules
from node_agent.admission import Denial, Enforcement, _enforceable
from node_agent.egress import rules_of
from node_agent.errors import EgressRefusedError
from node_agent.policy import decide, parse
from node_agent.sandbox import payload_of, profile_of, proxy_environment
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.grants import Grants, NetGrant
from runner.wire.states import RefuseReason
from tests.agent.build import job

HEAD = 'version = 1\n[[allow]]\ncommands = ["*"]\n'


def allowed(listed: str, host: str, port: int, denied: str = "") -> bool:
    """Return whether a policy that lists ``listed`` (and denies ``denied``) allows a destination."""
    deny = f'[[deny]]\nnet = ["{denied}"]\n' if denied else ""
    policy = parse(f'{HEAD}net = ["{listed}"]\n{deny}')
    return decide(policy, job(grants=Grants(net=(NetGrant(host, port),))), "k").allowed


@pytest.mark.parametrize(
    ("listed", "host", "port", "fit"),
    [
        ("api.example.com:443", "api.example.com", 443, True),
        ("API.Example.com:443", "api.EXAMPLE.com", 443, True),
        ("api.example.com:443", "api.example.com", 80, False),
        ("*.example.com:443", "a.example.com", 443, True),
        ("*.example.com:443", "example.com", 443, False),
        ("[::1]:80", "[::1]", 80, True),
        ("[0:0:0::1]:80", "[::1]", 80, True),
        ("[::1]:80", "1", 80, False),
        ("10.0.0.5:80", "[::ffff:10.0.0.5]", 80, True),
    ],
)
def test_policy_compares_one_form_of_a_destination(listed: str, host: str, port: int, fit: bool) -> None:
    """Capitals, brackets and an embedded IPv4 address make no difference; port and name do."""
    assert allowed(listed, host, port) is fit


@pytest.mark.parametrize(
    ("denied", "host"),
    [
        ("api.example.com:443", "API.example.COM"),
        ("10.0.0.5:443", "[::ffff:10.0.0.5]"),
        ("10.*:443", "[::ffff:a00:5]"),
        ("[0::1]:443", "[::1]"),
        ("API.example.com:443", "api.example.com"),
    ],
)
def test_no_spelling_slips_past_a_deny_rule(denied: str, host: str) -> None:
    """What is denied is denied in every spelling of the same destination."""
    assert allowed("*", host, 443)
    assert not allowed("*", host, 443, denied)


def test_the_decision_tells_what_the_rule_lists() -> None:
    """Only the rule that allowed the job speaks for addresses, not another one."""
    policy = parse(f'{HEAD}net = ["*", "127.0.0.1:80"]\n[[allow]]\ntasks = ["*"]\nnet = ["10.0.0.1:80"]\n')
    decision = decide(policy, job(grants=Grants(net=(NetGrant("example.com", 80),))), "k")
    assert decision.net == ("*", "127.0.0.1:80")


def test_rules_hold_addresses_of_the_granted_ports_only() -> None:
    """Patterns and names in a policy name no address; other ports are left out; the store is always in."""
    listed = ["*", "*.example.com:80", "db.internal:80", "10.0.0.*:80", "10.0.0.5:80", "10.0.0.5:81", "localhost:80"]
    rules = rules_of([NetGrant("API.example.com", 80)], listed, [("Store.Internal", 6379), ("::1", 6379)])
    assert rules.granted == {Destination("api.example.com", 80)}
    assert rules.named == {Destination("10.0.0.5", 80), Destination("localhost", 80)}
    assert rules.never == {Destination("store.internal", 6379), Destination("::1", 6379)}
    with pytest.raises(EgressRefusedError, match="four decimal numbers"):
        rules_of([NetGrant("127.1", 80)], [], [])


def test_rules_survive_the_way_to_the_egress_process() -> None:
    """What is sent is what is read; anything else is refused."""
    rules = Rules(
        frozenset({Destination("a.example.com", 1), Destination("::1", 65535)}),
        frozenset({Destination("10.0.0.1", 1)}),
        frozenset({Destination("store", 6379)}),
    )
    record = codec.load(codec.dump(dump_rules(rules)))
    assert isinstance(record, dict)
    assert load_rules(record) == rules
    many: list[Json] = [["a.example.com", port] for port in range(1, MAX_RULES + 2)]
    bad: list[Json] = [None, {}, [["a"]], [["a", "1"]], [["a", 0]], [["a", True]], [[1, 1]], [["a b", 1]], many]
    for value in bad:
        with pytest.raises(BadRequestError):
            load_rules({**record, "granted": value})


def test_the_environment_names_the_proxy() -> None:
    """Both cases of each name; the job's own loopback is direct unless it was granted; its own --env wins."""
    assert proxy_environment(()) == {}
    found = proxy_environment((NetGrant("api.example.com", 443),))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        assert found[name] == found[name.lower()] == "http://127.0.0.1:3128"
    assert found["NO_PROXY"] == found["no_proxy"] == "localhost,127.0.0.1,::1"
    assert proxy_environment((NetGrant("127.0.0.1", 80), NetGrant("[::1]", 80)))["NO_PROXY"] == "localhost"
    spec = job(grants=Grants(net=(NetGrant("a.example.com", 80),)), env={"ALL_PROXY": "socks5h://127.0.0.1:3128"})
    payload = codec.load(payload_of(spec, 1))
    assert isinstance(payload, dict)
    env = payload["env"]
    assert isinstance(env, dict)
    assert env["ALL_PROXY"] == "socks5h://127.0.0.1:3128"
    assert env["HTTPS_PROXY"] == "http://127.0.0.1:3128"


def test_attack_38_grants_are_part_of_a_mould_s_profile() -> None:
    """Two jobs with other destinations never share a mould."""
    one, two = (job(grants=Grants(net=(NetGrant("a.example.com", port),))) for port in (80, 81))
    assert profile_of(one, "k") != profile_of(two, "k")
    assert profile_of(one, "k").net


def test_a_level_without_a_net_namespace_refuses() -> None:
    """Nothing keeps a job of level C or below from the host's network, so its net grants can't be enforced."""
    spec = job(grants=Grants(net=(NetGrant("a.example.com", 80),)))
    lacking = Enforcement("C", lacks={"net HOST:PORT": "needs a network namespace"})
    denial = _enforceable(spec, lacking)
    assert isinstance(denial, Denial)
    assert denial.reason is RefuseReason.UNENFORCEABLE
    assert _enforceable(job(), lacking) is None
    assert _enforceable(spec, Enforcement("B")) is None
