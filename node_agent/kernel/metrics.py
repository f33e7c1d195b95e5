"""Every number that a node tells of itself: names, units, labels, and how they are printed.

Called by the witness (counts what happened), the local socket (asks) and `ringfence metrics` (prints). Must never count
one thing twice, take a label from a job's own words, or hold what is no JSON.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from runner.wire.codec import Json

__all__ = ["METRICS", "WAITS_S", "Metric", "Metrics", "prometheus"]

#: Upper bounds of the buckets of a wait, in seconds.
WAITS_S: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0)
#: Most values of one metric: labels are of closed sets, this is the belt to it.
_MOST: Final = 2000
_REST: Final = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one for each value of its labels. Its unit stands in its name; counters end in ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    what: str
    labels: tuple[str, ...] = ()


METRICS: Final = (
    Metric("ringfence_jobs_admitted_total", "counter", "Attempts that policy let in."),
    Metric("ringfence_jobs_started_total", "counter", "Attempts that were started."),
    Metric("ringfence_jobs_ended_total", "counter", "Jobs whose end the store has taken.", ("state", "reason")),
    Metric("ringfence_jobs_retried_total", "counter", "Attempts that another one follows.", ("reason",)),
    Metric("ringfence_queue_wait_seconds", "histogram", "From enqueue (or the due time) to the first admission."),
    Metric("ringfence_calls_total", "counter", "Calls that were answered; error is ok or why.", ("op", "error")),
    Metric("ringfence_denials_total", "counter", "What was denied: admission, call, net, secret.", ("where",)),
    Metric("ringfence_kills_total", "counter", "Receipts of kills that were signed.", ("outcome",)),
    Metric("ringfence_events_total", "counter", "Signed events, by type.", ("type",)),
    Metric("ringfence_record_lines_total", "counter", "Lines written to the flight record."),
    Metric("ringfence_record_bytes_total", "counter", "Bytes written to the flight record."),
    Metric("ringfence_record_misses_total", "counter", "Lines that could not be written."),
    Metric("ringfence_record_head", "gauge", "Lines in the flight record's chain."),
    Metric("ringfence_slots", "gauge", "Jobs that may run at a time."),
    Metric("ringfence_slots_busy", "gauge", "Slots that hold a job."),
    Metric("ringfence_node_state", "gauge", "1 for the state that the node is in.", ("state",)),
)
_BY_NAME: Final = {metric.name: metric for metric in METRICS}


class Metrics:
    """The numbers of one agent process. ``gauges`` gives those that are looked up when somebody asks."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}
        self._waits = [0] * (len(WAITS_S) + 1)
        self._waited_s = 0.0
        self.gauges: list[Callable[[], Mapping[str, float | Mapping[str, float]]]] = []

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        counts = self._counts[name]
        if labels not in counts and len(counts) >= _MOST:
            labels = (_REST,) * len(labels)
        counts[labels] = counts.get(labels, 0) + by

    def waited(self, wait_s: float) -> None:
        """Note how long a job waited."""
        wait_s = max(0.0, wait_s)
        self._waits[bisect_left(WAITS_S, wait_s)] += 1
        self._waited_s += wait_s

    def snapshot(self) -> dict[str, Json]:
        """Return all numbers as JSON: name → list of ``{"labels", "value"}``, a histogram as ``{"buckets", …}``."""
        found: dict[str, Json] = {}
        for metric in METRICS:
            if metric.kind == "histogram":
                found[metric.name] = self._histogram()
            else:
                values = self._counts[metric.name] or ({} if metric.labels else {(): 0})
                found[metric.name] = [_value(metric, labels, number) for labels, number in sorted(values.items())]
        for gauges in self.gauges:
            for name, value in gauges().items():
                metric = _BY_NAME[name]
                if isinstance(value, Mapping):
                    found[name] = [_value(metric, (label,), number) for label, number in sorted(value.items())]
                else:
                    found[name] = [_value(metric, (), value)]
        return found

    def _histogram(self) -> Json:
        buckets: dict[str, Json] = {}
        total = 0
        for bound, number in zip((*map(str, WAITS_S), "+Inf"), self._waits, strict=True):
            total += number
            buckets[bound] = total
        return {"buckets": buckets, "count": total, "sum": round(self._waited_s, 6)}


def _value(metric: Metric, labels: Sequence[str], number: float) -> Json:
    whole = int(number) if number == int(number) else number
    return {"labels": dict(zip(metric.labels, labels, strict=True)), "value": whole}


def prometheus(nodes: Mapping[str, Mapping[str, Json]]) -> str:
    """Return the snapshots of nodes in the text form that Prometheus reads. Source: its exposition formats, 0.0.4."""
    lines = []
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.what}", f"# TYPE {metric.name} {metric.kind}"]
        for node, snapshot in sorted(nodes.items()):
            lines += _lines(metric, node, snapshot.get(metric.name))
    return "\n".join(lines) + "\n"


def _lines(metric: Metric, node: str, found: Json) -> list[str]:
    if isinstance(found, dict) and isinstance(buckets := found.get("buckets"), dict):
        bounds = sorted(buckets, key=float)
        lines = [_line(f"{metric.name}_bucket", {"node": node, "le": le}, buckets[le]) for le in bounds]
        return [*lines, *(_line(f"{metric.name}_{part}", {"node": node}, found.get(part)) for part in ("sum", "count"))]
    lines = []
    for one in found if isinstance(found, list) else []:
        if isinstance(one, dict) and isinstance(labels := one.get("labels"), dict):
            lines.append(_line(metric.name, {"node": node, **labels}, one.get("value")))
    return lines


def _line(name: str, labels: Mapping[str, Json], value: Json) -> str:
    words = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
    return f"{name}{{{words}}} {value if isinstance(value, int | float) else 0}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
