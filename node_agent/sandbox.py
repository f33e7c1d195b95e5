"""From an admitted job to the exact sandbox: Plan, payload and profile, all of them values.

Called by the supervisor after admission and after the grants were opened. Pure. Must never put arguments, environment
values or argv into the Plan: they are the payload, read by the worker after its restrictions (attack 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from node_agent.containment.plan import DOORS, PROXY, Level, Mount, Plan, Profile
from node_agent.containment.reused import Terms
from node_agent.routes import STAND_IN, base_urls, library_urls
from runner.wire import codec, ids
from runner.wire.grants import NetGrant
from runner.wire.spec import JobSpec

__all__ = ["Defaults", "payload_of", "plan_of", "profile_of", "proxy_environment", "terms_of", "timeout_of"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The node's limits for what a job does not ask (DESIGN §5). None = this host has no total for it."""

    level: Level | Literal["none"]
    python_paths: tuple[str, ...] = ()
    task_paths: tuple[str, ...] = ()
    #: Of both: those in which others may make sockets, so that jobs that see them may make none (attack 16).
    loose_paths: tuple[str, ...] = ()
    memory_bytes: int | None = None
    #: Where there is no memory total: what one process may hold of private, writable memory.
    data_bytes: int | None = None
    pids: int = 512
    files: int = 1024
    wall_s: float = 3600.0
    output_bytes: int = 64 << 20
    result_bytes: int = 8 << 20
    disk_bytes: int = 1 << 30
    tmp_bytes: int = 256 << 20
    shm_bytes: int = 64 << 20
    nice: int = 0


def plan_of(spec: JobSpec, attempt: int, mounts: tuple[Mount, ...], uid: int, gid: int, node: Defaults) -> Plan:
    """Return the sandbox of one attempt; ``uid`` and ``gid`` are the job's own (A) or the agent's (B)."""
    grants, limits = spec.grants, spec.limits
    task_paths = node.task_paths if spec.task is not None else ()
    shown = (*node.python_paths, *task_paths)
    return Plan(
        attempt=ids.attempt_name(spec.id, attempt),
        kind="task" if spec.task is not None else "command",
        level="F" if node.level == "none" else node.level,
        uid=uid,
        gid=gid,
        cwd=spec.cwd or "/work",
        mounts=mounts,
        python_paths=node.python_paths,
        task_paths=task_paths,
        disk_bytes=grants.disk_bytes or node.disk_bytes,
        tmp_bytes=node.tmp_bytes,
        shm_bytes=node.shm_bytes,
        files=min(limits.files or node.files, node.files),
        pids=grants.pids or node.pids,
        memory_bytes=grants.memory_bytes or node.memory_bytes,
        data_bytes=node.data_bytes,
        cpus=grants.cpus,
        result_bytes=min(limits.result_bytes or node.result_bytes, node.result_bytes),
        allow_unix=grants.unix or (not mounts and not any(path in node.loose_paths for path in shown)),
        allow_exec=not grants.no_exec,
        nice=node.nice,
        broker=spec.needs_broker,
        reuse=spec.reuse > 0,
    )


def payload_of(spec: JobSpec, attempt: int, authority: str = "", sdks: Mapping[str, str] | None = None) -> bytes:
    """Return what the restricted worker reads last, as canonical JSON.

    ``authority``: the certificate that the job's TLS clients are to trust for the hosts of its proxied secrets.
    ``sdks``: which library the vault's rules say a secret is for.
    """
    found = {**proxy_environment(spec.grants.reach), **library_urls(spec.grants, sdks), **_stand_ins(spec)}
    payload: dict[str, object] = {
        "job": spec.id,
        "attempt": attempt,
        "tags": dict(spec.tags),
        "env": {**found, **dict(spec.env)},
    }
    if urls := base_urls(spec.grants):
        payload["urls"] = urls
    if authority:
        payload["ca"] = authority
    if spec.grants.secrets:
        payload["secrets"] = [
            {"name": one.name, "mode": one.mode, "target": one.target or ""} for one in spec.grants.secrets
        ]
    if spec.grants.service:
        payload["service"] = ":".join(map(str, DOORS["service"]))
    if spec.sealed is not None:
        payload["sealed"] = sorted(spec.sealed)
    if spec.task is not None:
        payload |= {"task": spec.task, "args": list(spec.args), "kwargs": dict(spec.kwargs)}
    else:
        payload["argv"] = list(spec.argv or ())
    return codec.dump(payload)


def proxy_environment(net: Sequence[NetGrant]) -> dict[str, str]:
    """Return what makes ordinary programs of a job with net grants use its proxy; nothing without grants.

    The job's own loopback is reached directly, unless the host's was granted: the proxy alone leads there. HTTP in
    ALL_PROXY, because a client without SOCKS support fails on another scheme; the proxy speaks SOCKS5 all the same.
    """
    if not net:
        return {}
    granted = {grant.host.strip("[]").lower() for grant in net}
    direct = ",".join(host for host in ("localhost", "127.0.0.1", "::1") if host not in granted)
    proxy = f"http://{PROXY[0]}:{PROXY[1]}"
    names = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy, "NO_PROXY": direct}
    return {**names, **{name.lower(): value for name, value in names.items()}, "NODE_USE_ENV_PROXY": "1"}


def _stand_ins(spec: JobSpec) -> dict[str, str]:
    """Return variables that programs look for before they send anything: one for each proxied secret, without it."""
    return {one.name: STAND_IN for one in spec.grants.secrets if one.mode == "proxy" and one.name.isidentifier()}


def profile_of(spec: JobSpec, signer: str) -> Profile:
    """Return what another attempt must equal to follow in the same mould."""
    return Profile(
        tenant=spec.tenant,
        signer=signer,
        secrets=(*(secret.name for secret in spec.grants.secrets), *(spec.sealed or ())),
        net=tuple(f"{net.host}:{net.port}" for net in spec.grants.reach),
        fresh=spec.profile == "fresh",
        service=spec.grants.service,
    )


def terms_of(spec: JobSpec, signer: str, node: Defaults) -> Terms | None:
    """Return what another attempt must equal to follow in the same worker; None: none may."""
    if not spec.reuse:
        return None
    plan = replace(plan_of(spec, 1, (), 1, 1, node), attempt="")
    return Terms((profile_of(spec, signer), spec.task, plan), spec.reuse)


def timeout_of(spec: JobSpec, node: Defaults) -> float:
    """Return the wall limit of one attempt in seconds."""
    return spec.limits.timeout_s or node.wall_s
