"""What becomes of jobs with net grants when the egress process or the agent dies, or was never there."""

from __future__ import annotations

import signal

from tests.net.fleet import netted, python
from tests.net.support import served
from tests.support.wait import wait_until


def test_a_crash_of_the_egress_process_is_survived(node_tag: str) -> None:
    """While it is away jobs with net grants are refused, others run; then a running job's door serves again."""
    with served() as echo, netted([f"127.0.0.1:{echo.port}"], tag=node_tag) as net:
        code = f"""
import socket, sys, time
def talk():
    with socket.create_connection(("127.0.0.1", 3128), 20) as end:
        end.sendall(b"CONNECT 127.0.0.1:{echo.port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        return end.recv(100)[9:12].decode()
print("first", talk(), flush=True)
print("again", talk() if input() else "", flush=True)
"""
        code = code.replace("input()", "__import__('pathlib').Path('/work').exists() and wait()")
        code = code.replace("def talk", "def wait():\n    time.sleep(3); return True\ndef talk")
        job = net.start(python(code), [f"127.0.0.1:{echo.port}"])
        net.rig.wait_output(job, "first 200")
        net.egress.stop(signal.SIGKILL)
        seen = net.run(["true"], [f"127.0.0.1:{echo.port}"])
        view = seen.job.status()
        assert (seen.state, view.reason) == ("refused", "broker_unavailable"), view
        assert "ringfence egress" in (view.detail or "")
        assert net.run(["true"], []).state == "finished"
        net.egress.start()
        net.rig.wait_output(job, "again 200", timeout_s=30)
        net.rig.wait_state(job, "finished")


def test_an_agent_s_death_ends_the_connections(node_tag: str) -> None:
    """SIGKILL to the agent: its jobs' tunnels are gone, and the next start serves jobs with net grants again."""
    with served() as echo, netted([f"127.0.0.1:{echo.port}"], tag=node_tag) as net:
        before = len(echo.seen)
        code = f"""
import socket, time
end = socket.create_connection(("127.0.0.1", 3128))
end.sendall(b"CONNECT 127.0.0.1:{echo.port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
end.recv(100); print("up", flush=True); time.sleep(60)
"""
        job = net.start(python(code), [f"127.0.0.1:{echo.port}"])
        net.rig.wait_output(job, "up")
        assert len(echo.seen) == before + 1
        net.node.crash()
        end = echo.ends[-1]
        wait_until(lambda: end.fileno() == -1, "the tunnel's far end to be closed")
        net.rig.restart(net.node)
        assert net.run(["true"], [f"127.0.0.1:{echo.port}"]).state == "finished"


def test_without_an_egress_process_net_jobs_are_refused(node_tag: str) -> None:
    """A node whose home has no egress process refuses with the next step; jobs without net grants run."""
    with netted(["*"], tag=f"{node_tag}-x") as net:
        net.egress.stop()
        net.egress.path.unlink()
        seen = net.run(["true"], ["example.com:443"])
        view = seen.job.status()
        assert (seen.state, view.reason) == ("refused", "unenforceable"), view
        assert "`ringfence egress`" in (view.detail or "")
        assert net.run(["true"], []).state == "finished"
