"""Classic BPF for seccomp: steps with named targets, laid out as bytes, and a balanced search over call numbers.

Called by seccomp.py. Pure. Must never lay out a jump that a filter can't make: it raises instead.

Source: seccomp(2), struct sock_filter and struct seccomp_data in linux/filter.h and linux/seccomp.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from node_agent.containment.errors import ContainmentError

__all__ = ["AND", "ANY_BIT", "EQUAL", "LOAD", "RETURN", "Step", "arg", "assemble", "search"]

LOAD: Final = 0x20
EQUAL: Final = 0x15
AT_LEAST: Final = 0x35
ANY_BIT: Final = 0x45
AND: Final = 0x54
RETURN: Final = 0x06

_OFFSET_ARGS: Final = 16
#: A conditional jump goes at most so many steps ahead.
_FARTHEST: Final = 255
_END: Final = 1 << 32


class Step(NamedTuple):
    """One instruction. ``if_true``, ``if_false``: labels to jump to, "" = the next step. ``label``: its own name."""

    code: int
    value: int
    if_true: str = ""
    if_false: str = ""
    label: str = ""


def arg(index: int, label: str = "", *, high: bool = False) -> Step:
    """Load the low (or high) half of a call's argument (both machines are little-endian)."""
    return Step(LOAD, _OFFSET_ARGS + 8 * index + 4 * high, label=label)


def search(ranges: Sequence[tuple[range, str]], default: str) -> list[Step]:
    """Return the steps that jump from the loaded call number to its range's label, by halving; others to ``default``.

    Neighbours with one label become one range. The kernel tries a new filter on every number there is to find those
    that it need not ask about again, so a short way to each number makes every start of a job cheaper.
    """
    starts: list[tuple[int, str]] = []
    end = 0
    for numbers, label in [*sorted(ranges, key=lambda each: each[0].start), (range(_END, _END), "")]:
        if numbers.start > end:
            starts.append((end, default))
        if numbers:
            starts.append((numbers.start, label))
        end = numbers.stop
    merged = [each for at, each in enumerate(starts) if at == 0 or starts[at - 1][1] != each[1]]
    return _halved(merged, "search")


def _halved(ranges: Sequence[tuple[int, str]], name: str) -> list[Step]:
    if len(ranges) == 1:
        return []
    middle = len(ranges) // 2
    low, high = ranges[:middle], ranges[middle:]
    below, above = _halved(low, f"{name}-"), _halved(high, f"{name}+")
    to_low = f"{name}-" if below else low[0][1]
    to_high = f"{name}+" if above else high[0][1]
    return [Step(AT_LEAST, high[0][0], to_high, to_low, name), *below, *above]


def assemble(steps: Sequence[Step]) -> bytes:
    """Return the program. Raises ContainmentError for a target that is missing, behind, or too far ahead."""
    places = {step.label: at for at, step in enumerate(steps) if step.label}
    if len(places) != sum(bool(step.label) for step in steps):
        raise ContainmentError("two steps of the filter have one label, so one of them is never reached")
    code = []
    for at, step in enumerate(steps):
        jumps = [places.get(target, -1) - at - 1 if target else 0 for target in (step.if_true, step.if_false)]
        if not all(0 <= jump <= _FARTHEST for jump in jumps):
            raise ContainmentError(f"the filter's step {at} can't jump to {step.if_true or step.if_false}")
        code.append(struct.pack("HBBI", step.code, *jumps, step.value))
    return b"".join(code)
