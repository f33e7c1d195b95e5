"""Writes the store's users as an ACL file, from the table in runner/wire/access.py.

Run by `make acl`, or by hand with the environment's Python. Must never write a password: only its SHA-256, and none
unless one is given. Needs Redis 7.0 or Valkey 7.2: earlier servers know no rights for reading alone.

    python deploy/users.py [--tenant NAME]… [--node NAME]… [--password USER=SHA256]… > users.acl
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence

from runner.wire import access
from runner.wire.errors import WireError

HEAD = """\
# Users of the store, one a role. Written by deploy/users.py; change runner/wire/access.py instead.
# Load with `aclfile PATH` in the server's settings. Nobody can log in until a password is set:
#   ACL SETUSER client >PASSWORD        (then ACL SAVE), or: python deploy/users.py --password client=SHA256
"""
#: As committed, to be read and tested: one tenant and one node.
EXAMPLE = (("acme",), ("node-1",))
_SHA256 = re.compile(r"([a-z0-9-]+)=([0-9a-f]{64})")


def main(arguments: list[str] | None = None) -> int:
    """Print the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the store's users.")
    parser.add_argument("--tenant", action="append", default=[], help="a tenant with a user of its own")
    parser.add_argument("--node", action="append", default=[], help="a node; each has a user of its own")
    parser.add_argument("--password", action="append", default=[], metavar="USER=SHA256")
    given = parser.parse_args(arguments)
    found = [_SHA256.fullmatch(word) for word in given.password]
    if None in found:
        sys.stderr.write("users: --password takes USER=SHA256: printf %s PASSWORD | sha256sum\n")
        return 2
    try:
        text = render(given.tenant, given.node, {match[1]: match[2] for match in found if match})
    except (WireError, ValueError) as error:
        sys.stderr.write(f"users: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def render(tenants: Sequence[str], nodes: Sequence[str], passwords: Mapping[str, str] | None = None) -> str:
    """Return the file. ``passwords``: user → SHA-256. Raises ValueError for a user that is not in it, GrammarError."""
    roles = [access.client(), *map(access.tenant, tenants), *map(access.agent, nodes)]
    roles += [access.controller(), access.viewer()]
    known = passwords or {}
    unknown = sorted(set(known) - {role.user for role in roles})
    if unknown:
        raise ValueError(f"no user {unknown[0]} in this file: name its tenant or node, too")
    lines = [role.line(password_sha256=known.get(role.user)) for role in roles]
    return "\n".join([HEAD, "user default off resetpass resetkeys resetchannels -@all", *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
