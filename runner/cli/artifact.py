"""`artifact`: what jobs gave by name.

Called by commands.py. Must never write where a job's word says, over a file that is there, or through a link.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from runner.cli.options import HomeOption, JobArgument, JsonOption, RedisOption
from runner.cli.output import print_json, print_table, say
from runner.cli.site import site_of
from runner.errors import ArtifactError

__all__ = ["artifact"]

artifact = typer.Typer(name="artifact", help="What jobs gave by name.", no_args_is_help=True, add_completion=False)


@artifact.command("list")
def list_artifacts(
    context: typer.Context,
    job: JobArgument,
    home: HomeOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the artifacts of a job."""
    found = site_of(context, home, redis).app().job(job).artifacts()
    if as_json:
        print_json(list(found))
        return
    rows = [(one.name, str(one.bytes), one.at, str(one.attempt), one.sha256) for one in found]
    print_table(("NAME", "BYTES", "AT", "ATTEMPT", "SHA256"), rows)


@artifact.command("get")
def get(
    context: typer.Context,
    job: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `artifact list` prints it.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Default: ./NAME; - for stdout.")
    ] = None,
    home: HomeOption = None,
    redis: RedisOption = None,
) -> None:
    """Write one artifact to a new file, after checking it against what its node signed."""
    data = site_of(context, home, redis).app().job(job).artifact(name)
    if out == "-":
        sys.stdout.buffer.write(data)
        return
    path = Path(name if out is None else out)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArtifactError(f"{path} can't be made ({error.strerror}): name a new file with --out") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    say(f"{path}: {len(data)} bytes")
