"""`ringfence up` runs an egress process of its own, and `doctor` says what it is worth."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.containment import landlock
from node_agent.egress import SOCKET_NAME
from runner import keyring
from runner.home import Home
from tests.net.support import web
from tests.net.test_confined import said
from tests.support import scratch
from tests.support.fleet import CLI, Fleet, running, up
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a web server on loopback."""
    with web() as port:
        yield port


@pytest.fixture(scope="module")
def fleet(port: int) -> Iterator[Fleet]:
    """A fleet whose policy lists that server, and that serves one task."""
    code = "import urllib.request\nfrom runner import App\napp = App()\n\n@app.task()\ndef fetch(url: str) -> str:\n"
    code += "    return urllib.request.urlopen(url).read().decode().splitlines()[0]\n"
    with scratch.folder(mode=0o755) as folder:
        (folder / "net_task.py").write_text(code)
        options = ("--slots", "2", "--allow-net", f"127.0.0.1:{port}", "--import", f"net_task:{folder}")
        yield from _fleet(options)


def _fleet(options: tuple[str, ...]) -> Iterator[Fleet]:
    with running(*options) as fleet:
        fleet.run("ps")
        yield fleet


def egress_of(fleet: Fleet) -> int:
    """Return the egress process of a fleet: the one that answers on its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(5)
        end.connect(str(fleet.home / "s" / SOCKET_NAME))
        end.send(b'{"op":"hello"}')
        return int(json.loads(end.recv(1 << 16))["pid"])


def test_a_listed_destination_is_reached_and_another_port_is_not(fleet: Fleet, port: int) -> None:
    """--allow-net opens one port of this machine; `*` opens none."""
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/x').status)"
    done = fleet.run("run", "--net", f"127.0.0.1:{port}", "--", "python3", "-c", code)
    assert (done.returncode, done.stdout) == (0, "200\n"), done
    done = fleet.run("run", "--net", f"127.0.0.1:{port + 1}", "--", "true")
    assert done.returncode == 125
    assert "policy must name that address and port" in done.stderr
    done = fleet.run("run", "--net", "none", "--", "sh", "-c", "env | grep -ci proxy")
    assert done.stdout == "0\n"


def test_a_python_task_has_its_network_too(fleet: Fleet, port: int) -> None:
    """A task's own client finds the proxy, and another destination's refusal is its exception."""
    grant = ("--net", f"127.0.0.1:{port}")
    done = fleet.run("call", "net_task:fetch", "--arg", f'"http://127.0.0.1:{port}/page"', *grant)
    assert (done.returncode, done.stdout) == (0, '"/page"\n'), done
    done = fleet.run("call", "net_task:fetch", "--arg", '"http://evil.example/"', *grant)
    assert done.returncode == 1
    assert "403" in done.stderr


def test_up_starts_its_egress_process_again(fleet: Fleet, port: int) -> None:
    """SIGKILL to the egress process: a new one serves, and the next job has its network."""
    before = egress_of(fleet)
    os.kill(before, signal.SIGKILL)

    def again() -> bool:
        try:
            return egress_of(fleet) != before
        except OSError:
            return False

    wait_until(again, "a new egress process")
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/x').status)"
    done = fleet.run("run", "--net", f"127.0.0.1:{port}", "--", "python3", "-c", code)
    assert (done.returncode, done.stdout) == (0, "200\n"), done


def test_attack_07_doctor_says_what_the_egress_process_is_worth(fleet: Fleet) -> None:
    """As root with Landlock it has a user of its own; under its agent's user it is weak. `nodes` shows the same."""
    checks = {check["name"]: check for check in json.loads(fleet.run("doctor", "--json").stdout)["checks"]}
    strong = os.geteuid() == 0 and landlock.abi() > 0
    assert checks["egress"]["ok"] is strong, checks["egress"]
    assert ("weak: " in checks["egress"]["detail"]) is not strong

    def shown() -> bool:
        walls = fleet.json("nodes")[0]["enforcement"]
        assert isinstance(walls, dict)
        return str(walls["egress"]) == ("ok" if strong else "weak")

    wait_until(shown, "the node to show its egress process", 15)


def test_nothing_is_left_of_a_killed_up(home: Path) -> None:
    """SIGKILL to `up` ends its egress process, and the next `up` on the same home has one."""
    (home / "work").mkdir()
    with up(home / "h", home / "work", ["--slots", "1"]) as fleet:
        pid = egress_of(fleet)
        fleet.process.kill()
        fleet.process.wait()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the egress process to end")
    with up(home / "h", home / "work", ["--slots", "1"]) as again:
        assert egress_of(again) != pid


def test_the_command_alone_serves_a_home_once(home: Path) -> None:
    """`ringfence egress` for a Procfile: it answers, a second one is turned away, SIGTERM ends it in order."""
    keyring.init(Home(home / "h"))
    words = [*CLI, "--home", str(home / "h"), "egress"]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: "none answers" not in said(Home(home / "h")), "the egress process to answer", 30)
        second = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
        assert second.returncode == 78
        assert "another egress process serves" in second.stderr
        assert "none answers" not in said(Home(home / "h"))
    finally:
        process.terminate()
        assert process.wait(20) == 0
    assert "none answers" in said(Home(home / "h"))


def test_a_bad_destination_is_a_usage_error(tmp_path: Path) -> None:
    """--allow-net takes HOST:PORT."""
    with pytest.raises(AssertionError, match="HOST:PORT"), running("--allow-net", "127.0.0.1"):
        pass
