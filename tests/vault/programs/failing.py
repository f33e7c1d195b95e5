"""A task that fails with its secret in hand, in each way that failures have carried secrets elsewhere."""

from __future__ import annotations

import sys
import traceback

from runner import App, secret

app = App()


class Shown:
    """Shows what it holds."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Shown({self.value})"


@app.task()
def fail(way: str) -> None:
    """Fail in one way: local, address, repr, chain or locals."""
    value = secret("KEY").decode()
    held = {"key": value}
    if way == "address":
        raise RuntimeError(f"can't reach https://user:{value}@host.example/")
    if way == "repr":
        raise RuntimeError(f"no good: {Shown(value)!r}")
    if way == "chain":
        try:
            int(value)
        except ValueError as error:
            raise RuntimeError("outer") from error
    if way == "locals":
        try:
            held["none"]
        except KeyError as error:
            found = traceback.TracebackException.from_exception(error, capture_locals=True)
            sys.stderr.write("".join(found.format()))
    raise RuntimeError(f"failed with {len(held)} held")
