"""`run` and `call`: a job's output and exit code arrive as if it ran here (acceptance 2)."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner import App
from tests.support.fleet import Fleet, processes_with
from tests.support.wait import wait_until

SLEEPER = "import time; time.sleep(60)"


def test_output_and_exit_code_are_the_jobs(fleet: Fleet) -> None:
    """stdout, stderr and the code come through unchanged."""
    done = fleet.run("run", "--", "sh", "-c", "echo hi; echo oops >&2; exit 3")
    assert done.returncode == 3
    assert done.stdout == "hi\n"
    assert "oops\n" in done.stderr


def test_a_job_that_kills_itself_failed_and_was_not_killed(fleet: Fleet) -> None:
    """137 with failed(signal)."""
    done = fleet.run("run", "--json", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137
    view = json.loads(done.stdout)
    assert (view["state"], view["reason"], view["signal"]) == ("failed", "signal", 9)


def test_the_level_that_is_asked_for_is_believed(fleet: Fleet) -> None:
    """A job that asks for the level of this machine ends with a signed outcome that the client accepts."""
    level = json.loads(fleet.run("nodes", "--json").stdout)[0]["level"]
    with App(home=fleet.home) as app:
        assert app.command(["true"], min_level=level).outcome(20).state == "finished"


def test_a_time_limit_is_124(fleet: Fleet) -> None:
    """A job over its limit is ended and says so."""
    mark = secrets.token_hex(8)
    done = fleet.run("run", "--timeout", "0.5", "--", "python3", "-c", SLEEPER, mark)
    assert done.returncode == 124
    assert processes_with(mark) == []


def test_a_call_prints_its_result(fleet: Fleet) -> None:
    """Output first, then the value as JSON."""
    done = fleet.run("call", "e2e_tasks:add", "--arg", "2", "--kw", "right=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "adding\n5\n"


def test_an_exception_is_exit_code_1(fleet: Fleet) -> None:
    """The message arrives, and the code is 1."""
    done = fleet.run("call", "e2e_tasks:explode")
    assert done.returncode == 1
    assert "on purpose" in done.stderr


def test_ctrl_c_kills_the_job(fleet: Fleet) -> None:
    """SIGINT to `run` kills the job's tree, waits for the receipt and exits with 137."""
    mark = secrets.token_hex(8)
    command = fleet.start("run", "--", "python3", "-c", SLEEPER, mark)
    wait_until(lambda: processes_with(mark), "the job to run")
    command.send_signal(signal.SIGINT)
    _, told = command.communicate(timeout=30)
    assert command.returncode == 137, told
    assert "0 survivors" in told
    assert processes_with(mark) == []


def test_a_background_child_that_holds_the_pipe_ends_with_the_command(fleet: Fleet) -> None:
    """Scenario A-K04, command: `done` arrives, the job ends at once, the child is gone."""
    mark = secrets.token_hex(8)
    start = time.monotonic()
    done = fleet.run("run", "--", "sh", "-c", f'python3 -c "{SLEEPER}" {mark} & echo done')
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert time.monotonic() - start < 3
    assert processes_with(mark) == []
    wait_until(lambda: fleet.busy() == 0, "the slot to be free")


def test_a_background_child_that_holds_the_pipe_ends_with_the_task(fleet: Fleet) -> None:
    """Scenario A-K04, Python: the result is 7, the child is gone."""
    mark = secrets.token_hex(8)
    start = time.monotonic()
    done = fleet.run("call", "e2e_tasks:leave_child", "--arg", json.dumps(mark))
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    assert time.monotonic() - start < 3
    assert processes_with(mark) == []


def test_a_granted_folder_can_be_written_and_nothing_else(fleet: Fleet) -> None:
    """The grant's files get the owner's uid on the host."""
    place = fleet.work / "out"
    place.mkdir()
    done = fleet.run("run", "--write", str(place), "--", "sh", "-c", f"echo x > {place}/file; ls {fleet.home}")
    assert done.returncode != 0
    assert (place / "file").read_text() == "x\n"
    assert (place / "file").stat().st_uid == place.stat().st_uid


def test_a_unix_grant_reaches_a_socket_below_a_granted_folder(fleet: Fleet) -> None:
    """A job with a path grant makes no Unix socket, unless that was granted, too: it then talks to what lies there."""
    place = fleet.work / "db.sock"
    code = f"from socket import *; s = socket(AF_UNIX); s.connect({str(place)!r}); print(s.recv(9).decode())"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        place.chmod(0o777)
        server.listen()
        words = ["run", "--write", f"{fleet.work}:all", "--", "/usr/bin/python3", "-c", code]
        refused = fleet.run(*words)
        assert refused.returncode == 1
        assert "Operation not permitted" in refused.stderr
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(fleet.run, "run", "--unix", *words[1:])
            client, _ = server.accept()
            client.sendall(b"hello")
            client.close()
            assert (done.result().returncode, done.result().stdout) == (0, "hello\n")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--read", "/etc"), "policy"),
        (("--secret", "TOKEN:env=TOKEN"), "secret_denied"),
        (("--net", "169.254.169.254:80"), "policy"),
    ],
)
def test_what_can_not_be_granted_is_refused_before_the_start(
    fleet: Fleet, options: tuple[str, str], reason: str
) -> None:
    """Acceptance 6: exit code 125, the reason, and not a byte of the job ran."""
    done = fleet.run("run", "--json", *options, "--", "sh", "-c", "echo ran")
    assert done.returncode == 125
    view = json.loads(done.stdout)
    assert (view["state"], view["reason"]) == ("refused", reason), view
    assert "ran\n" not in done.stderr


def test_a_task_that_no_node_serves_is_refused(fleet: Fleet) -> None:
    """Acceptance 6: tasks outside the list of --import never load."""
    done = fleet.run("call", "--json", "os:system", "--arg", '"true"')
    assert done.returncode == 125
    view = json.loads(done.stdout)
    assert view["state"] == "refused"
    assert view["reason"] in {"policy", "unknown_task"}


def test_logs_and_result_tell_the_same_later(fleet: Fleet) -> None:
    """What `run` streamed can be read again."""
    job = fleet.detach("--", "sh", "-c", "echo one; echo two >&2")
    fleet.wait_state(job, "finished")
    logs = fleet.run("logs", job)
    assert (logs.stdout, logs.stderr) == ("one\n", "two\n")
    assert fleet.run("result", job).returncode == 0
    assert [view["job"] for view in fleet.json("ps", "--all") if view["job"] == job] == [job]
    types = [event["type"] for event in fleet.json_lines("events", "--job", job)]
    assert types.count("job.ended") == 1


def test_programs_lie_where_they_are_granted(fleet: Fleet, programs: Path) -> None:
    """A read grant shows the same files at the same path."""
    done = fleet.run("run", "--read", str(programs), "--", "cat", str(programs / "hostile.py"))
    assert done.stdout == (programs / "hostile.py").read_text()
