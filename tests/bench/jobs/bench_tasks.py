"""Our side's job: the same nothing, isolated."""

from runner import App

app = App()


@app.task()
def noop() -> int:
    """Return 1."""
    return 1
