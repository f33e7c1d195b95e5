"""Who may import whom (docs/design.md, packages). What import-linter cannot say stands here."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter

from tests.architecture import tree

# The only files that may load the queue's libraries: its ports.
QUEUE_LIBRARIES = frozenset({"rq", "redis"})
QUEUE_PORTS = frozenset(
    {
        "runner/hardening.py",
        "runner/client.py",
        "runner/results.py",
        "runner/control.py",
        "node_agent/line.py",
        "node_agent/rq_store.py",
        "node_agent/scheduler_store.py",
        "node_agent/scheduler_daemon.py",
        "node_agent/control.py",
        "node_agent/dependencies.py",
        "node_agent/agent.py",
        "node_agent/mail.py",
        "node_agent/operating.py",
        "node_agent/storecheck.py",
        "node_agent/storelink.py",
        "runner/storelink.py",
        "runner/line.py",
        "runner/clusterlink.py",
        "node_agent/clusterlink.py",
        "node_agent/session.py",
        "node_agent/rqstop.py",
    }
)
QUEUE_PORT_FOLDER = ("runner/web/", "node_agent/kernel/")

# What the node agent may use of the application side; the zygote also loads the guest's code.
SHARED_WITH_NODES = (
    *("runner.wire", "runner.hardening", "runner.scripts", "runner.signing"),
    *(
        "runner.home",
        "runner.keyring",
        "runner.lineage",
        "runner.trust",
        "runner.errors",
    ),  # the node's own home, key and trust.toml; what a stored job is
)
GUEST_LOADERS = ("node_agent.containment.",)

# The applications' side that guests import too: the standard library and the wire vocabulary.
LIGHT = frozenset({"runner.app", "runner.task", "runner.grants", "runner.job"})
STDLIB_ONLY = ("runner.wire", "runner.guest", "runner.scripts")

# Imports inside functions, each with its reason: {(module, imported name): reason}.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    ("runner.app", "runner.client"): "the client loads rq and redis: only at the first enqueue, never in a guest",
    ("runner.task", "runner.client"): "the client loads rq and redis: only at the first enqueue, never in a guest",
    ("runner.job", "runner.client"): "the client loads rq and redis: only at the first enqueue, never in a guest",
    ("runner.job", "runner.lookout"): "loads asyncio and redis: only for the asynchronous twins",
    ("runner.job", "runner.results"): "results load redis: only when one is asked for, never in a guest",
    ("runner.job", "runner.control"): "control loads redis: only for a command, never in a guest",
    ("runner.job", "runner.pausing"): "as runner.control",
    ("runner.job", "runner.signalling"): "as runner.control",
    ("runner.cli.signal", "runner.signalling"): "as runner.control: `--help` loads no redis",
    ("runner.job", "runner.approving"): "as runner.control",
    ("runner.aio", "asyncio"): "costs 20 ms in every guest that imports a task module; only the async twins need it",
    ("runner.wire.values", "uuid"): "brings four libraries into every fork; only values of its class need it",
    ("runner.wire.values", "decimal"): "as uuid",
    ("runner.request", "runner.stencil"): "only who enqueues needs it, and every guest loads runner.request",
    ("runner.task", "runner.canvas"): "only who builds a flow needs it, and every guest loads runner.task",
    ("runner.task", "runner.launching"): "as runner.canvas",
    ("runner.app", "runner.launching"): "as runner.canvas",
    ("runner.launching", "runner.client"): "the client loads rq and redis: only at the first enqueue",
    ("runner.flow", "runner.client"): "as for runner.job",
    ("runner.testing", "runner.client"): "loads redis: a test that only runs tasks in place needs none",
    ("runner.flow", "runner.control"): "as for runner.job",
    ("runner.flow", "runner.orders"): "as for runner.job",
    ("runner.app", "runner.control"): "control loads redis: only for a command, never in a guest",
    ("runner.app", "runner.pausing"): "as runner.control",
    ("runner.app", "runner.operating"): "as runner.control",
    ("runner.app", "runner.signalling"): "as runner.control",
    ("runner.timed", "runner.schedule"): "as runner.control",
    ("runner.app", "runner.repeating"): "as runner.control",
    ("runner.job", "runner.repeating"): "as runner.control",
    ("runner.app", "runner.orders"): "as runner.control",
    ("runner.app", "runner.waiting"): "as runner.control",
    ("runner.job", "runner.waiting"): "as runner.control",
    ("runner.budgets", "runner.waiting"): "as runner.control",
    ("runner.budgets", "runner.client"): "as for runner.job",
    ("runner.app", "runner.listing"): "listings load redis: only when one is asked for, never in a guest",
    ("runner.job", "runner.listing"): "listings load redis: only when one is asked for, never in a guest",
    ("runner.job", "runner.artifacts"): "as runner.listing",
}


def known() -> dict[str, tree.Module]:
    """Return the shipped modules by name."""
    return {module.name: module for module in tree.sources()}


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of the packages or lies inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def at_import(module: tree.Module) -> list[tree.Import]:
    """Return the imports that loading the module carries out."""
    return [line for line in module.imports() if line.at_top and not line.for_types_only]


def loaded_with(roots: list[str], mine: dict[str, tree.Module]) -> set[str]:
    """Return our modules that loading ``roots`` loads, these included."""
    loaded: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in loaded:
            continue
        loaded.add(name)
        targets = (tree.resolve(line.target, mine) for line in at_import(mine[name]))
        waiting += [target for target in targets if target is not None]
    return loaded


def test_the_packages_exist() -> None:
    """The rules below look at real files."""
    assert {module.name for module in tree.sources()} >= set(tree.PACKAGES)


def test_no_module_cycles() -> None:
    """No module imports itself through others, types included; only a lazy __init__ may name its own modules."""
    mine = known()
    graph: dict[str, set[str]] = {
        module.name: {
            target
            for found in module.imports()
            if not (module.is_package and found.for_types_only)
            and (target := tree.resolve(found.target, mine)) is not None
            and target != module.name
        }
        for module in mine.values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' <- '.join(error.args[1])}") from None


def test_cross_package_imports_stand_in_ports() -> None:
    """A file that imports another package than the shared vocabulary says in its docstring that it is a port."""
    mine = known()
    found = [
        f"{module.where}:{line.line} {line.target}"
        for module in mine.values()
        for line in module.imports()
        if (target := tree.resolve(line.target, mine)) is not None
        and target.partition(".")[0] != module.name.partition(".")[0]
        and not is_below(target, ("runner.wire",))
        and "port" not in module.docstring.lower()
    ]
    assert found == []


def test_only_ports_load_the_queue() -> None:
    """rq and redis are imported by the ports of the queue alone, and these say that they are ports."""
    users = [
        module
        for module in tree.sources()
        if any(found.target.partition(".")[0] in QUEUE_LIBRARIES for found in module.imports())
    ]
    strangers = [m.where for m in users if m.where not in QUEUE_PORTS and not m.where.startswith(QUEUE_PORT_FOLDER)]
    assert strangers == []
    assert [module.where for module in users if "port" not in module.docstring.lower()] == []


def test_nodes_use_little_of_the_application_side() -> None:
    """The node agent imports only the vocabulary, the hardening, the scripts and the signatures from runner."""
    mine = known()
    found = [
        f"{module.where}:{line.line} {target}"
        for module in mine.values()
        if is_below(module.name, ("node_agent",))
        for line in module.imports()
        if (target := tree.resolve(line.target, mine)) is not None
        and is_below(target, ("runner",))
        and not is_below(target, SHARED_WITH_NODES)
        and not (target.startswith("runner.guest") and module.name.startswith(GUEST_LOADERS))
    ]
    assert found == []


def test_light_modules_import_the_standard_library_alone() -> None:
    """What guests load at import reaches, through all that it loads itself, nothing but the standard library."""
    mine = known()
    roots = [name for name in mine if is_below(name, STDLIB_ONLY) or name in LIGHT]
    found = {
        f"{mine[name].where}:{line.line} {line.target}"
        for name in loaded_with(roots, mine)
        for line in at_import(mine[name])
        if tree.resolve(line.target, mine) is None and not _is_stdlib(line.target)
    }
    assert sorted(found) == []


def test_guests_load_only_the_vocabulary() -> None:
    """Guest code imports nothing of ours but itself and the vocabulary."""
    mine = known()
    found = [
        f"{module.where}:{line.line} {target}"
        for module in mine.values()
        if is_below(module.name, ("runner.guest", "runner.wire"))
        for line in module.imports()
        if (target := tree.resolve(line.target, mine)) is not None
        and not is_below(target, (".".join(module.name.split(".")[:2]), "runner.wire"))
    ]
    assert found == []


def test_imports_stand_at_the_top() -> None:
    """No function imports, but for the listed cases with their reasons; and no listed case is out of use."""
    mine = known()
    late = {
        (module.name, tree.resolve(line.target, mine) or line.target): f"{module.where}:{line.line} {line.target}"
        for module in mine.values()
        for line in module.imports()
        if not line.at_top and not module.is_package
    }
    assert [place for key, place in late.items() if key not in LATE_IMPORTS] == []
    assert [key for key in LATE_IMPORTS if key[0] in mine and key not in late] == []


def test_the_graph_sees_every_import_form() -> None:
    """The reader of imports understands plain, from, relative, late and type-only imports."""
    text = (
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "if TYPE_CHECKING:\n    import h\ndef late():\n    import i\n"
    )
    module = tree.Module("x.y.z", tree.ROOT / "x/y/z.py", 8, ast.parse(text))
    seen = [(found.target, found.at_top, found.for_types_only) for found in module.imports()]
    assert seen == [
        ("a.b", True, False),
        ("c.d", True, False),
        ("x.y.e", True, False),
        ("x.f.g", True, False),
        ("h", True, True),
        ("i", False, False),
    ]


def _is_stdlib(target: str) -> bool:
    return target.partition(".")[0] in sys.stdlib_module_names
