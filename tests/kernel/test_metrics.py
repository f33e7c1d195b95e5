"""What the witness makes of what it sees: lines, numbers and a ring of last calls; each thing once (rows F1, K8)."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from node_agent import local
from node_agent.containment.freezing import Still
from node_agent.kernel.metrics import METRICS, WAITS_S, Metrics, prometheus
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.ring import MOST, SHOWN, Ring
from node_agent.kernel.witness import Witness
from node_agent.local import LocalSocket
from node_agent.pausing import Order, Pauser
from node_agent.records import Notary
from node_agent.runs import Desk
from node_agent.turns import Claim, Finish
from runner.signing import Signer
from runner.wire import codec
from runner.wire.event import EventType
from runner.wire.grants import Grants, SecretGrant
from runner.wire.states import State
from tests.agent import build
from tests.kernel import rig

SIGNER = Signer(bytes(range(32)))


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    """A witness over a record below tmp_path; the record closes with the test."""
    return Witness(Recorder(tmp_path / "flight", node="n1", signer=SIGNER, fleet=None, reserve_bytes=0), Metrics())


@pytest.fixture(autouse=True)
def closed(witness: Witness) -> object:
    """Close the record."""
    yield
    witness.recorder.close()


def numbers(witness: Witness, name: str) -> dict[str, float]:
    """Return a metric's values by its labels."""
    found = cast("list[dict[str, Any]]", witness.metrics.snapshot()[name])
    return {"/".join(one["labels"].values()): one["value"] for one in found}


def test_k8_every_number_is_json_and_prints(witness: Witness) -> None:
    """The snapshot survives strict JSON with every metric in it, a fresh one included; no value is anything else."""
    for _ in range(2):
        snapshot = witness.metrics.snapshot()
        assert codec.load(codec.dump(snapshot), limit_bytes=1 << 20) == snapshot
        text = prometheus({"n1": snapshot})
        assert [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")] == [
            metric.name for metric in METRICS
        ]
        for line in text.splitlines():
            if not line.startswith("#"):
                assert math.isfinite(float(line.rpartition(" ")[2]))
        witness.called(rig.caller().run, build.job(), "file.read", "/state/a", "ok", 0.2)
        witness.metrics.waited(0.2)


def test_k8_a_histogram_counts_each_wait_in_every_bucket_above_it(witness: Witness) -> None:
    """Buckets are cumulative, the bound belongs to its bucket, and a clock that went back makes no negative wait."""
    for wait_s in (-5.0, 0.01, 0.011, 4000.0):
        witness.metrics.waited(wait_s)
    found = witness.metrics.snapshot()["ringfence_queue_wait_seconds"]
    assert isinstance(found, dict)
    buckets = found["buckets"]
    assert isinstance(buckets, dict)
    assert (buckets["0.01"], buckets["0.05"], buckets[str(WAITS_S[-1])], buckets["+Inf"]) == (2, 3, 3, 4)
    assert found["count"] == 4


def test_k8_labels_are_bounded_and_escaped() -> None:
    """Very many label values end in one; a quote, a backslash or a line end in one breaks no line."""
    metrics = Metrics()
    for number in range(5000):
        metrics.count("ringfence_calls_total", f"op{number}", "ok")
    found = metrics.snapshot()["ringfence_calls_total"]
    assert isinstance(found, list)
    assert len(found) <= 2001
    assert sum(int(str(one["value"])) for one in found if isinstance(one, dict)) == 5000
    odd = Metrics()
    odd.count("ringfence_calls_total", 'a"b\\c\nd', "ok")
    lines = [line for line in prometheus({"n1": odd.snapshot()}).splitlines() if line.startswith("ringfence_calls")]
    assert lines == ['ringfence_calls_total{node="n1",op="a\\"b\\\\c\\nd",error="ok"} 1']


def test_k8_many_numbers_fit_through_the_socket(home: Path) -> None:
    """Every op with every error is more than a request may be, and is answered whole."""
    metrics = Metrics()
    for number in range(1900):
        metrics.count("ringfence_calls_total", f"noun.verb{number}", "too_large")

    async def main() -> object:
        async def answer(request: dict[str, codec.Json]) -> dict[str, object]:
            return {"metrics": metrics.snapshot()}

        served = LocalSocket(home / "s", answer)
        await served.start()
        try:
            return (await asyncio.to_thread(local.ask, home / "s", {"op": "metrics"}, 5.0))["metrics"]
        finally:
            await served.stop()

    assert asyncio.run(main()) == metrics.snapshot()


def test_k8_an_end_counts_when_the_store_has_taken_it(witness: Witness) -> None:
    """A stale end counts nothing, a release counts nothing, a retry is no end."""
    claim = Claim(build.job().id, 1, "agents", 0)
    witness.ended(Finish(claim, state=State.FAILED, reason="exit"), taken=False)
    witness.ended(Finish(claim, "release"), taken=True)
    witness.ended(Finish(claim, "retry", State.LOST, "node_lost"), taken=True)
    assert numbers(witness, "ringfence_jobs_ended_total") == {}
    assert numbers(witness, "ringfence_jobs_retried_total") == {"node_lost": 1}
    witness.ended(Finish(claim, state=State.FAILED, reason="exit"), taken=True)
    assert numbers(witness, "ringfence_jobs_ended_total") == {"failed/exit": 1}


def test_f1_the_ring_holds_the_last_two_hundred_calls() -> None:
    """Older calls go, the end takes the newest along, and no resource makes a line long."""
    ring = Ring(clock=lambda: 10**18)
    for number in range(MOST + 50):
        ring.add(f"op.{number}", "x" * 10_000, "ok", 0.25)
    assert len(ring) == MOST
    assert len(ring.last()) == SHOWN
    assert ring.last(MOST)[0].split()[1] == "op.50"
    assert all(len(line) < 250 for line in ring.last(MOST))


def test_f1_a_failure_is_dumped_once_and_a_job_with_values_names_no_resource(witness: Witness) -> None:
    """The record gets the ring once per attempt, whatever ends are made of it; what a job could name stays out."""
    spec = build.job(grants=Grants(secrets=(SecretGrant("KEY", "get"),)))
    run = rig.caller(spec).run
    witness.admitted(spec, 1, signer="k" * 16, rule="r", policy="")
    for number in range(25):
        witness.called(run, spec, "file.put", f"/state/hunter{number}", "denied", 0.1)
    assert witness.failed(run) == witness.failed(run)
    witness.event(EventType.NET_DENIED, spec.id, 1, {"host": "hunter2.example", "port": 443})
    data = b"".join(path.read_bytes() for path in witness.recorder.path.glob("*.rec"))
    assert b"hunter" not in data
    assert data.count(b'"kind":"job.calls"') == 3
    assert b'"secrets":"KEY:get"' in data
    assert numbers(witness, "ringfence_denials_total") == {"call": 25, "net": 1}
    assert witness.failed(rig.caller().run) == ()


def test_f1_a_resume_that_can_t_be_recorded_does_not_happen(witness: Witness) -> None:
    """No record, no action: a paused job stays paused, and is resumed once the record can be written."""

    class Tree:
        frozen = True

        async def freeze(self, frozen: bool, timeout_s: float = 1.0) -> Still:
            self.frozen = frozen
            return Still(True, 1, "none")

    class Nowhere:
        def emit(self, tenant: str | None, event: object) -> None:
            """Nobody listens."""

    async def main() -> None:
        run, tree = rig.caller().run, Tree()
        run.tree = tree  # type: ignore[assignment] # the part that a resume needs
        run.holders = {"operator"}
        notary = Notary(SIGNER, "n1", "b00t01234567", "A", witness)
        desk: Desk = Nowhere()  # type: ignore[assignment] # as above
        order = Order("resume", "operator", "c" * 26)
        broken, witness.recorder._write = witness.recorder._write, lambda fd, data: 0
        answer = await Pauser(notary, desk).carry_out(run, order)
        assert (answer.outcome, answer.state, tree.frozen) == ("refused", "paused", True)
        witness.recorder._write = broken
        answer = await Pauser(notary, desk).carry_out(run, order)
        assert (answer.outcome, tree.frozen) == ("resumed", False)

    asyncio.run(main())
    (file,) = witness.recorder.path.glob("*.rec")
    kinds = [json.loads(line.rpartition(b" ")[0])["kind"] for line in file.read_bytes().splitlines()]
    assert [kind for kind in kinds if "resume" in kind] == ["resume.ordered", "job.resumed"]
