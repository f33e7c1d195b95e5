"""The guest's way to a task's module: what it loads, and that it is what Python's own import would load."""

from __future__ import annotations

import asyncio
import importlib
import os
import py_compile
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from runner import context, task
from runner.guest import call, modules
from runner.wire import codec
from tests.containment.rig import PROFILE, Outcome, Rig, in_rig

NAME = "rf_loaded_sample"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "pycache_prefix", None)  # as in a guest
    before = list(sys.path)
    yield
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_a_module_looks_as_if_it_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, file, loader, spec and cached path are those of an import, and it stands in sys.modules."""
    (tmp_path / f"{NAME}.py").write_text("value = __name__, __file__, __package__\n")
    loaded = modules.load(NAME, [str(tmp_path)])
    assert sys.modules.pop(NAME) is loaded
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    imported = importlib.import_module(NAME)
    for name in ("value", "__file__", "__cached__", "__package__", "__doc__"):
        assert getattr(loaded, name) == getattr(imported, name), name
    assert loaded.__spec__ == imported.__spec__
    assert type(loaded.__loader__) is type(imported.__loader__)
    assert set(vars(loaded)) == set(vars(imported))


def test_a_package_finds_its_parts(tmp_path: Path) -> None:
    """A module inside a package is loaded through its package, which comes before a module of the same name."""
    (tmp_path / f"{NAME}.py").write_text("raise AssertionError\n")
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("from . import part\n")
    (tmp_path / NAME / "part.py").write_text("value = 3\n")
    assert modules.load(f"{NAME}.part", [str(tmp_path)]).value == 3
    assert sys.modules[NAME].__path__ == [str(tmp_path / NAME)]


def test_a_stale_pyc_is_not_used(tmp_path: Path) -> None:
    """Compiled code counts only for the source's very time and size, and only under its own path."""
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    cached = Path(str(py_compile.compile(str(source), doraise=True)))
    kept = cached.read_bytes()
    assert modules.load(NAME, [str(tmp_path)]).value == 1
    del sys.modules[NAME]
    source.write_text("value = 2\n")
    os.utime(source, (1, 1))
    assert modules.load(NAME, [str(tmp_path)]).value == 2
    del sys.modules[NAME]
    for broken in (b"", kept[:20], kept[:16] + b"\xff" * 40):
        cached.write_bytes(broken)
        assert modules.load(NAME, [str(tmp_path)]).value == 2
        del sys.modules[NAME]


def test_fresh_compiled_code_is_used(tmp_path: Path) -> None:
    """A pyc that was made from this source spares the compiler: it is what runs."""
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    cached = Path(str(py_compile.compile(str(source), doraise=True)))
    data = cached.read_bytes()
    stat = source.stat()
    source.write_text("value = 5\n")
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached.read_bytes() == data
    assert modules.load(NAME, [str(tmp_path)]).value == 1


def test_what_is_no_plain_module_is_left_to_python(tmp_path: Path) -> None:
    """A compiled extension comes before source, and a name that lies in no task folder is imported as ever."""
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    (tmp_path / f"{NAME}{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    sys.path.append(str(tmp_path))
    with pytest.raises(ImportError):
        modules.load(NAME, [str(tmp_path)])
    assert modules.load("json", [str(tmp_path)]) is sys.modules["json"]
    with pytest.raises(ModuleNotFoundError):
        modules.load("rf_no_such_module", [str(tmp_path)])


def test_a_module_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """An exception in the module is the caller's, and the half-made module is gone."""
    (tmp_path / f"{NAME}.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        modules.load(NAME, [str(tmp_path)])
    assert NAME not in sys.modules


def test_the_rehearsal_goes_the_whole_way() -> None:
    """What the zygote rehearses is a task that works, so that each part of a real one's way has been gone before."""
    folder = str(Path(str(call.__file__)).parent)
    payload: dict[str, codec.Json] = {"job": "main-job", "attempt": 1, "args": [5], "task": call.SAMPLE}
    try:
        assert call._outcome(payload, [folder], 100) == (0, b'{"ok":5}')
    finally:
        sys.modules.pop("sample", None)
        context.leave()
        task.REGISTRY.pop(call.SAMPLE, None)


def test_a_changed_source_counts_at_the_next_attempt(node_name: str, tmp_path: Path) -> None:
    """Nothing of a task's module is kept between two attempts of one mould."""
    tmp_path.chmod(0o755)
    source = tmp_path / f"{NAME}.py"

    async def run(rig: Rig) -> Outcome:
        plan = replace(rig.plan(kind="task"), task_paths=(str(tmp_path),))
        await rig.slot.prepare(PROFILE)
        attempt = await rig.slot.begin(plan, [])
        payload = {
            "env": {},
            "job": "main-job",
            "attempt": 1,
            "tags": {},
            "task": f"{NAME}:answer",
            "args": [],
            "kwargs": {},
        }
        await attempt.release(codec.dump(payload))
        return await rig.finish(attempt)

    async def scenario(rig: Rig) -> None:
        for number in range(3):
            source.write_text(f"from runner import App\napp = App()\n@app.task\ndef answer():\n    return {number}\n")
            source.chmod(0o644)
            assert (await run(rig)).result == {"ok": number}
            await asyncio.sleep(0)

    in_rig(node_name, scenario)
