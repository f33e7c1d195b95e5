"""Admission: every doubt is a denial with its own reason."""

from __future__ import annotations

import dataclasses

import pytest

from node_agent.admission import Admitted, Denial, Enforcement, Offer, Rules, admit
from node_agent.policy import parse
from runner.wire import record
from runner.wire import spec as specs
from runner.wire.card import TrustedKey
from runner.wire.envelope import Domain
from runner.wire.flow import RetryRule
from runner.wire.grants import Grants, NetGrant, PathGrant, SecretGrant
from runner.wire.spec import JobSpec
from tests.agent.build import envelope, job, signer

KEY = signer()
POLICY = parse('version = 1\n[[allow]]\ncommands = ["*"]\ntasks = ["*"]\nsecrets = ["*"]\nnet = ["*"]\n')


def rules(**changes: object) -> Rules:
    """A node that trusts KEY and allows everything it can enforce."""
    trusted = TrustedKey(KEY.key_id, KEY.public, ("enqueue", "kill"), ("main",))
    base = Rules("n1", {KEY.key_id: trusted}, POLICY, Enforcement("A", {"cpu": "needs a cgroup"}), ("app",), {})
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # tests name real fields


def new(_nonce: str, _attempt: int) -> str:
    """A ledger that knows nothing."""
    return "new"


def offer(spec: JobSpec, **changes: object) -> Offer:
    """The claim of a well-signed job."""
    payload, signature = envelope(KEY, spec)
    base = Offer(spec.id, specs.lane_of(spec), 1, payload, signature)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # tests name real fields


def reason(given: Offer, judged: Rules | None = None, now_ms: int = 1) -> str:
    """The reason of the denial."""
    decision = admit(given, judged or rules(), new, now_ms)
    assert isinstance(decision, Denial), decision
    assert decision.message
    return decision.reason


def test_a_well_signed_job_is_admitted() -> None:
    """Nothing in doubt: the signed spec comes back."""
    spec = job()
    decision = admit(offer(spec), rules(), new, 1)
    assert isinstance(decision, Admitted)
    assert decision.spec == spec


def test_attack_26_a_changed_byte_is_a_bad_signature() -> None:
    """The signature covers the received bytes exactly."""
    given = offer(job())
    assert reason(dataclasses.replace(given, envelope=given.envelope.replace(b"true", b"evil"))) == "bad_signature"
    assert reason(dataclasses.replace(given, envelope=given.envelope + b" ")) == "bad_signature"


def test_attack_26_a_signature_of_another_domain_does_not_count() -> None:
    """Bytes signed as a command are no job."""
    spec = job()
    payload = record.dumps(spec)
    assert reason(offer(spec, signature=KEY.sign(Domain.COMMAND, payload))) == "bad_signature"


def test_attack_26_signed_duplicate_keys_are_refused() -> None:
    """Even a trusted key can't send a document that two parsers read differently."""
    spec = job()
    payload = record.dumps(spec).replace(b'"args":[]', b'"args":[1],"args":[]', 1)
    assert reason(offer(spec, envelope=payload, signature=KEY.sign(Domain.JOB, payload))) == "bad_hash"


def test_unknown_and_revoked_keys() -> None:
    """A key that trust.toml does not list, or lists as revoked, counts for nothing."""
    spec = job()
    payload, signature = envelope(signer(), spec)
    assert reason(offer(spec, envelope=payload, signature=signature)) == "unknown_key"
    revoked = TrustedKey(KEY.key_id, KEY.public, ("enqueue",), ("main",), revoked=True)
    assert reason(offer(spec), rules(trust={KEY.key_id: revoked})) == "unknown_key"


def test_attack_29_the_label_alone_proves_nothing() -> None:
    """A key listed under another key's label does not verify."""
    other = signer()
    assert reason(
        offer(job()), rules(trust={KEY.key_id: TrustedKey(KEY.key_id, other.public, ("enqueue",), ("*",))})
    ) == ("bad_signature")


def test_an_envelope_moved_to_another_id_or_lane_is_a_forgery() -> None:
    """Id and lane are bound by the signature."""
    spec = job()
    assert reason(offer(spec, job_id=job().id)) == "bad_signature"
    assert reason(offer(spec, lane="agents@gpu=yes")) == "bad_signature"


def test_rights_of_the_key() -> None:
    """A key without enqueue, or of other tenants or queues, may not enqueue."""
    spec = job()
    for key in (
        TrustedKey(KEY.key_id, KEY.public, ("kill",), ("main",)),
        TrustedKey(KEY.key_id, KEY.public, ("enqueue",), ("other",)),
        TrustedKey(KEY.key_id, KEY.public, ("enqueue",), ("main",), ("batch",)),
    ):
        assert reason(offer(spec), rules(trust={KEY.key_id: key})) == "policy"


def test_attack_24_replays_are_refused() -> None:
    """An ended attempt, an attempt that was never signed, and a lapsed job do not run."""
    spec = job(retry=RetryRule(1), not_after_ms=10_000)
    decision = admit(offer(spec), rules(), lambda _n, _a: "ended", 1)
    assert isinstance(decision, Denial)
    assert decision.reason == "replayed"
    assert reason(offer(spec, attempt=3)) == "replayed"
    assert reason(offer(spec, attempt=0)) == "replayed"
    assert reason(offer(spec), now_ms=10_000_000) == "replayed"


def test_attack_03_node_pin_and_labels_are_checked_against_the_signed_spec() -> None:
    """A node that pops a foreign lane refuses the job itself."""
    assert reason(offer(job(node="n2"))) == "policy"
    assert reason(offer(job(labels={"zone": "b"}))) == "policy"
    assert isinstance(admit(offer(job(labels={"zone": "b"})), rules(labels={"zone": "b"}), new, 1), Admitted)


@pytest.mark.parametrize(
    ("level", "minimum", "trusted", "admitted"),
    [
        ("A", "B", False, True),
        ("B", "B", False, True),
        ("B", "A", False, False),
        ("C", "B", False, False),
        ("C", "F", False, False),
        ("E", "F", True, True),
        ("E", "C", True, False),
        ("A", "F", True, True),
    ],
)
def test_levels(level: str, minimum: str, trusted: bool, admitted: bool) -> None:
    """A host below the job's minimum refuses it, and one below B refuses every job that is not trusted."""
    allowed = parse('version = 1\n[[allow]]\ncommands = ["*"]\ntrusted = true\n')
    known = rules(enforcement=Enforcement(level), policy=allowed)
    decision = admit(offer(job(min_level=minimum, trusted=trusted)), known, new, 1)
    assert isinstance(decision, Admitted) is admitted
    if isinstance(decision, Denial):
        assert decision.reason == "level"


def test_trusted_jobs_need_the_policys_word_too() -> None:
    """A job that calls itself trusted runs below B only if the node's policy says so."""
    decision = admit(offer(job(min_level="F", trusted=True)), rules(enforcement=Enforcement("E")), new, 1)
    assert isinstance(decision, Denial)
    assert decision.reason == "policy"


@pytest.mark.parametrize("level", ["C", "D", "E"])
def test_attack_47_untrusted_jobs_get_no_path_without_a_view(level: str) -> None:
    """Landlock does not cover modes, times and names, so below B an untrusted job with a path grant never runs."""
    asked = Grants(paths=(PathGrant("/srv/data", "read"),))
    assert reason(offer(job(min_level="F", grants=asked)), rules(enforcement=Enforcement(level))) == "level"


def test_attack_35_many_processes_need_a_cpu_controller() -> None:
    """Where nothing keeps a share of the cpu for the agent, more than 128 processes are refused when asked for."""
    known = Enforcement("B", most_pids=128)
    assert reason(offer(job(grants=Grants(pids=129))), rules(enforcement=known)) == "unenforceable"
    assert isinstance(admit(offer(job(grants=Grants(pids=128))), rules(enforcement=known), new, 1), Admitted)


def test_a_host_without_a_level_refuses_trusted_jobs_too() -> None:
    """Also when the job asks for less, with the reason and the fix."""
    weak = Enforcement("none", why="user namespaces are off", fix="sysctl -w user.max_user_namespaces=10000")
    for spec in (job(), job(min_level="F"), job(min_level="F", trusted=True)):
        decision = admit(
            offer(spec),
            rules(enforcement=weak, policy=parse('version = 1\n[[allow]]\ncommands = ["*"]\ntrusted = true\n')),
            new,
            1,
        )
        assert isinstance(decision, Denial)
        assert decision.reason == "level"
        assert "sysctl -w" in decision.message


def test_tasks_need_the_nodes_list() -> None:
    """Only modules that the node serves are imported."""
    assert reason(offer(job(task="other:f"))) == "unknown_task"
    assert reason(offer(job(task="app.evil:f"))) == "unknown_task"
    assert isinstance(admit(offer(job(task="app:f")), rules(), new, 1), Admitted)


def test_what_the_host_does_not_enforce_is_refused() -> None:
    """Whatever a host can't keep is refused to who asks for it, never ignored; the reason names it."""
    bare = rules(enforcement=Enforcement("A", {"net HOST:PORT": "needs a network namespace"}))
    assert reason(offer(job(grants=Grants(net=(NetGrant("h", 1),)))), bare) == "unenforceable"
    assert reason(offer(job(grants=Grants(cpus=1.0)))) == "unenforceable"
    assert isinstance(admit(offer(job(grants=Grants(memory_bytes=1))), rules(), new, 1), Admitted)


def test_a_proxied_secret_is_a_destination_too() -> None:
    """It is refused where no network is enforced or the policy lists no such host; one without a host is no job."""
    grants = Grants(secrets=(SecretGrant("KEY", "proxy", "a.example"),))
    assert isinstance(admit(offer(job(grants=grants)), rules(), new, 1), Admitted)
    bare = rules(enforcement=Enforcement("A", {"net HOST:PORT": "needs a network namespace"}))
    assert reason(offer(job(grants=grants)), bare) == "unenforceable"
    text = 'version = 1\n[[allow]]\ncommands = ["*"]\ntasks = ["*"]\nsecrets = ["*"]\nnet = ["b.example:443"]\n'
    strict = rules(policy=parse(text))
    assert reason(offer(job(grants=grants)), strict) == "policy"
    denied = rules(policy=parse(text.replace("b.", "a.") + '[[deny]]\nnet = ["a.example:443"]\n'))
    assert reason(offer(job(grants=grants)), denied) == "policy"
    assert reason(offer(job(grants=Grants(secrets=(SecretGrant("KEY"),))))) == "bad_hash"
