"""Tasks that look for what must not be there: they run in a forked worker, with the memory that it inherited."""

from __future__ import annotations

import os
import re
import resource

from runner import App

app = App()


@app.task()
def scan(halves: list[list[str]]) -> list[int]:
    """Count each word, given in two halves so that this search doesn't find itself, in all memory of this process."""
    counts = [0] * len(halves)
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
            if not found or "[v" in line:
                continue
            start, end = (int(word, 16) for word in found.groups())
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except OSError:
                continue
            for index, (first, second) in enumerate(halves):
                for hit in re.finditer(re.escape(first.encode()), data):
                    counts[index] += data.startswith(second.encode(), hit.end())
    return counts


@app.task()
def own_word(word: str, halves: list[list[str]]) -> list[int]:
    """Hold ``word`` and search it: shows that the search finds what is there."""
    held = [word]
    counts = scan.function(halves)
    assert held
    return counts


@app.task()
def status() -> dict[str, object]:
    """Return what the kernel says of this process and its descriptors."""
    with open("/proc/self/status") as file:
        lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
    listing = [int(name) for name in os.listdir("/proc/self/fd")]
    still = []
    for fd in listing:
        try:
            os.fstat(fd)
        except OSError:
            continue
        still.append(fd)
    return {"status": lines, "fds": sorted(still), "core": list(resource.getrlimit(resource.RLIMIT_CORE))}
