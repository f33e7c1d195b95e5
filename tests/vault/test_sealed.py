"""Sealed values: encrypted to the nodes of a lane, opened by a broker for the one job they were sealed for."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Literal

import pyrage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyrage import x25519

from broker.client import BrokerClient, LeaseRefused
from broker.vault.keystore import Keystore
from broker.vault.sealkeys import GRACE_S, SealKeys
from runner import request, schedule, sealing
from runner.errors import EnqueueError, UsageError
from runner.wire import record, sealed, values
from runner.wire.card import NodeCard
from runner.wire.errors import CodecError, RecordError, ValueTypeError
from runner.wire.sealed import Sealed
from runner.wire.spec import JobSpec, decode
from tests.support import scratch
from tests.vault.stand import Job, Stand, get_of

VALUE = "canary-sealed-value"
#: The keys of two clients of one tenant.
KEY, OTHER_KEY = "a" * 16, "b" * 16
SOMEBODY = str(x25519.Identity.generate().to_public())


def scene(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def card(recipient: str | None, **fields: object) -> NodeCard:
    """Return a card as the fleet key could have signed it."""
    return replace(NodeCard("n1", "0" * 64, "B", 2**50, age_recipient=recipient), **fields)  # type: ignore[arg-type] # names of its fields


def job_with(recipient: str, *values_: object, **options: object) -> JobSpec:
    """Return a job whose arguments are sealed to one recipient."""
    return sealing.seal(request.build(options, task="app:task", args=values_), [card(recipient)], KEY)  # type: ignore[arg-type] # JobOptions by name


async def opened(
    client: BrokerClient, job: Job, spec: JobSpec, held: dict[str, str] | None = None, signer: str = KEY
) -> None:
    """Open the lease of a job as its node would, with ``held`` in place of its own sealed values."""
    texts = {place: str(text) for place, text in (spec.sealed or {}).items()} if held is None else held
    await client.open(replace(job.ask(tenant=spec.tenant), job=spec.id, sealed=texts, signer=signer), job.fds)


@pytest.fixture(scope="module")
def recipient(stand: Stand) -> str:
    """Whom to seal to for the shared broker."""
    return str(stand.operator(op="recipient")["recipient"])


@pytest.fixture
def job(stand: Stand, level: Literal["A", "B"]) -> Iterator[Job]:
    """A job's process."""
    made = Job("main-1.1", level)
    yield made
    made.end()


def text_of(job: Job, place: str) -> str | bytes:
    """Return what a job gets for a place: the value, or the code of the refusal."""
    reply = job.say(json.dumps({"op": "sealed", "place": place}))
    return base64.b64decode(reply["value"]) if reply.get("ok") else str(reply.get("err") or "closed")


@scene
async def test_a_job_gets_its_sealed_values(stand: Stand, recipient: str, job: Job) -> None:
    """Each in its place, and recorded by place; what its output shows of it is another test's matter."""
    spec = job_with(recipient, 1, {"token": Sealed(VALUE)}, Sealed(b"\x00raw"))
    client = stand.client()
    await opened(client, job, spec)
    assert text_of(job, "args/1/token") == VALUE.encode()
    assert text_of(job, "args/2") == b"\x00raw"
    assert text_of(job, "args/0") == "denied"
    await client.close(job.name)
    await client.stop()
    assert '"sealed.released"' in stand.record()
    assert VALUE not in stand.record()


@pytest.mark.parametrize("change", ["tenant", "job", "place", "other key", "cut", "not sealed", "no binding"])
@scene
async def test_attack_02_a_moved_ciphertext(stand: Stand, recipient: str, job: Job, change: str) -> None:
    """A ciphertext in an own, validly signed envelope: another tenant, job or argument is refused and recorded."""
    victim = job_with(recipient, Sealed(VALUE))
    text = str((victim.sealed or {})["args/0"])
    place, thief = "args/0", replace(victim)
    if change == "tenant":
        thief = replace(victim, tenant="evil", id=victim.id.replace("main", "evil", 1))
    elif change == "job":
        thief = job_with(recipient, Sealed("own"))
    elif change == "place":
        place = "args/1"
    elif change == "other key":
        text = str((job_with(SOMEBODY, Sealed(VALUE)).sealed or {})["args/0"])
    elif change == "cut":
        text = text[: len(text) // 2 // 4 * 4]
    elif change == "not sealed":
        text = "not base64 at all"
    else:
        plain = pyrage.encrypt(VALUE.encode(), [x25519.Recipient.from_str(recipient)])
        text = base64.b64encode(plain).decode()
    client = stand.client()
    own = Job("main-2.1", job.level)
    try:
        with pytest.raises(LeaseRefused) as refused:
            await opened(client, job, thief, {place: text})
        assert refused.value.foreign
        assert VALUE not in str(refused.value)
        assert text_of(job, place) != VALUE.encode()
        await opened(client, own, victim)  # the counter-check: unmoved, it opens
        assert text_of(own, "args/0") == VALUE.encode()
        await client.close(own.name)
    finally:
        await client.stop()
        own.end()
    assert f'"sealed.refused","attempt":"{job.name}","place":"{place}"' in stand.record().replace(" ", "")


@pytest.mark.parametrize("signer", [OTHER_KEY, ""])
@scene
async def test_attack_02_a_second_key_of_the_tenant(
    stand: Stand, recipient: str, job: Job, level: Literal["A", "B"], signer: str
) -> None:
    """Clients choose ids: another key signs a job with the victim's id, place and ciphertext, and gets nothing."""
    victim = job_with(recipient, Sealed(VALUE))
    client, own = stand.client(), Job("main-2.1", level)
    try:
        with pytest.raises(LeaseRefused) as refused:
            await opened(client, job, victim, signer=signer)
        assert refused.value.foreign
        assert text_of(job, "args/0") != VALUE.encode()
        await opened(client, own, victim)  # the counter-check: under the key it was sealed for, it opens
        assert text_of(own, "args/0") == VALUE.encode()
        await client.close(own.name)
    finally:
        await client.stop()
        own.end()


@scene
async def test_attack_02_a_ciphertext_that_the_signed_job_did_not_bring(stand: Stand, recipient: str, job: Job) -> None:
    """A job can't have the broker open what it found somewhere: it names places, never ciphertexts."""
    spec = job_with(recipient, Sealed(VALUE))
    client = stand.client()
    await client.open(replace(job.ask(get_of("KEY")), job=spec.id), job.fds)
    text = (spec.sealed or {})["args/0"]
    reply = job.say(json.dumps({"op": "sealed", "attempt": job.name, "place": "args/0", "data": text}))
    assert reply == {"ok": False, "err": "denied"}
    await client.close(job.name)
    await client.stop()


@scene
async def test_a_restart_keeps_sealed_values(own: Stand, level: Literal["A", "B"]) -> None:
    """The next broker gets them again from the agent; the job waits and has its value."""
    spec = job_with(str(own.operator(op="recipient")["recipient"]), Sealed(VALUE))
    job, client = Job("main-1.1", level), own.client()
    try:
        client.start()
        await opened(client, job, spec)
        own.stop()
        own.start()
        # Asked while nobody has opened the lease again: the answer comes once the agent has.
        assert await asyncio.to_thread(text_of, job, "args/0") == VALUE.encode()
    finally:
        await client.stop()
        job.end()


def test_an_old_key_opens_for_a_while() -> None:
    """After a rotation what was sealed before opens until the grace is over; a new host key changes nothing."""
    now = [1000.0]
    with scratch.folder() as home:
        stand = Stand(home, {})
        with Keystore(home / "vault", clock=lambda: now[0]) as store:
            first = store.seal_keys().current()
            assert store.seal_keys().rotate() != first
            store.rotate_host_key()
            assert publics(store.seal_keys())[1] == first
            now[0] += GRACE_S - 1
            assert first in publics(store.seal_keys())
            now[0] += 1
            assert publics(store.seal_keys()) == [store.seal_keys().current()]
        secret = str(x25519.Identity.generate())[:15].encode()
        assert not any(secret in path.read_bytes() for path in (stand.home / "vault").glob("sealing*"))


def publics(keys: SealKeys) -> list[str]:
    """Return the public halves of what opens now."""
    return [str(identity.to_public()) for identity in keys.opening()]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tenants": ("acme",)}, {}),
        ({"queues": ("other",)}, {}),
        ({}, {"node": "n2"}),
        ({}, {"labels": {"gpu": "yes"}}),
        ({}, {"min_level": "A"}),
        ({"age_recipient": None}, {}),
    ],
)
def test_attack_03_only_nodes_of_the_lane(fields: dict[str, object], options: dict[str, object]) -> None:
    """Nothing is sealed to a card that may not serve the job; without any, the enqueue says what to do."""
    here, there = x25519.Identity.generate(), x25519.Identity.generate()
    spec = request.build(options, task="app:task", args=[Sealed(VALUE)])  # type: ignore[arg-type] # JobOptions by name
    foreign = card(str(there.to_public()), **fields)
    with pytest.raises(EnqueueError, match="keys card NODE --recipient"):
        sealing.seal(spec, [foreign], KEY)
    good = card(str(here.to_public()), node=options.get("node", "n1"), labels=options.get("labels"), level="A")
    text = base64.b64decode(str((sealing.seal(spec, [foreign, good], KEY).sealed or {})["args/0"]))
    assert VALUE.encode() in pyrage.decrypt(text, [here])
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(text, [there])


def test_nothing_is_written_unsealed() -> None:
    """A job that was not sealed yet has no form on the wire, and shows no value."""
    spec = request.build({"env": {"TOKEN": Sealed(VALUE), "A": "b"}}, task="app:task", args=[Sealed(VALUE)])
    assert spec.env == {"A": "b"}
    assert VALUE not in repr(spec)
    with pytest.raises(CodecError):
        record.dumps(spec)
    with pytest.raises(ValueTypeError):
        values.encode(Sealed(VALUE))
    with pytest.raises(TypeError):
        Sealed(VALUE).__reduce__()
    again = job_with(SOMEBODY, Sealed(VALUE))
    with pytest.raises(EnqueueError, match="another job"):
        sealing.seal(replace(again, id=request.build({}, task="app:task").id), [card(SOMEBODY)], KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"args": [1]},
        {"args": [sealed.HOLE, sealed.HOLE]},
        {"sealed": None, "kwargs": {"more": sealed.HOLE}, "args": []},
        {"sealed": {"args/1": "x"}},
        {"sealed": {"args/0": 1}},
        {"sealed": {"args/0": "x" * (sealed.MAX_TEXT_BYTES + 1)}},
        {"sealed": {"args/0": "x", "env/A B": "x"}},
        {"sealed": {"args/0": "x", "env/RINGFENCE_FDS": "x"}},
        {"sealed": {"args/0": "x", "env/A": "x"}, "env": {"A": "b"}},
        {"sealed": {}},
    ],
)
def test_every_hole_has_its_value(change: dict[str, object]) -> None:
    """A record whose holes and values do not fit is no job; a hole without any value never becomes one."""
    spec = job_with(SOMEBODY, Sealed(VALUE))
    body = record.encode(spec) | change
    if body["sealed"] is None:
        del body["sealed"]
        found = record.decode(JobSpec, body)
        with pytest.raises(ValueTypeError):
            values.decode(found.kwargs["more"])  # type: ignore[arg-type] # plain JSON
        return
    with pytest.raises(RecordError):
        record.decode(JobSpec, body)
    assert decode(record.dumps(spec)) == spec


def test_too_large() -> None:
    """A value over the limit is refused where it is made; one for too many nodes where it is sealed."""
    with pytest.raises(RecordError):
        Sealed("x" * (sealed.MAX_VALUE_BYTES + 1))
    with pytest.raises(UsageError):
        request.build({}, task="app:task", args=[Sealed("x")] * (sealed.MAX_SEALED + 1))
    spec = request.build({}, task="app:task", args=[Sealed("x" * sealed.MAX_VALUE_BYTES)])
    crowd = [card(str(x25519.Identity.generate().to_public()), node=f"n{number}") for number in range(200)]
    with pytest.raises(EnqueueError, match="200 nodes"):
        sealing.seal(spec, crowd, KEY)


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.builds(Sealed, st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("$v~/a0", max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.lists(ARGUMENTS, max_size=3))
def test_values_come_back_where_they_were(args: list[object]) -> None:
    """Whatever the arguments look like, each hole has one place, and filling it gives back what was passed."""
    held: list[Sealed] = []
    encoded = values.encode(args, sealed=held)
    found = sealed.places(encoded, {})
    assert len(set(found)) == len(held)
    payload = {"args": encoded}
    for place, value in zip(found, held, strict=True):
        sealed.fill(payload, place, values.encode(value.open()))
    assert sealed.places(encoded, {}) == ()
    assert values.decode(payload["args"]) == plain(args)


def plain(value: object) -> object:
    """Return the arguments as the task gets them."""
    if isinstance(value, Sealed):
        return value.open()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_a_schedule_takes_none() -> None:
    """Each time of a schedule is a job of its own, for which nobody could have sealed anything."""
    with pytest.raises(UsageError, match="one job alone"):
        schedule.template_of("nightly", "app:task", [Sealed(VALUE)], None, {}, "main")
