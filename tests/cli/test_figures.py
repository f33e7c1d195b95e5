"""A job's figures are told in words."""

from __future__ import annotations

import pytest

from runner.cli.figures import size, usage


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (70 << 20, "70.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_have_units(count: int, text: str) -> None:
    """Bytes in powers of 1,024."""
    assert size(count) == text


def test_a_job_that_never_ran_used_nothing() -> None:
    """No figures, no words; else those that there are."""
    assert usage({}) == ""
    assert usage({"wall_s": 0.0, "processes": 0}) == ""
    told = usage({"wall_s": 2.0, "cpu_s": 0.4, "max_rss_bytes": 1 << 20, "processes": 2, "output_bytes": 10})
    assert told == "2.00 s, CPU 0.40 s, peak memory 1.0 MiB, 2 processes, output 10 B"
