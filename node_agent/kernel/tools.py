"""Node-side tools as the policy file declares them, and the check of what a job passes to one.

Called by policy (reads `[[tool]]`), toolrun (calls) and the listing of `/tools`. Pure. Must never guess: an unknown key
refuses to load, a value that the schema does not name refuses the call, and no check takes longer than its input is.

    [[tool]]
    name = "search"                              # once; two of one name refuse to load
    about = "Looks a word up in the index."      # what jobs read in tool.list
    argv = ["/srv/tools/search", "--", "{word}"] # no shell; {word} as a whole word is that argument, as text
    timeout_s = 30.0                             # default 30, at most 3,600
    output = "16K"                               # most of what it prints that is passed on; default 16K, at most 32K
    [tool.grants]                                # what its own sandbox has; default nothing
    read = ["/srv/index"]                        # also write, net, memory, cpus, pids, disk
    [tool.schema]                                # its arguments, as JSON schema: an object; others are refused
    required = ["word"]
    properties = { word = { type = "string", maxLength = 100 } }

The tool finds all arguments in the variable TOOL_ARGS, as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from node_agent.errors import PolicyError
from runner.wire import ids
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.grants import Grants, PathGrant, parse_bytes, parse_net

__all__ = ["Tool", "argv_of", "parse_tools", "problem"]

MAX_TIMEOUT_S: Final = 3600.0
MAX_OUTPUT_BYTES: Final = 32 * 1024
MAX_TOOLS: Final = 64
_DEEPEST: Final = 8
_KEYS: Final = frozenset({"name", "about", "argv", "timeout_s", "output", "grants", "schema"})
_GRANTS: Final = frozenset({"read", "write", "net", "memory", "cpus", "pids", "disk"})
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
#: What each type may say of itself, besides type, enum, description, default and title.
_WORDS: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum"}),
    "number": frozenset({"minimum", "maximum"}),
    "boolean": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_TOLD: Final = frozenset({"type", "enum", "description", "title"})
_BOUNDS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. ``schema``: a JSON schema of the subset above, whose top is an object. ``output_bytes``: see above."""

    name: str
    argv: tuple[str, ...]
    about: str = ""
    timeout_s: float = 30.0
    output_bytes: int = 16 * 1024
    grants: Grants = Grants()
    schema: Mapping[str, Json] = field(default_factory=dict)


def parse_tools(entries: object) -> dict[str, Tool]:
    """Return the tools of a policy file by name. Raises PolicyError for anything not understood (fail closed)."""
    if not isinstance(entries, list) or len(entries) > MAX_TOOLS:
        raise PolicyError(f"[[tool]] must be a list of at most {MAX_TOOLS} tables")
    found: dict[str, Tool] = {}
    for number, entry in enumerate(entries, 1):
        tool = _tool(f"[[tool]] {number}", entry)
        if tool.name in found:
            raise PolicyError(f"[[tool]] {number}: there is a tool {tool.name} already: give one another name")
        found[tool.name] = tool
    return found


def problem(schema: Mapping[str, Json], value: Json, path: str = "args") -> str | None:
    """Return what is wrong with a value by a schema that `parse_tools` took; None: nothing. Never raises."""
    kind = str(schema["type"])
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"{path} is {_an(kind)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and not any(value == one and type(value) is type(one) for one in choices):
        return f"{path} is one of {len(choices)} values that the tool names"
    if isinstance(value, dict):
        return _object_problem(schema, value, path)
    if isinstance(value, list):
        items = schema.get("items")
        checks = (problem(items, one, f"{path}[{number}]") for number, one in enumerate(value)) if items else ()  # type: ignore[arg-type] # _schema checked it
        return _bound_problem(schema, len(value), ("minItems", "maxItems"), path) or _first(checks)
    if isinstance(value, str):
        return _bound_problem(schema, len(value), ("minLength", "maxLength"), path)
    if isinstance(value, int | float):
        return _bound_problem(schema, value, ("minimum", "maximum"), path)
    return None


def argv_of(tool: Tool, args: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the words of one call. An argument that was not passed is an empty word."""
    return (tool.argv[0], *(_word(word, args) for word in tool.argv[1:]))


def _word(word: str, args: Mapping[str, Json]) -> str:
    if not (word.startswith("{") and word.endswith("}")):
        return word
    value = args.get(word[1:-1])
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value).replace("\0", "")


def _object_problem(schema: Mapping[str, Json], value: Mapping[str, Json], path: str) -> str | None:
    fields = cast("dict[str, dict[str, Json]]", schema.get("properties", {}))
    for name in cast("list[str]", schema.get("required", [])):
        if name not in value:
            return f"{path}.{name} is missing"
    for name, one in value.items():
        if name not in fields:
            return f"{path} has no {name[:64]!r}: the tool takes {', '.join(fields) or 'no arguments'}"
        if (found := problem(fields[name], one, f"{path}.{name}")) is not None:
            return found
    return None


def _bound_problem(schema: Mapping[str, Json], size: float, names: tuple[str, str], path: str) -> str | None:
    least, most = schema.get(names[0]), schema.get(names[1])
    if isinstance(least, int | float) and not size >= least:
        return f"{path}: {names[0]} is {least:g}"
    if isinstance(most, int | float) and not size <= most:
        return f"{path}: {names[1]} is {most:g}"
    return None


def _first(found: Iterator[str | None] | tuple[()]) -> str | None:
    return next((one for one in found if one is not None), None)


def _tool(where: str, entry: object) -> Tool:
    if not isinstance(entry, dict):
        raise PolicyError(f"{where} must be a table")
    _known(where, entry, _KEYS)
    name = entry.get("name")
    try:
        ids.check_name(name if isinstance(name, str) else "", "tool")
    except WireError as error:
        raise PolicyError(f"{where}: name: {error}") from None
    about, seconds = entry.get("about", ""), entry.get("timeout_s", 30.0)
    if not isinstance(about, str) or len(about) > 1000:
        raise PolicyError(f"{where}: about is a text of at most 1,000 characters")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise PolicyError(f"{where}: timeout_s is a number up to {MAX_TIMEOUT_S:g}")
    output = _sized(f"{where}: output", entry.get("output", "16K"))
    if output > MAX_OUTPUT_BYTES:
        raise PolicyError(f"{where}: output is at most {MAX_OUTPUT_BYTES >> 10}K: a call's answer has no room for more")
    schema = _schema(f"{where}: schema", {"type": "object", **_table(f"{where}: schema", entry.get("schema", {}))}, 0)
    if schema["type"] != "object":
        raise PolicyError(f"{where}: schema is that of an object: its properties are the tool's arguments")
    argv = _argv(where, entry.get("argv"), cast("dict[str, dict[str, Json]]", schema.get("properties", {})))
    grants = _grants(f"{where}: grants", _table(f"{where}: grants", entry.get("grants", {})))
    return Tool(str(name), argv, about, float(seconds), output, grants, schema)


def _argv(where: str, value: object, fields: Mapping[str, Mapping[str, Json]]) -> tuple[str, ...]:
    words = value if isinstance(value, list) else []
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise PolicyError(f"{where}: argv is a list of words, the first of them the program")
    if not words[0].startswith("/"):
        raise PolicyError(f"{where}: argv[0] is the program's absolute path: nothing is looked up for a tool")
    for word in words[1:]:
        if word.startswith("{") and word.endswith("}"):
            kind = fields.get(word[1:-1], {}).get("type")
            if kind not in ("string", "integer", "number", "boolean"):
                raise PolicyError(f"{where}: {word} in argv names no argument of the schema that is one word")
    return tuple(words)


def _grants(where: str, table: Mapping[str, object]) -> Grants:
    _known(where, table, _GRANTS)
    try:
        paths = [PathGrant(path, "read") for path in _words(where, table, "read")]
        paths += [PathGrant(path, "write") for path in _words(where, table, "write")]
        net = [one for text in _words(where, table, "net") for one in parse_net(text)]
    except WireError as error:
        raise PolicyError(f"{where}: {error}") from None
    sizes = {name: _sized(f"{where}: {name}", table[name]) for name in ("memory", "disk") if name in table}
    pids, cpus = table.get("pids"), table.get("cpus")
    if pids is not None and (type(pids) is not int or pids < 1):
        raise PolicyError(f"{where}: pids is a number of processes")
    if cpus is not None and (isinstance(cpus, bool) or not isinstance(cpus, int | float) or not cpus > 0):
        raise PolicyError(f"{where}: cpus is a positive number")
    return Grants(
        paths=tuple(paths),
        net=tuple(net),
        memory_bytes=sizes.get("memory"),
        disk_bytes=sizes.get("disk"),
        pids=pids,
        cpus=None if cpus is None else float(cpus),
    )


def _schema(where: str, value: object, depth: int) -> dict[str, Json]:
    """Return a schema of the subset: everything in it is understood, or it refuses to load."""
    table = _table(where, value)
    kind = table.get("type")
    if not isinstance(kind, str) or kind not in _TYPES or depth > _DEEPEST:
        raise PolicyError(f"{where}: type is one of {', '.join(_TYPES)}, at most {_DEEPEST} deep")
    _known(where, table, _TOLD | _WORDS[kind])
    if table.get("additionalProperties", False) is not False:
        raise PolicyError(f"{where}: additionalProperties is false: what the schema does not name is refused")
    for word in _BOUNDS:
        bound = table.get(word, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise PolicyError(f"{where}: {word} is a number")
    choices = table.get("enum", [])
    if not isinstance(choices, list) or not all(isinstance(one, str | int) for one in choices):
        raise PolicyError(f"{where}: enum is a list of texts and whole numbers")
    if not all(isinstance(table.get(word, ""), str) for word in ("description", "title")):
        raise PolicyError(f"{where}: description and title are texts")
    found = dict(table)
    if "items" in table:
        found["items"] = _schema(f"{where}.items", table["items"], depth + 1)
    if kind == "object":
        fields = _table(f"{where}.properties", table.get("properties", {}))
        found["properties"] = {name: _schema(f"{where}.{name}", one, depth + 1) for name, one in fields.items()}
        required = table.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) and name in fields for name in required):
            raise PolicyError(f"{where}: required names properties")
    return cast("dict[str, Json]", found)


def _known(where: str, table: Mapping[str, object], keys: frozenset[str]) -> None:
    for key in table:
        if key not in keys:
            raise PolicyError(f"unknown key {key!r} in {where}")


def _table(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise PolicyError(f"{where} must be a table")
    return value


def _words(where: str, table: Mapping[str, object], key: str) -> list[str]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise PolicyError(f"{where}: {key} is a list of texts")
    return value


def _sized(where: str, value: object) -> int:
    try:
        return parse_bytes(str(value))
    except WireError as error:
        raise PolicyError(f"{where}: {error}") from None


def _an(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"
