"""What the toolchain programs take in: a git repository, a wheel, an npm package. Made without a network.

Called by the fixtures and the census. Must never need a tool besides git, and that only for the repository.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

__all__ = ["PROGRAMS", "make"]

PROGRAMS = Path(__file__).parent / "programs"
_WHEEL = {
    "ringed.py": "def main() -> None:\n    print('ringed 1.0')\n",
    "ringed-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: ringed\nVersion: 1.0\n",
    "ringed-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: goods\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "ringed-1.0.dist-info/entry_points.txt": "[console_scripts]\nringed = ringed:main\n",
}
_NPM = {
    "package/package.json": json.dumps({"name": "ringed", "version": "1.0.0", "main": "index.js"}),
    "package/index.js": 'module.exports = () => "ringed 1.0";\n',
}


def make(folder: Path) -> None:
    """Fill ``folder`` with ``wheels/``, ``ringed-1.0.0.tgz`` and, where git is, ``repository/``."""
    (folder / "wheels").mkdir()
    _wheel(folder / "wheels" / "ringed-1.0-py3-none-any.whl")
    with tarfile.open(folder / "ringed-1.0.0.tgz", "w:gz") as archive:
        for name, text in _NPM.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    if shutil.which("git"):
        _repository(folder / "repository")


def _wheel(path: Path) -> None:
    record = ""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in _WHEEL.items():
            wheel.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text)}\n"
        wheel.writestr("ringed-1.0.dist-info/RECORD", f"{record}ringed-1.0.dist-info/RECORD,,\n")


def _repository(path: Path) -> None:
    path.mkdir()
    (path / "README").write_text("one\n")
    me = ["-c", "user.name=maker", "-c", "user.email=maker@example.com"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(path), *words], check=True, capture_output=True)
