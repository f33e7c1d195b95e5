"""Tasks for a first try: ``ringfence up --import tasks:examples``, then ``ringfence call tasks:square --arg 12``."""

from runner import App, current_job

app = App()


@app.task(queue="agents")
def square(number: int) -> int:
    """Return the square of a number."""
    return number * number


@app.task(queue="agents", retries=2)
def flaky(succeed_at: int) -> str:
    """Fail until the given attempt."""
    if current_job.attempt < succeed_at:
        raise RuntimeError(f"attempt {current_job.attempt} fails on purpose")
    return f"attempt {current_job.attempt} succeeded"
