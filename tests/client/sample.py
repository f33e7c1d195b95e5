"""A module of tasks, as an application writes it."""

from __future__ import annotations

from runner import App, Grants, Secret

app = App()


@app.task(queue="agents", retries=2, timeout=30, tags={"team": "acme"}, grants=Grants(memory="1G", read=("/data",)))
def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


@app.task(grants=Grants(net=("api.example.com:443",), secrets=(Secret("KEY", proxy="api.example.com"),)))
def research(topic: str) -> dict[str, str]:
    """Look something up."""
    return {"topic": topic}
