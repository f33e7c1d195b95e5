"""The module of a task, loaded straight from the folder that it lies in.

Called by call.py in the worker, after every restriction. Must never load what Python's own import would read otherwise:
same code, same attributes, a changed source counts at once; whatever is not a plain module or package of a task folder
is left to importlib. It exists because importlib's search costs more than all of the isolation.

Source: Python's reference, "The import system" and the header of pyc files (PEP 552).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from marshal import loads as unmarshal
from os import F_OK, access, close, fstat, read
from os import open as open_file
from os import stat as stat_file
from types import CodeType, ModuleType
from typing import Final

__all__ = ["load"]

_MAGIC: Final = importlib.util.MAGIC_NUMBER + bytes(4)
_HEADER_BYTES: Final = 16
_CACHED: Final = f".{sys.implementation.cache_tag}.pyc"
_READ: Final = os.O_RDONLY | os.O_CLOEXEC
_MASK: Final = 0xFFFF_FFFF


def load(name: str, folders: Sequence[str]) -> ModuleType:
    """Return the module ``name``, which is looked for in ``folders`` first and then wherever Python looks.

    Raises whatever the module raises, and ImportError.
    """
    top = name.partition(".")[0]
    if top not in sys.modules:
        for folder in folders:
            if _load_from(folder, top):
                break
    return sys.modules.get(name) or importlib.import_module(name)


def _load_from(folder: str, name: str) -> bool:
    """Import ``name`` from ``folder`` if it lies there as source. Python prefers a package, then a compiled module."""
    base, search = f"{folder}/{name}", None
    if access(base, F_OK):
        path, search = f"{base}/__init__.py", [base]
    else:
        path = f"{base}.py"
    for suffix in EXTENSION_SUFFIXES:
        if access(base + suffix, F_OK):
            return False
    try:
        stat = stat_file(path)
    except OSError:
        return False
    head, _, last = path.rpartition("/")
    cached = f"{head}/__pycache__/{last[:-3]}{_CACHED}"
    loader = SourceFileLoader(name, path)
    code = _compiled(cached, path, stat) or loader.get_code(name)
    spec = ModuleSpec(name, loader, origin=path, is_package=search is not None)
    spec.has_location = True
    spec.cached = cached
    module = ModuleType(name)
    if search is not None:
        spec.submodule_search_locations = search
        module.__path__ = search
    names = {"__spec__": spec, "__loader__": loader, "__file__": path, "__cached__": cached}
    module.__dict__.update(names, __package__=name if search is not None else "")
    _execute(name, module, code)
    return True


def _execute(name: str, module: ModuleType, code: CodeType | None) -> None:
    if code is None:
        raise ImportError(f"{name} has no code", name=name)
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)  # noqa: S102 - this is what importing is
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _compiled(cached: str, path: str, stat: os.stat_result) -> CodeType | None:
    """Return the code of a pyc file that was made from exactly this source; None: let Python find out."""
    try:
        fd = open_file(cached, _READ)
    except OSError:
        return None
    try:
        size = fstat(fd).st_size
        data = read(fd, size)
    finally:
        close(fd)
    stamp = _MAGIC + (int(stat.st_mtime) & _MASK).to_bytes(4, "little") + (stat.st_size & _MASK).to_bytes(4, "little")
    if len(data) != size or data[:_HEADER_BYTES] != stamp:
        return None
    try:
        code = unmarshal(memoryview(data)[_HEADER_BYTES:])  # noqa: S302 - as trusted as the source next to it
    except (EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) and code.co_filename == path else None
