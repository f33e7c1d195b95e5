"""The stock side's job: the same nothing, run by `rq worker-pool`."""


def noop() -> int:
    """Return 1."""
    return 1
