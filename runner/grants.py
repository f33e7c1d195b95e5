"""Grants and secrets as applications write them: plain text and numbers, checked at once.

Called by application code. Must never permit by default: ``Grants()`` permits nothing beyond the bare sandbox.

    Grants(net=("api.example.com:443",), read=("/data",), memory="1G", secrets=(Secret("KEY", proxy="example.com"),))
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from runner.errors import UsageError
from runner.wire import grants as forms
from runner.wire import ids
from runner.wire.errors import WireError
from runner.wire.spec import MAX_SPAWN

__all__ = ["Grants", "Secret"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Secret:
    """One secret by name and the way it is handed over; exactly one of the ways, ``proxy=HOST`` is the strongest.

    ``proxy``: the job never has it, requests to that host carry it. ``get``: asked for on the job's channel. ``file``:
    in /run/secrets/NAME. ``env``: in the environment variable of that name.
    """

    name: str
    proxy: str | None = None
    env: str | None = None
    file: bool = False
    get: bool = False

    def __post_init__(self) -> None:
        ways = [self.proxy is not None, self.env is not None, self.file, self.get]
        if sum(ways) != 1:
            raise UsageError(
                f"Secret({self.name!r}) needs exactly one of proxy=HOST, env=VARIABLE, file=True, get=True"
            )
        _wired(ids.check_name, self.name, "secret")

    def to_wire(self) -> forms.SecretGrant:
        """Return the form that is signed."""
        if self.proxy is not None:
            grant = forms.SecretGrant(self.name, "proxy", self.proxy)
            _wired(lambda one: one.destination, grant)
            return grant
        if self.env is not None:
            return forms.SecretGrant(self.name, "env", self.env)
        return forms.SecretGrant(self.name, "file" if self.file else "get")


@dataclass(frozen=True, slots=True)
class Grants:
    """Everything one job may touch. Sizes are text (``"512M"``) or bytes; None means the node's default limit.

    ``read``, ``write``: absolute paths; a write path with ``:all`` behind it may also change what is run later (git
    hooks, editor settings). ``net``: ``HOST:PORT``. ``tools``: node-side tools by name. ``exec=False``: nothing that
    the job writes or was granted can be executed, the node's own programs alone can. ``unix``: Unix sockets also beside
    granted host paths, whose own sockets it then reaches. ``spawn``: how many jobs it may start in all, those that they
    start included, none of them with more than it has itself. ``state``: size of its ``/state``, which its next attempt
    finds again. ``agent``: the name whose ``/mem`` it uses together with all jobs of the tenant that hold the name.
    ``mail``: mailboxes ``NAME`` and topics ``topic/NAME`` of its tenant, ``:send`` or ``:receive`` behind one if it is
    only that. ``watch``: which jobs of its tenant it may watch and signal (``all``, ``tag:K=V``, ``group:G``, …).
    """

    read: Sequence[str] = ()
    write: Sequence[str] = ()
    net: Sequence[str] = ()
    secrets: Sequence[Secret] = ()
    tools: Sequence[str] = ()
    memory: str | int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk: str | int | None = None
    exec: bool = True
    service: bool = False
    unix: bool = False
    spawn: int | None = None
    state: str | int | None = None
    agent: str | None = None
    mail: Sequence[str] = ()
    watch: Sequence[str] = ()
    _wire: forms.Grants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("read", "write", "net", "tools", "mail", "watch"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"Grants({name}=…) takes a list of texts, not one text")
        object.__setattr__(self, "_wire", self._checked())

    def to_wire(self) -> forms.Grants:
        """Return the form that is signed."""
        return self._wire

    def _checked(self) -> forms.Grants:
        paths = [_path(path, "read") for path in self.read] + [_path(path, "write") for path in self.write]
        if self.cpus is not None and not (math.isfinite(self.cpus) and self.cpus > 0):
            raise UsageError("cpus is a positive number")
        if self.pids is not None and self.pids < 1:
            raise UsageError("pids is at least 1")
        if self.spawn is not None and not 1 <= self.spawn <= MAX_SPAWN:
            raise UsageError(f"spawn is 1 to {MAX_SPAWN} jobs")
        return forms.Grants(
            paths=tuple(paths),
            net=tuple(grant for text in self.net for grant in _wired(forms.parse_net, text)),
            secrets=tuple(secret.to_wire() for secret in self.secrets),
            tools=tuple(_wired(ids.check_name, tool, "tool") for tool in self.tools),
            memory_bytes=_size(self.memory, "memory"),
            cpus=None if self.cpus is None else float(self.cpus),
            pids=self.pids,
            disk_bytes=_size(self.disk, "disk"),
            no_exec=not self.exec,
            service=self.service,
            unix=self.unix,
            spawn=self.spawn,
            state_bytes=_size(self.state, "state"),
            agent=None if self.agent is None else _wired(ids.check_name, self.agent, "agent's name"),
            mail=tuple(_wired(forms.parse_mail, box) for box in self.mail),
            watch=tuple(_wired(forms.check_watch, selector) for selector in self.watch),
        )


def _path(text: str, mode: str) -> forms.PathGrant:
    everything = mode == "write" and text.endswith(":all")
    path = text.removesuffix(":all") if everything else text
    if not path.startswith("/"):
        raise UsageError(f"{mode} grant {text!r}: the path must be absolute, it names a place on the node")
    path = posixpath.normpath(path)
    path = path[1:] if path.startswith("//") else path
    return _wired(forms.PathGrant, path, "read" if mode == "read" else "write", everything)


def _size(value: str | int | None, what: str) -> int | None:
    if value is None:
        return None
    size = _wired(forms.parse_bytes, value) if isinstance(value, str) else value
    if size < 1:
        raise UsageError(f"{what} is a positive size such as '512M'")
    return size


def _wired(check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return check(*args, **kwargs)
    except WireError as error:
        raise UsageError(str(error)) from None
