"""Tools in the policy file, and the check of what a job passes to one."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.admission import Denial
from node_agent.errors import PolicyError
from node_agent.kernel.toolrun import ToolDesk
from node_agent.kernel.tools import Tool, argv_of, parse_tools, problem
from node_agent.policy import parse
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.grants import Grants, NetGrant, PathGrant
from tests.kernel import rig
from tests.kernel.kin import Kin, parent

SEARCH = """
version = 1
[[tool]]
name = "search"
about = "Looks a word up."
argv = ["/bin/echo", "--", "{word}", "{most}"]
timeout_s = 5
output = "4K"
[tool.grants]
read = ["/srv/index"]
net = ["index.example.com:443"]
memory = "128M"
[tool.schema]
required = ["word"]
properties.word = { type = "string", maxLength = 10 }
properties.most = { type = "integer", minimum = 1, maximum = 9 }
properties.exact = { type = "boolean" }
properties.kinds = { type = "array", maxItems = 2, items = { type = "string", enum = ["a", "b"] } }
properties.of = { type = "object", properties = { year = { type = "number" } } }
"""


def search() -> Tool:
    """The tool of the text above."""
    return parse(SEARCH).tools["search"]


def test_a_tool_is_read_whole() -> None:
    """Name, words, limits, grants and schema are those of the file."""
    tool = search()
    assert (tool.argv[0], tool.timeout_s, tool.output_bytes) == ("/bin/echo", 5.0, 4096)
    wanted = Grants((PathGrant("/srv/index", "read"),), (NetGrant("index.example.com", 443),), memory_bytes=128 << 20)
    assert tool.grants == wanted


def test_k5_a_second_tool_of_a_name_refuses_to_load() -> None:
    """No tool silently takes the place of another one (row K5)."""
    with pytest.raises(PolicyError, match="already"):
        parse(SEARCH + '[[tool]]\nname = "search"\nargv = ["/bin/true"]\n')


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('name = "a b"', "name"),
        ('argv = ["true"]', "absolute"),
        ("argv = []", "list of words"),
        ('argv = ["/bin/true", "{nobody}"]', "no argument"),
        ('argv = ["/bin/true", "{kinds}"]\nschema.properties.kinds = { type = "array" }', "one word"),
        ("timeout_s = 0", "timeout_s"),
        ("timeout_s = true", "timeout_s"),
        ('output = "64K"', "at most 32K"),
        ("secrets = []", "unknown key 'secrets'"),
        ('grants.secrets = ["KEY"]', "unknown key 'secrets'"),
        ('grants.read = ["srv"]', "absolute"),
        ("grants.pids = 0", "pids"),
        ("grants.cpus = nan", "cpus"),
        ('schema.type = "array"', "of an object"),
        ('schema.properties.x = { type = "text" }', "type is one of"),
        ('schema.properties.x = { type = "string", pattern = "(a+)+" }', "unknown key 'pattern'"),
        ("schema.additionalProperties = true", "refused"),
        ('schema.required = ["x"]', "required"),
        ('schema.properties.x = { type = "integer", minimum = "1" }', "is a number"),
        ('schema.properties.x = { type = "number", maximum = inf }', "is a number"),
        ('schema.properties.x = { type = "string", enum = [1.5] }', "enum"),
    ],
)
def test_what_is_not_understood_refuses_to_load(line: str, says: str) -> None:
    """A tool with a typo is no tool with fewer limits."""
    base = {"name": 'name = "t"', "argv": 'argv = ["/bin/true"]'}
    base.pop(line.partition(" ")[0], None)
    with pytest.raises(PolicyError, match=says):
        parse("version = 1\n[[tool]]\n" + "\n".join([*base.values(), line]))


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ({}, "args.word is missing"),
        ({"word": 1}, "args.word is a string"),
        ({"word": "x" * 11}, "maxLength is 10"),
        ({"word": "x", "extra": 1}, "has no 'extra'"),
        ({"word": "x", "most": 0}, "minimum is 1"),
        ({"word": "x", "most": 10}, "maximum is 9"),
        ({"word": "x", "most": True}, "an integer"),
        ({"word": "x", "most": 1.5}, "an integer"),
        ({"word": "x", "exact": 1}, "a boolean"),
        ({"word": "x", "kinds": ["a", "c"]}, r"args.kinds\[1\] is one of 2"),
        ({"word": "x", "kinds": ["a", "b", "a"]}, "maxItems is 2"),
        ({"word": "x", "of": {"year": "1"}}, "args.of.year is a number"),
        ({"word": "x", "of": {"month": 1}}, "args.of has no 'month'"),
        ({"word": None}, "a string"),
    ],
)
def test_arguments_beyond_the_schema_are_named(args: dict[str, Json], wrong: str) -> None:
    """The refusal says which argument and why."""
    found = problem(search().schema, args)
    assert found is not None
    assert re.search(wrong, found), found


def test_arguments_within_the_schema_become_words() -> None:
    """Whole words in braces are arguments; what was not passed is an empty word; nothing else is replaced."""
    args: dict[str, Json] = {"word": "a b;{most}", "most": 3, "kinds": ["a"], "of": {"year": 2.5}}
    assert problem(search().schema, args) is None
    assert argv_of(search(), args) == ("/bin/echo", "--", "a b;{most}", "3")
    assert argv_of(search(), {"word": "x\0y"}) == ("/bin/echo", "--", "xy", "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["word", "most", "of", "x"]), below),
    max_leaves=12,
)


@given(JSON)
def test_the_check_is_total(value: Json) -> None:
    """Whatever a job passes, the check answers, and what it lets through fits the schema."""
    found = problem(search().schema, value)
    if found is None:
        assert isinstance(value, dict)
        assert isinstance(value["word"], str)
        assert value.keys() <= {"word", "most", "exact", "kinds", "of"}


def test_a_tool_that_the_node_has_not_is_refused_at_admission() -> None:
    """A grant that nobody can give is no grant: the job is refused, not run without."""
    spec, kin = parent(grants=Grants(tools=("search",))), Kin()
    denied = kin.judge(kin.sign(spec), spec)
    assert isinstance(denied, Denial)
    assert (denied.reason, "[[tool]]" in denied.message) == ("unenforceable", True)


def test_tools_of_the_same_list_are_bounded() -> None:
    """A policy file names at most so many tools."""
    with pytest.raises(PolicyError, match="at most 64"):
        parse_tools([{"name": f"t{number}", "argv": ["/bin/true"]} for number in range(65)])


def test_k5_a_job_of_another_grant_sees_and_calls_nothing() -> None:
    """tool.list and tool.call know only what the job was granted, also where nothing runs."""

    async def ask() -> tuple[Json, ErrorCode, ErrorCode]:
        entries = ToolDesk(rig.around()).entries()
        listed = await rig.ask(entries, rig.caller(), "tool.list")
        denied = await rig.refused(entries, rig.caller(), "tool.call", name="search")
        missing = await rig.refused(entries, rig.caller(tools=("search",)), "tool.call", name="search")
        return listed, denied, missing

    assert asyncio.run(ask()) == ({"tools": []}, ErrorCode.DENIED, ErrorCode.NOT_FOUND)
