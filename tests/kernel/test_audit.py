"""`ringfence audit` and `ringfence metrics` against a live agent: what they say is what happened (F1 to F3, K7, K8)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import Grants
from runner.cli import commands
from runner.job import Job
from runner.wire.receipt import Receipt
from tests.support import shell as shells
from tests.support.fleet import CLI
from tests.support.rig import Node, Rig, rigged
from tests.support.shell import Shell
from tests.support.wait import wait_until

#: A job's side of the channel in a few lines: one session, some calls, and the answers printed.
CALLS = """
import json, os, socket, sys
way = socket.socket(fileno=100)
way.send(bytes([20]))
_, fds, _, _ = socket.recv_fds(way, 64, 1)
session = socket.socket(fileno=fds[0])
for number, call in enumerate(json.loads(sys.argv[1])):
    session.send(json.dumps({"n": number, **call}).encode())
    answer = json.loads(session.recv(65536))
    print(number, answer.get("err", "ok"), flush=True)
sys.exit(int(sys.argv[2]))
"""
GOOD = {"op": "progress.set", "value": 0.5, "note": "half"}
BAD = {"op": "progress.set", "value": 7}
DENIED = {"op": "file.put", "path": "/state/x", "data": "eA=="}


class Live:
    """One agent and the command line on its home."""

    def __init__(self, rig: Rig, node: Node, shell: Shell) -> None:
        self.rig, self.node, self.shell = rig, node, shell

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command."""
        return self.shell.run(["--home", str(self.rig.home), *words], 30)

    def here(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command in this process, which takes a tenth of the time."""
        raw = io.BytesIO()
        out, err = io.TextIOWrapper(raw, write_through=True), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = commands.run_words(["--home", str(self.rig.home), *words])
        return subprocess.CompletedProcess(words, code, raw.getvalue().decode(), err.getvalue())

    def lines(self, *words: str) -> list[dict[str, object]]:
        """Return what `audit query` prints."""
        done = self.here("audit", "query", "--json", *words)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def kinds(self, *words: str) -> list[str]:
        """Return the kinds of the lines that `audit query` prints."""
        return [str(line["kind"]) for line in self.lines(*words)]

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the node's metrics: name → labels → value."""
        found = json.loads(self.here("metrics", "--json").stdout)[self.node.name]
        return {
            name: {"/".join(sorted(one["labels"].values())): one["value"] for one in values}
            if isinstance(values, list)
            else {"count": values["count"]}
            for name, values in found.items()
        }

    def verify(self, *words: str) -> tuple[int, dict[str, object]]:
        """Return the exit code of `audit verify` and what it found."""
        run = self.here if "--offline" in words else self.run
        done = run("audit", "verify", "--json", *words)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)[0]

    @property
    def folder(self) -> Path:
        return self.rig.home / "nodes" / self.node.name / "flight"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """An agent with two slots."""
    with rigged(slots=2) as rig:
        found = Live(rig, rig.start("a"), shells.shared())
        # What opens connections does so before the first test looks at what it leaves.
        job, _ = rig.pulse("warm")
        rig.wait_state(job, "running")
        job.kill()
        found.numbers()
        list(rig.app.events())
        yield found


def finished(job: Job[None]) -> Job[None]:
    """Wait until a job has ended well."""
    job.result(timeout=20)
    return job


def test_k8_the_numbers_are_what_the_test_did(live: Live) -> None:
    """Every counter moves by exactly what was done: two good jobs, a failed one, a killed one, a refused one."""
    rig, before = live.rig, live.numbers()
    for _ in range(2):
        finished(rig.command("true"))
    failed = rig.command("sh", "-c", "exit 3")
    rig.wait_state(failed, "failed")
    refused = rig.command("true", grants=Grants(read=("/root",)))
    rig.wait_state(refused, "refused")
    running, _ = rig.pulse("k8")
    rig.wait_state(running, "running")
    running.kill(reason="enough")
    rig.wait_state(running, "killed")
    rig.wait_idle()
    after = live.numbers()

    def moved(name: str, labels: str = "") -> float:
        return after[name].get(labels, 0) - before[name].get(labels, 0)

    assert moved("ringfence_jobs_admitted_total") == 4
    assert moved("ringfence_jobs_started_total") == 4
    assert moved("ringfence_jobs_ended_total", "/finished") == 2
    assert moved("ringfence_jobs_ended_total", "exit/failed") == 1
    assert moved("ringfence_jobs_ended_total", "kill/killed") == 1
    assert moved("ringfence_kills_total", "killed") == 1
    assert moved("ringfence_queue_wait_seconds", "count") == 4
    assert moved("ringfence_jobs_ended_total", "policy/refused") == 1
    assert moved("ringfence_denials_total", "admission") == 1
    assert moved("ringfence_events_total", "job.ended") == 5
    assert after["ringfence_slots"][""] == 2
    assert after["ringfence_slots_busy"][""] == 0
    assert after["ringfence_node_state"] == {"ready": 1}
    assert after["ringfence_record_lines_total"][""] - before["ringfence_record_lines_total"][""] == (
        after["ringfence_record_head"][""] - before["ringfence_record_head"][""]
    )
    assert live.kinds("--job", refused.id, "--verdict", "deny") == ["job.refused"]
    text = live.here("metrics").stdout
    assert f'ringfence_jobs_ended_total{{node="{live.node.name}",reason="exit",state="failed"}}' in text
    assert all(line.startswith("#") or line.rpartition(" ")[2].replace(".", "").isdigit() for line in text.splitlines())


def test_f3_queries_find_each_line_at_once(live: Live) -> None:
    """By job, kind, time and verdict; what happened a moment ago is there without a flush."""
    job = finished(live.rig.command("true"))
    assert live.kinds("--job", job.id) == ["job.admitted", "job.ended"]
    assert live.kinds("--job", job.id, "--verdict", "allow") == ["job.admitted"]
    assert live.kinds("--job", job.id, "--kind", "job.") == ["job.admitted", "job.ended"]
    assert live.kinds("--job", job.id, "--kind", "job.ended") == ["job.ended"]
    assert live.kinds("--job", job.id, "--since", "1h") == ["job.admitted", "job.ended"]
    assert live.kinds("--job", job.id, "--since", "2099-01-01T00:00:00Z") == []
    assert live.kinds("--limit", "1", "--job", job.id) == ["job.ended"]
    assert live.kinds("--job", f"{job.id}.1") == ["job.admitted", "job.ended"]
    assert live.here("audit", "query", "--verdict", "perhaps").returncode == 2
    assert live.here("audit", "query", "--node", "nobody").returncode == 78


def test_f1_a_kill_is_ordered_ended_and_receipted_in_this_order(live: Live) -> None:
    """The order is written before it acts, and the receipt's head holds all three."""
    job, _ = live.rig.pulse("f1")
    live.rig.wait_state(job, "running")
    receipt = job.kill(reason="looping")
    assert live.kinds("--job", job.id) == ["job.admitted", "kill.ordered", "job.ended", "kill.receipt"]
    ordered = live.lines("--job", job.id, "--kind", "kill.ordered")[0]
    assert (ordered["why"], ordered["command"]) == ("looping", receipt.command)
    last = live.lines("--job", job.id)[-1]
    assert receipt.flight.partition(":")[0] == str(last["n"])
    assert last["survivors"] == 0


def test_f1_a_pause_and_a_resume_are_recorded_before_they_act(live: Live) -> None:
    """Both orders stand before the events that tell that they were carried out."""
    job, _ = live.rig.pulse("hold")
    live.rig.wait_state(job, "running")
    job.pause(reason="look")
    job.resume(reason="seen")
    kinds = ["job.admitted", "pause.ordered", "job.paused", "resume.ordered", "job.resumed"]
    wait_until(lambda: live.kinds("--job", job.id) == kinds, "pause and resume to be in the record", 10)
    assert [line["why"] for line in live.lines("--job", job.id) if "ordered" in str(line["kind"])] == ["look", "seen"]
    job.kill()


def test_k3_calls_are_counted_by_op_and_error_and_told_with_a_failure(live: Live) -> None:
    """Each answered call counts once; a failure takes the last ones along, `show` prints them, the record has all."""
    before = live.numbers()["ringfence_calls_total"]
    words = json.dumps([GOOD] * 30 + [BAD, DENIED])
    job = live.rig.command(sys.executable, "-I", "-c", CALLS, words, "9")
    live.rig.wait_state(job, "failed")
    after = live.numbers()["ringfence_calls_total"]
    assert after["ok/progress.set"] - before.get("ok/progress.set", 0) == 30
    assert after["bad_request/progress.set"] - before.get("bad_request/progress.set", 0) == 1
    assert sum(after.values()) - sum(before.values()) == 32
    view = job.status()
    assert len(view.calls) == 20
    assert [line.split()[1:4:2] for line in view.calls[-3:-1]] == [
        ["progress.set", "ok"],
        ["progress.set", "bad_request"],
    ]
    assert "file.put" in view.calls[-1]
    shown = live.run("show", job.id).stdout
    assert shown.count("progress.set") == 19
    kept = [line for line in live.lines("--job", job.id) if line["kind"] == "job.calls"]
    assert sum(1 for line in kept for name in line if name.isdigit()) == 32
    assert finished(live.rig.command("true")).status().calls == ()


def test_f2_a_live_record_is_held_against_ends_and_receipts(live: Live, tmp_path: Path) -> None:
    """verify is sound on the live record; an export is the same record; a receipt on file is one more head."""
    job, _ = live.rig.pulse("f2")
    live.rig.wait_state(job, "running")
    receipt = job.kill()
    code, found = live.verify()
    assert (code, found["faults"], found["unchecked"]) == (0, [], [])
    held = int(str(found["anchors"]))
    assert held >= 1, "the ends in the tenant's events are heads"
    note = tmp_path / "receipt.json"
    note.write_text(json.dumps([{name: getattr(receipt, name) for name in Receipt.__slots__}]))
    code, found = live.verify("--receipt", str(note))
    assert (code, found["anchors"]) == (0, held + 1)
    export = live.here("audit", "export", "--node", live.node.name)
    copy = tmp_path / "record"
    copy.write_text(export.stdout)
    assert live.verify("--file", str(copy), "--node", live.node.name, "--offline")[0] == 0
    cut = export.stdout.splitlines(keepends=True)
    copy.write_text("".join(cut[:-2]))
    code, found = live.verify("--file", str(copy), "--node", live.node.name, "--receipt", str(note), "--offline")
    assert (code, "cut back" in str(found["faults"])) == (1, True)
    assert "not checked" not in live.run("audit", "verify").stdout
    assert "the anchors in the store" in live.here("audit", "verify", "--offline").stdout
    file = max(live.folder.glob("*.rec"))
    data = file.read_bytes()
    at = data.index(b'"kill.ordered"')
    with file.open("r+b") as edited:
        os.pwrite(edited.fileno(), b"K", at + 1)
        code, found = live.verify("--offline")
        os.pwrite(edited.fileno(), data[at + 1 : at + 2], at + 1)
    assert (code, "was not written by the node" in str(found["faults"])) == (1, True)
    forged = receipt.__class__(**{name: getattr(receipt, name) for name in Receipt.__slots__} | {"survivors": 7})
    note.write_text(json.dumps({name: getattr(forged, name) for name in Receipt.__slots__}))
    assert live.here("audit", "verify", "--receipt", str(note)).returncode == 2


def test_attack_31_anchors_that_are_no_stream_are_a_fault_and_the_rest_is_checked(live: Live) -> None:
    """Whoever puts another type under the key of the anchors has `verify` say so, next to all that it can check."""
    redis, key = live.rig.redis, live.rig.app.client().keys.anchor(live.node.name)
    aside = redis.exists(key) and redis.rename(key, f"{key}.aside")
    redis.set(key, "none", ex=60)
    try:
        code, found = live.verify()
    finally:
        redis.delete(key)
        if aside:
            redis.rename(f"{key}.aside", key)
    assert code == 1
    assert isinstance(faults := found["faults"], list)
    assert any("is no stream" in fault for fault in faults)
    assert found["anchors"] or not aside


def test_f3_follow_prints_what_comes(live: Live) -> None:
    """A follower prints the lines of a job that runs while it follows."""
    words = ["--home", str(live.rig.home), "audit", "follow", "--json"]
    with subprocess.Popen([*CLI, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            jobs = []
            for _ in range(60):
                # The first ones may end before it has begun to follow.
                jobs.append(finished(live.rig.command("true")).id)
                if select.select([process.stdout], [], [], 0.2)[0]:
                    break
            line = json.loads(process.stdout.readline())
            assert line["attempt"].rpartition(".")[0] in jobs
        finally:
            process.terminate()


def test_e3_what_a_command_can_break_is_decided_by_its_sandbox_not_by_its_words(live: Live) -> None:
    """However a deletion is spelled, it fails on what was not granted; however harmful a text looks, it may be said."""
    kept = live.rig.work / "kept"
    kept.mkdir()
    (kept / "file").write_text("still here")
    spelled = ("rm -rf {0}", "rm -fr {0}", "rm -r -f {0}", "find {0} -delete", "r=rm; $r -fr {0}/*", ": > {0}/file")
    script = "; ".join(word.format(kept) for word in spelled)
    code = f"import os, shutil; shutil.rmtree({str(kept)!r}, ignore_errors=True); os.unlink({str(kept / 'file')!r})"
    for argv in (("sh", "-c", script), (sys.executable, "-I", "-c", code)):
        job = live.rig.command(*argv, grants=Grants(read=(str(kept),)))
        live.rig.wait_state(job, "finished", "failed")
        assert (kept / "file").read_text() == "still here"
    said = "git log --format %H; rm -rf /; DROP TABLE users; http://internal/ ../../etc/passwd"
    job = live.rig.command("printf", "%s", said)
    finished(job)
    assert live.rig.logs(job) == said


def test_k7_without_a_record_nothing_starts_and_nothing_is_lost(live: Live) -> None:
    """A node that can't write its record is degraded(recorder), claims nothing, kills all the same, and heals."""
    rig, pid = live.rig, live.node.pid
    running, _ = rig.pulse("k7")
    rig.wait_state(running, "running")
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
    try:
        waiting = rig.command("true")
        wait_until(lambda: rig.record(live.node).get("state") == "degraded(recorder)", "the node to say so", 10)
        assert rig.state(waiting) == "queued"
        receipt = running.kill()
        assert (receipt.outcome, receipt.survivors) == ("killed", 0)
        assert rig.state(waiting) == "queued"
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    finished(waiting)
    wait_until(lambda: rig.record(live.node).get("state") == "ready", "the node to be ready again", 10)
    assert "record.healed" in live.kinds("--all")
    assert live.verify()[0] == 0
    told = [str(event.detail.get("what")) for event in rig.app.events() if event.type == "node.degraded"]
    assert any("flight record" in what for what in told)


def test_f1_a_crash_of_the_agent_leaves_a_record_that_goes_on(live: Live) -> None:
    """After SIGKILL every line is there; the next start goes on in a file of its own, and the whole is sound."""
    rig = live.rig
    job, _ = rig.pulse("crash")
    rig.wait_state(job, "running")
    files = len(list(live.folder.glob("*.rec")))
    live.node.crash()
    assert live.kinds("--job", job.id) == ["job.admitted"]
    rig.restart(live.node)
    wait_until(lambda: "job.ended" in live.kinds("--job", job.id), "the next start to end the job", 20)
    assert len(list(live.folder.glob("*.rec"))) == files + 1
    code, found = live.verify()
    assert (code, found["faults"], found["unchecked"]) == (0, [], [])
    # The last test of this file: what it has started anew ends with it.
    live.node.stop()
