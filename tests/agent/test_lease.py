"""The deadline that lifelines carry: from the renewal that was sent, minus a margin that grows with late wake-ups."""

from __future__ import annotations

from node_agent.lease import LATE_FACTOR, Lease

SECOND = 1_000_000_000


class Holder:
    """A lifeline that remembers its newest deadline."""

    def __init__(self) -> None:
        self.deadline_ns = 0

    def renew(self, deadline_ns: int) -> None:
        """Take it."""
        self.deadline_ns = deadline_ns


def span_s(lease: Lease, holder: Holder, sent_ns: int) -> float:
    """How long after a renewal jobs may live."""
    lease.extend(sent_ns)
    return (holder.deadline_ns - sent_ns) / SECOND


def test_attack_35_the_margin_is_ten_times_the_worst_wake_up() -> None:
    """A late wake-up makes jobs end earlier, by ten times its delay, and at most by half the lease."""
    holder = Holder()
    lease = Lease([holder], lease_s=10.0, margin_s=2.5, clock=lambda: 0)
    assert span_s(lease, holder, 1 * SECOND) == 7.5
    lease.late(0.1)
    assert span_s(lease, holder, 20 * SECOND) == 7.5
    lease.late(0.4)
    assert span_s(lease, holder, 40 * SECOND) == 10 - LATE_FACTOR * 0.4
    lease.late(3.0)
    assert span_s(lease, holder, 60 * SECOND) == 5.0


def test_a_delay_is_forgotten_slowly() -> None:
    """After a hundred wake-ups in time the margin is the old one again."""
    holder = Holder()
    lease = Lease([holder], lease_s=10.0, margin_s=2.5, clock=lambda: 0)
    lease.late(0.5)
    lease.late(0.0)
    assert 5.0 < span_s(lease, holder, 1 * SECOND) < 5.2
    for _ in range(100):
        lease.late(0.0)
    assert span_s(lease, holder, 20 * SECOND) == 7.5
