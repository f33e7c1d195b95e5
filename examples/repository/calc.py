"""The repository of the demo: one function, and it is wrong."""


def add(a: int, b: int) -> int:
    return a - b
