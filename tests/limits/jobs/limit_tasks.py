"""Tasks that run into limits; loaded by name inside the sandbox."""

from runner import App

app = App()


@app.task
def fill(path: str, size_bytes: int) -> int:
    """Write a file of that size."""
    with open(path, "wb") as file:
        for _ in range(size_bytes >> 20):
            file.write(bytes(1 << 20))
    return size_bytes


@app.task
def swallow(size_bytes: int) -> int:
    """Hold that much memory, touched."""
    return len(bytearray(b"x") * size_bytes)


@app.task
def answer(size_bytes: int) -> str:
    """Return a text of that size."""
    return "x" * size_bytes
