"""The node's own socket: for its owner and root only, with a path that every system accepts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from node_agent.errors import SetupError
from node_agent.local import LocalSocket, ask
from runner.wire import codec

REQUEST: dict[str, object] = {"op": "x"}


async def _echo(request: dict[str, codec.Json]) -> dict[str, object]:
    return {"got": request.get("op")}


def test_one_line_in_one_line_out(home: Path) -> None:
    """A request is answered, and the socket's path and modes are the owner's alone."""

    async def check() -> dict[str, codec.Json]:
        path = home / "s" / "n1"
        server = LocalSocket(path, _echo)
        await server.start()
        try:
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            return await asyncio.get_running_loop().run_in_executor(None, ask, path, REQUEST, 5.0)
        finally:
            await server.stop()
            assert not path.exists()

    assert asyncio.run(check()) == {"got": "x"}


def test_nobody_there_is_a_connection_error(home: Path) -> None:
    """No agent: said plainly, at once."""
    with pytest.raises(ConnectionError, match="no agent answers"):
        ask(home / "s" / "none", {}, 1.0)


def test_a_path_that_is_too_long_is_refused_with_the_fix(home: Path) -> None:
    """Over 100 bytes: the message says to choose a shorter home."""
    server = LocalSocket(home / ("x" * 120), _echo)
    with pytest.raises(SetupError, match="shorter --home"):
        asyncio.run(server.start())


def test_attack_55_a_server_of_another_user_is_not_trusted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client checks who serves the socket before it says anything."""

    async def check() -> None:
        path = home / "s" / "n1"
        server = LocalSocket(path, _echo)
        await server.start()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr("node_agent.local.peer_uid", lambda _sock: 777)
        try:
            with pytest.raises(ConnectionError, match="another user"):
                await asyncio.get_running_loop().run_in_executor(None, ask, path, REQUEST, 5.0)
        finally:
            await server.stop()

    asyncio.run(check())
