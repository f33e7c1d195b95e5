"""Tasks that these fleets serve."""

from __future__ import annotations

from runner import App, Retry, current_job

app = App()


@app.task(retries=3, backoff=60.0, never_on=["exception"])
def third_time(in_s: float) -> int:
    """Ask for another attempt until the third."""
    if current_job.attempt < 3:
        raise Retry("not yet", in_s=in_s)
    return current_job.attempt


@app.task(retries=2)
def always_again() -> None:
    """Ask for another attempt for ever."""
    raise Retry(in_s=0)


@app.task(retries=3, never_on=["exception:ValueError"])
def hopeless() -> None:
    """Fail in a way that no other attempt can mend."""
    raise ValueError("hopeless")
