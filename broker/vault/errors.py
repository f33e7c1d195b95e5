"""What can go wrong in the vault.

Raised by broker.vault, shown by the command line. Must never carry a value of a secret or a line of a private key.

    VaultError
    ├── VaultUsageError    asked for something that can't be: a bad name, a value over the limit, no such version
    ├── UnknownSecretError no secret of this name
    ├── UnsafeVaultError   owner, mode or kind of a file has drifted: nothing is opened
    ├── CorruptError       a file does not hold what its name says
    ├── VaultBusyError     another process holds the vault
    ├── HostKeyError       the host's key can't be had
    ├── RulesError         the vault's policy file is not understood
    └── AuditError         the record can't be written or does not verify: nothing is released
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "CorruptError",
    "HostKeyError",
    "RulesError",
    "UnknownSecretError",
    "UnsafeVaultError",
    "VaultBusyError",
    "VaultError",
    "VaultUsageError",
]


class VaultError(Exception):
    """Root of the package's errors. ``code`` is stable; ``retryable`` says whether the same call may succeed later."""

    code = "unavailable"
    retryable = False


class VaultUsageError(VaultError):
    """The caller asked for something that can't be."""

    code = "usage"


class UnknownSecretError(VaultError):
    """No secret of this name lies in the vault."""

    code = "unknown"


class UnsafeVaultError(VaultError):
    """A file of the vault can be read or changed by somebody else."""

    code = "unsafe"


class CorruptError(VaultError):
    """A file does not decrypt, or holds another name or version than its own."""

    code = "corrupt"


class VaultBusyError(VaultError):
    """Another process holds the vault's lock."""

    code = "busy"
    retryable = True


class HostKeyError(VaultError):
    """The host's identity can't be had, or is none."""

    code = "host_key"


class RulesError(VaultError):
    """The vault's policy is not understood; the policy that was in force stays."""

    code = "rules"


class AuditError(VaultError):
    """The record can't be written, or its chain does not hold."""

    code = "audit"
    retryable = True
