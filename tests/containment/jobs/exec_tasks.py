"""A task that tries to execute its own result file. Served to the containment tests."""

from __future__ import annotations

import errno
import os
import subprocess

from runner import App

app = App()
FD_RESULT = 102


@app.task
def run_result() -> str:
    """Put a program where the result belongs, run it, and take it away again."""
    with open("/bin/true", "rb") as program:
        os.write(FD_RESULT, program.read())
    try:
        subprocess.run([f"/proc/{os.getpid()}/fd/{FD_RESULT}"], check=True)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        os.ftruncate(FD_RESULT, 0)
        os.lseek(FD_RESULT, 0, os.SEEK_SET)
    return "ran"
