"""A tool call's forms: its arguments, the sandbox that is planned for it, and its answer. Pure.

Called by toolrun. Must never give a tool more than the policy file names, nor a job more of its output than that.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from node_agent.containment.plan import Verdict
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.tools import Tool, argv_of
from node_agent.sandbox import Defaults
from runner.wire import codec, ids
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec, Limits

__all__ = ["ARGS", "Printed", "defaults_of", "plain", "shown", "spec_of", "told"]

#: Where a tool finds its arguments.
ARGS: Final = "TOOL_ARGS"
#: What a tool has that asks for no other total, at most.
MEMORY_BYTES: Final = 512 << 20
DISK_BYTES, TMP_BYTES, SHM_BYTES = 64 << 20, 32 << 20, 16 << 20
PIDS: Final = 128


class Printed(Protocol):
    """What came of a call besides its verdict."""

    output: bytearray
    killed: bool
    timed_out: bool


def plain(args: dict[str, object]) -> dict[str, Json]:
    try:
        data = codec.dump(args)
    except WireError as error:
        raise CallError(ErrorCode.BAD_REQUEST, str(error)) from None
    if len(data) > MAX_DATA_BYTES:
        raise CallError(ErrorCode.BAD_REQUEST, f"a tool's arguments have at most {MAX_DATA_BYTES} bytes")
    return args  # type: ignore[return-value] # codec wrote them: they are plain JSON


def spec_of(caller: Caller, tool: Tool, args: Mapping[str, Json]) -> JobSpec:
    """Return the tool's call in the form that sandboxes are planned from. It is signed by nobody and never stored."""
    try:
        return JobSpec(
            id=ids.new_job_id(caller.tenant),
            tenant=caller.tenant,
            queue=tool.name,
            nonce=ids.new_nonce(),
            not_before_ms=0,
            not_after_ms=caller.spec.not_after_ms,
            argv=argv_of(tool, args),
            env={ARGS: codec.dump(dict(args)).decode("utf-8")},
            grants=tool.grants,
            limits=Limits(timeout_s=tool.timeout_s),
        )
    except WireError as error:
        raise CallError(ErrorCode.BAD_REQUEST, str(error)) from None


def defaults_of(node: Defaults) -> Defaults:
    return replace(
        node,
        memory_bytes=None if node.memory_bytes is None else min(node.memory_bytes, MEMORY_BYTES),
        data_bytes=None if node.data_bytes is None else min(node.data_bytes, MEMORY_BYTES),
        disk_bytes=min(node.disk_bytes, DISK_BYTES),
        tmp_bytes=min(node.tmp_bytes, TMP_BYTES),
        shm_bytes=min(node.shm_bytes, SHM_BYTES),
        pids=min(node.pids, PIDS),
    )


def shown(tool: Tool) -> Json:
    return {"name": tool.name, "about": tool.about, "schema": dict(tool.schema), "timeout_s": tool.timeout_s}


def told(tool: Tool, printed: Printed, verdict: Verdict, ms: float) -> Json:
    """Return the answer: text where it is text, else base64."""
    data = bytes(printed.output[: tool.output_bytes])
    truncated = len(printed.output) > tool.output_bytes
    ended = verdict.kind == "exit" and not printed.killed
    answer: dict[str, Json] = {
        "exit_code": verdict.code if ended else None,
        "signal": verdict.signal if verdict.kind == "signal" else 9 if printed.killed else None,
        "timed_out": printed.timed_out,
        "truncated": truncated,
        "base64": False,
        "ms": round(ms, 3),
    }
    try:
        # A cut in the middle of a character is no reason to encode all of it.
        return answer | {"output": data.decode("utf-8", "ignore" if truncated else "strict")}
    except UnicodeDecodeError:
        return answer | {"output": base64.b64encode(data).decode("ascii"), "base64": True}
