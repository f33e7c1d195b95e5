"""The keystore keeps what was put, whole, and opens nothing that has drifted. Numbers: the vault's attack list."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest
from pyrage import x25519

from broker.vault.errors import (
    CorruptError,
    HostKeyError,
    UnknownSecretError,
    UnsafeVaultError,
    VaultBusyError,
    VaultError,
    VaultUsageError,
)
from broker.vault.hostkey import CommandKey, CredentialKey
from broker.vault.keystore import KEPT_VERSIONS, MAX_VALUE_BYTES, Keystore, create

WRITER = """
import sys
from pathlib import Path
from broker.vault.keystore import Keystore
with Keystore(Path(sys.argv[1])) as store:
    print("open", flush=True)
    for number in range(100_000):
        store.put("loop", b"v%d" % number)
        store.put(f"other{number % 7}", b"w%d" % number)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A vault whose recovery key is at hand."""
    recovery = x25519.Identity.generate()
    (tmp_path / "offline").write_text(str(recovery))
    create(tmp_path / "vault", [str(recovery.to_public())])
    return tmp_path / "vault"


@pytest.fixture
def store(path: Path) -> Iterator[Keystore]:
    """The same, open."""
    with Keystore(path) as opened:
        yield opened


def file_of(path: Path, name: str, version: int) -> Path:
    """Where a version lies."""
    return path / "secrets" / f"{name}@{version:06}.age"


def test_versions_come_back(store: Keystore) -> None:
    """The newest version is the default, each kept one can be asked for, and a rollback is a new version."""
    assert [store.put("KEY", b"one"), store.put("KEY", b"two", note="second")] == [1, 2]
    assert (store.get("KEY").value, store.get("KEY").note, store.get("KEY", 1).value) == (b"two", "second", b"one")
    assert store.rollback("KEY", 1) == 3
    assert store.get("KEY").value == b"one"


def test_values_are_not_shown(store: Keystore) -> None:
    """A value's repr does not show it."""
    store.put("KEY", b"canary-value")
    assert "canary" not in repr(store.get("KEY"))


def test_old_versions_go(store: Keystore) -> None:
    """A bounded number of versions is kept."""
    for number in range(KEPT_VERSIONS + 3):
        store.put("KEY", b"%d" % number)
    assert len(store.entries()[0].versions) == KEPT_VERSIONS
    with pytest.raises(UnknownSecretError):
        store.get("KEY", 1)


def test_nothing_lies_in_the_clear(path: Path, store: Keystore) -> None:
    """No file of the vault holds a value or a note."""
    store.put("KEY", b"canary-value", note="canary-note")
    texts = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert len(texts) >= 5
    assert not any(b"canary" in text for text in texts)


def test_survives_reopening(path: Path) -> None:
    """What was put is there for the next process, and what was removed is not."""
    with Keystore(path) as store:
        store.put("KEY", b"one")
        store.put("GONE", b"two")
        store.remove("GONE")
    with Keystore(path) as store:
        assert [entry.name for entry in store.entries()] == ["KEY"]
        assert store.get("KEY").value == b"one"


@pytest.mark.parametrize("name", ["", "a/b", "../key", "db\n", "-x", "a" * 65, "@audit", "käse", "a b", ".x"])
def test_vault_34_bad_names(store: Keystore, name: str) -> None:
    """A name that a path, a terminal or a pattern could misread is refused."""
    with pytest.raises(VaultUsageError):
        store.put(name, b"value")


def test_value_sizes(store: Keystore) -> None:
    """An empty value and one over the limit are refused, the limit itself is not."""
    store.put("KEY", bytes(MAX_VALUE_BYTES))
    for value in (b"", bytes(MAX_VALUE_BYTES + 1)):
        with pytest.raises(VaultUsageError):
            store.put("KEY", value)


def test_vault_26_cut_or_changed_files(path: Path, store: Keystore) -> None:
    """Every truncation and a flipped bit at every byte is found."""
    store.put("KEY", b"bee-value")
    file = file_of(path, "KEY", 1)
    whole = file.read_bytes()
    for at in range(len(whole)):
        for bad in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            file.write_bytes(bad)
            with pytest.raises(CorruptError):
                store.get("KEY")
    file.write_bytes(whole)
    assert store.get("KEY").value == b"bee-value"


def test_vault_27_swapped_files(path: Path, store: Keystore) -> None:
    """Another secret's file, an older version and the audit's seed in the place of a version are found out."""
    store.put("KEY", b"first")
    store.put("KEY", b"second")
    store.put("OTHER", b"foreign")
    target = file_of(path, "KEY", 2)
    for source in (file_of(path, "OTHER", 1), file_of(path, "KEY", 1), path / "audit.seed"):
        target.write_bytes(source.read_bytes())
        with pytest.raises(CorruptError):
            store.get("KEY")
    (path / "audit.seed").write_bytes(file_of(path, "OTHER", 1).read_bytes())
    with pytest.raises(CorruptError):
        store.audit_seed()


@pytest.mark.parametrize(
    ("name", "mode"), [("", 0o755), ("secrets", 0o750), ("key", 0o640), ("recipients", 0o660), ("key", 0o604)]
)
def test_vault_28_modes_that_drifted(path: Path, name: str, mode: int) -> None:
    """A vault that others can enter, or a file of it that they can read, is not opened; the error says the fix."""
    (path / name).chmod(mode)
    with pytest.raises(UnsafeVaultError, match="chmod"):
        Keystore(path)


def test_vault_28_a_readable_secret(path: Path, store: Keystore) -> None:
    """A secret's file that others can read is not opened."""
    store.put("KEY", b"value")
    file_of(path, "KEY", 1).chmod(0o644)
    with pytest.raises(UnsafeVaultError):
        store.get("KEY")


def test_vault_28_links_and_strangers(path: Path, store: Keystore) -> None:
    """A link is not followed, and a file that does not belong into a vault stops the start."""
    store.put("KEY", b"value")
    file = file_of(path, "KEY", 1)
    file.rename(path.parent / "moved")
    file.symlink_to(path.parent / "moved")
    with pytest.raises(UnsafeVaultError):
        store.get("KEY")
    store.close()
    file.unlink()
    (path / "secrets" / "notes.txt").write_text("x")
    with pytest.raises(UnsafeVaultError, match="does not belong"):
        Keystore(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["", "secrets", "key"])
def test_vault_28_foreign_owner(path: Path, name: str) -> None:
    """A part of the vault that belongs to another user stops the start."""
    os.chown(path / name, 65533, 65533)
    with pytest.raises(UnsafeVaultError, match="belongs to user 65533"):
        Keystore(path)


def test_vault_29_killed_in_a_write_loop(path: Path) -> None:
    """After a SIGKILL at any moment the vault opens, and each newest version is whole."""
    for round_number in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        while len(list((path / "secrets").iterdir())) < 3 + round_number:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with Keystore(path) as store:
            good, bad = store.verify()
            assert good > 0
            assert bad == ()
            assert not any(name.startswith(".new-") for name in os.listdir(path / "secrets"))


def test_vault_29_trap_1_short_writes_and_a_full_disk(path: Path) -> None:
    """A write that takes bytes one by one stores all of them; one that fails half-way leaves the old version."""
    with Keystore(path, write=lambda fd, data: os.write(fd, bytes(data)[:7])) as store:
        store.put("KEY", b"value-one")
        assert store.get("KEY").value == b"value-one"
    left = [200]

    def filling(fd: int, data: bytes | memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(fd, bytes(data)[: left[0]])
        left[0] -= done
        return done

    with Keystore(path, write=filling) as store:
        with pytest.raises(VaultError, match="No space"):
            store.put("KEY", b"value-two")
        assert store.get("KEY").value == b"value-one"
        assert not any(name.startswith(".new-") for name in os.listdir(path / "secrets"))


class _Stop(BaseException):
    """The end of a process, at a chosen write."""


@pytest.mark.parametrize("fatal", range(1, 8))
def test_vault_30_rotation_stopped_at_each_write(path: Path, fatal: int) -> None:
    """A host-key rotation that ends at any write leaves a vault that opens, and the next one goes through."""
    with Keystore(path) as store:
        for number in range(3):
            store.put(f"KEY{number}", b"value%d" % number)
        seed = store.audit_seed()
    done = [0]

    def counting(fd: int, data: bytes | memoryview) -> int:
        done[0] += 1
        if done[0] == fatal:
            raise _Stop
        return os.write(fd, data)

    with Keystore(path, write=counting) as store, pytest.raises(_Stop):
        store.rotate_host_key()
    with Keystore(path) as store:
        assert store.verify() == (3, ())
        store.rotate_host_key()
        assert store.get("KEY1").value == b"value1"
        assert store.audit_seed() == seed
    assert len((path / "key").read_text().split()) == 1


def test_rotation_forgets_the_old_key(path: Path) -> None:
    """After a rotation the old host key opens nothing, and the recovery key still opens all."""
    old = x25519.Identity.from_str((path / "key").read_text().strip())
    with Keystore(path) as store:
        store.put("KEY", b"value")
        store.rotate_host_key()
    sealed = file_of(path, "KEY", 1).read_bytes()
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [old])
    offline = x25519.Identity.from_str((path.parent / "offline").read_text())
    assert pyrage.decrypt(sealed, [offline]).endswith(b"value")


def test_vault_31_two_brokers(path: Path, store: Keystore) -> None:
    """The second process is told who has the vault open."""
    with pytest.raises(VaultBusyError):
        Keystore(path)
    store.close()
    Keystore(path).close()


def test_vault_38_a_backup_without_the_host_key(path: Path, tmp_path: Path) -> None:
    """The files and the offline recovery key are enough; with any other key there is nothing to be had."""
    with Keystore(path) as store:
        store.put("KEY", b"value")
    (path / "key").unlink()
    with pytest.raises(HostKeyError, match="recovery"):
        Keystore(path)
    offline = tmp_path / "offline"
    with Keystore(path, CommandKey(["/bin/cat", str(offline)])) as store:
        assert store.get("KEY").value == b"value"
        store.rehost()
    assert offline.read_text() not in (path / "key").read_text()
    with Keystore(path) as store:
        assert store.get("KEY").value == b"value"
    (path / "key").unlink()
    other = tmp_path / "other"
    other.write_text(str(x25519.Identity.generate()))
    with pytest.raises(HostKeyError):
        Keystore(path, CommandKey(["/bin/cat", str(other)]))


def test_a_planted_recipient(path: Path) -> None:
    """A recipients file without the host's own key is refused: it would send new secrets elsewhere."""
    (path / "recipients").write_text(f"{x25519.Identity.generate().to_public()}\n")
    with pytest.raises(HostKeyError, match="restore the pair"):
        Keystore(path)


def test_the_key_may_come_from_systemd(path: Path, tmp_path: Path) -> None:
    """A credential opens the vault, and a rotation says that the key lies elsewhere."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    (path / "key").rename(folder / "age-key")
    source = CredentialKey.of({"CREDENTIALS_DIRECTORY": str(folder)})
    assert source is not None
    with Keystore(path, source) as store:
        store.put("KEY", b"value")
        with pytest.raises(VaultUsageError, match="outside"):
            store.rotate_host_key()
    old, new = (folder / "age-key").read_text(), x25519.Identity.generate()
    (folder / "age-key").write_text(f"{new}\n{old}")
    with Keystore(path, source) as store:
        assert store.adopt_host_key() == 1
    (folder / "age-key").write_text(f"{new}\n")
    with Keystore(path, source) as store:
        assert store.get("KEY").value == b"value"
    assert CredentialKey.of({}) is None


@pytest.mark.parametrize("argv", [["/bin/false"], ["/nonexistent/tool"], ["/bin/echo", "hello"]])
def test_a_key_command_that_fails(path: Path, argv: list[str]) -> None:
    """A command that fails, is missing or prints something else opens nothing, and its output is not shown."""
    with pytest.raises(HostKeyError) as caught:
        Keystore(path, CommandKey(argv))
    assert "hello" not in str(caught.value)


def test_create_shows_the_recovery_key_once(tmp_path: Path) -> None:
    """Without a recovery key of one's own, one is made and shown, opens the vault, and lies nowhere on disk."""
    shown = create(tmp_path / "vault")
    assert shown is not None
    texts = b"".join(file.read_bytes() for file in (tmp_path / "vault").rglob("*") if file.is_file())
    assert shown.encode() not in texts
    with pytest.raises(VaultUsageError, match="exists already"):
        create(tmp_path / "vault")
    with pytest.raises(VaultUsageError, match="age1"):
        create(tmp_path / "other", ["age1nonsense"])


def test_recovery_keys_can_change(path: Path) -> None:
    """After a change of the recovery key the old one opens nothing new and the new one opens all."""
    new = x25519.Identity.generate()
    offline = x25519.Identity.from_str((path.parent / "offline").read_text())
    with Keystore(path) as store:
        store.put("KEY", b"value")
        assert store.set_recovery([str(new.to_public())]) == 1
    sealed = file_of(path, "KEY", 1).read_bytes()
    assert pyrage.decrypt(sealed, [new]).endswith(b"value")
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [offline])
