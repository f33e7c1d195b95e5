"""The record can't be changed unnoticed, and a line that is not written stops the caller."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.vault.audit import AUDIT_FILE, Audit, Head, Reader, verify
from broker.vault.disk import Folder
from broker.vault.errors import AuditError

SEED = b"s" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A vault's folder, open."""
    tmp_path.chmod(0o700)
    opened = Folder(tmp_path)
    yield opened
    opened.close()


def fill(folder: Folder, lines: int = 5) -> Head:
    """Write some lines; returns the end of the chain."""
    audit = Audit(folder, SEED, clock=lambda: 1.0)
    for number in range(lines):
        audit.write("secret.released", name=f"KEY{number}", job="main-1")
    audit.close()
    return audit.head


def test_the_chain_goes_on(folder: Folder) -> None:
    """A record that was closed is continued, and verifies as one."""
    fill(folder, 2)
    head = fill(folder, 3)
    found, lines = verify((folder.path / AUDIT_FILE).read_bytes(), SEED)
    assert found == head
    assert [line["n"] for line in lines] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("fault", ["edit", "drop", "swap", "insert", "foreign key"])
def test_vault_32_changes_are_found(folder: Folder, fault: str) -> None:
    """An edited, dropped, swapped or inserted line, or one by somebody without the key, is found."""
    fill(folder)
    file = folder.path / AUDIT_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    if fault == "edit":
        lines[2] = lines[2].replace(b"KEY2", b"KEY9")
    elif fault == "drop":
        del lines[2]
    elif fault == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    elif fault == "insert":
        lines.insert(2, lines[1])
    seed = b"t" * 32 if fault == "foreign key" else SEED
    with pytest.raises(AuditError, match="changed"):
        verify(b"".join(lines), seed)
    file.write_bytes(b"".join(lines))
    with pytest.raises(AuditError, match="changed"):
        Audit(folder, seed)


def test_vault_32_a_cut_is_found_by_an_anchor(folder: Folder) -> None:
    """A record cut at a line passes the chain and fails the anchor; a longer one passes both."""
    head = fill(folder, 3)
    whole = (folder.path / AUDIT_FILE).read_bytes()
    cut = b"".join(whole.splitlines(keepends=True)[:2])
    verify(cut, SEED)
    with pytest.raises(AuditError, match="anchored line 3"):
        verify(cut, SEED, head)
    fill(folder, 2)
    assert verify((folder.path / AUDIT_FILE).read_bytes(), SEED, head)[0].count == 5


def test_vault_32_a_torn_tail_goes(folder: Folder) -> None:
    """Half a line at the end, as a power cut leaves it, is dropped at the next start."""
    fill(folder, 2)
    file = folder.path / AUDIT_FILE
    file.write_bytes(file.read_bytes() + b'{"n":3,"at":1.0')
    fill(folder, 1)
    assert verify(file.read_bytes(), SEED)[0].count == 3


def test_vault_33_a_full_disk(folder: Folder) -> None:
    """While the record can't be written the caller is stopped; afterwards it goes on and still verifies."""
    room = [10_000]

    def filling(fd: int, data: bytes | memoryview) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(fd, bytes(data)[: room[0]])
        room[0] -= done
        return done

    audit = Audit(folder, SEED, write=filling)
    audit.write("first")
    for room[0] in (0, 20):  # nothing fits, then half a line does
        with pytest.raises(AuditError):
            audit.write("second")
    room[0] = 10_000
    audit.write("third")
    audit.close()
    assert [line["event"] for line in verify((folder.path / AUDIT_FILE).read_bytes(), SEED)[1]] == ["first", "third"]


def test_a_reader_follows(folder: Folder) -> None:
    """It yields each line once, waits for the end of one that is being written, and ends at the writer's head."""
    fill(folder, 2)
    with contextlib.closing(Reader(folder, SEED)) as reader:
        assert [line["n"] for line in reader.more()] == [1, 2]
        head = fill(folder, 2)
        file = folder.path / AUDIT_FILE
        whole = file.read_bytes()
        file.write_bytes(whole[:-10])
        assert [line["n"] for line in reader.more()] == [3]
        file.write_bytes(whole)
        assert [line["n"] for line in reader.more()] == [4]
        assert list(reader.more()) == []
        assert reader.head == head


@pytest.mark.parametrize("fault", ["edit", "cut"])
def test_vault_32_a_reader_finds_changes(folder: Folder, fault: str) -> None:
    """A new line that does not fit ends it, and so does a record that has become shorter than what was read."""
    fill(folder, 3)
    with contextlib.closing(Reader(folder, SEED)) as reader:
        assert len(list(reader.more())) == 3
        file = folder.path / AUDIT_FILE
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:2] if fault == "cut" else [*lines, lines[2]]))
        with pytest.raises(AuditError, match="line 4 does not fit" if fault == "edit" else "was cut"):
            list(reader.more())


def test_an_endless_line_is_refused(folder: Folder) -> None:
    """A line has a bound, and refusing it leaves the chain as it was."""
    audit = Audit(folder, SEED)
    with pytest.raises(AuditError, match="larger"):
        audit.write("x", note="y" * 5000)
    audit.write("fine")
    audit.close()
    assert verify((folder.path / AUDIT_FILE).read_bytes(), SEED)[0].count == 1
