"""Plans that come again: taught at the second sight, never with anything of a job's in them, and the same sandbox."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node_agent.containment import machine, outfit, script
from node_agent.containment.known import MOST, Taught
from node_agent.containment.orders import BEGIN, END_MARK, TERM, End, end_of, end_record, order_of, order_record
from node_agent.containment.plan import Mount, Plan, dumps
from node_agent.containment.reaper import Reaper
from node_agent.containment.script import Memory, StepError, Table, row
from tests.containment.rig import LEVEL, PROFILE, Rig, in_rig, marked
from tests.support.wait import await_until

PLAN = Plan("main-1.1", "task", "A", 1000, 1000)
#: What differs between any two attempts.
OWN = re.compile(r"(main-job\.\d+|/proc/\d+|\w+:\[\d+\]|\b0:\d+\b|^\d+ \d+|(master|propagate_from):\d+)", re.MULTILINE)
LOOK = """
cat /proc/self/mountinfo; id; ulimit -a; ls -l --time-style=+- /proc/self/fd /work /tmp /dev/shm /run; cat /etc/passwd
grep -E '^(Cap|NoNew|Seccomp|Sig|Umask|Groups|Uid|Gid)' /proc/self/status; env | sort; pwd; cat /proc/self/oom_score_adj
"""


def test_a_plan_is_taught_when_it_comes_again() -> None:
    """Once, whatever the attempt is called; the oldest is forgotten first."""
    taught = Taught()
    record = dumps(PLAN)
    assert record == dumps(replace(PLAN, attempt="main-2.7"))
    taught.sent(PLAN, record)
    assert taught.lesson() == b""
    taught.sent(PLAN, record)
    assert (taught.lesson(), taught.lesson()) == (record, b"")
    taught.sent(PLAN, record)
    assert taught.lesson() == b""
    for uid in range(2000, 2000 + MOST):
        other = replace(PLAN, uid=uid)
        taught.sent(other, dumps(other))
    taught.sent(PLAN, record)
    assert taught.lesson() == b""


@pytest.mark.parametrize(
    "changes",
    [{"mounts": (Mount("/srv", "read", "dir"),)}, {"cwd": "/tmp/own"}, {"broker": True}, {"allow_exec": False}],
)
def test_nothing_of_a_job_is_taught(changes: dict[str, object]) -> None:
    """Grants, a folder to start in and a channel to the broker stay between agent and worker."""
    plan = replace(PLAN, **changes)  # type: ignore[arg-type] # real fields
    taught = Taught()
    for _ in range(3):
        taught.sent(plan, dumps(plan))
        assert taught.lesson() == b""


def test_orders_and_ends_are_read_as_they_were_written() -> None:
    """And nothing else is taken for one."""
    begin = order_record(BEGIN, "main-1.1", ("net", "service"), b"a\0b")
    assert order_of(begin) == (b"b", "main-1.1", ["net", "service"], b"a\0b")
    assert order_of(order_record(TERM, "main-1.1")) == (b"t", "main-1.1", [], b"")
    end = end_record("main-1.1", 9, 1_500_000, 4096, 3, 1)
    assert end_of(end) == End("main-1.1", 9, 1.5, 4096, 3, 1)
    for wrong in (b"", b"b", b"bmain-1.1", b"bmain-1.1\0net", b"b\xff\0\0"):
        with pytest.raises(ValueError, match=r"no order|ascii"):
            order_of(wrong)
    for wrong in (b"", END_MARK, end[:20], b"e" + end[1:], end_record("main-1.1", 0, -1, 0, 0, 0), end + b"\xff"):
        with pytest.raises(ValueError, match=r"no end|ascii"):
            end_of(wrong)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the loop is known for x86_64 alone")
def test_this_machine_has_a_loop_of_its_own() -> None:
    """The code is mapped to be read and run, never to be written."""
    assert machine.loop() is not None
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:loop" in line]
    assert [line.split()[1] for line in lines] == ["r-xp"]


@pytest.mark.parametrize("own", [True, False], ids=["machine", "rows"])
def test_a_table_does_what_its_rows_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, own: bool) -> None:
    """All calls in order, the last result, and none after the first that fails: in both loops, and again."""
    if not own:
        monkeypatch.setattr(machine, "loop", lambda: None)
    elif machine.loop() is None:
        pytest.skip("no loop of its own for this machine")
    space = ctypes.create_string_buffer(4096)
    first = os.fsencode(tmp_path / "first")
    good = Table(
        [
            row("make", "mkdirat", script.AT_FDCWD, first, 0o700),
            row("none", "chdir", b"/"),
            row("look", "getcwd", ctypes.addressof(space), 4096, expect=script.ANY),
        ]
    )
    assert (good.run(), space.value, os.path.isdir(first)) == (2, b"/", True)
    assert Table([]).run() == 0
    after = row("after", "mkdirat", script.AT_FDCWD, os.fsencode(tmp_path / "after"), 0o700)
    for step, expected in (("exact", 0), ("any", script.ANY)):
        bad = Table([row(step, "chdir", os.fsencode(tmp_path / "none"), expect=expected), after])
        for _ in range(2):
            with pytest.raises(StepError, match=r"chdir: No such file") as caught:
                bad.run()
            assert (caught.value.step, caught.value.errno) == (step, 2)
    with pytest.raises(StepError, match=f"getppid returned {os.getppid()}"):
        Table([row("other", "getppid", expect=1 << 40), after]).run()
    assert not (tmp_path / "after").exists()


def test_a_message_is_one_form() -> None:
    """Every byte of the record and each descriptor's number count."""
    form = Memory.expected(b"record", (3, 4, 5))
    assert form == Memory.expected(b"record", (3, 4, 5))
    others = [
        Memory.expected(b"recorD", (3, 4, 5)),
        Memory.expected(b"record", (3, 4)),
        Memory.expected(b"record", (3, 4, 6)),
    ]
    assert form not in others


def test_children_are_told_without_waiting() -> None:
    """Their status and what they used; 0 while all live, and -1 when there is none."""
    # In a process that has no other children; those of this one are not its to reap.
    tested = multiprocessing.get_context("fork").Process(target=_reap_one)
    tested.start()
    tested.join()
    assert tested.exitcode == 0
    tested.close()


def _reap_one() -> None:
    reaper, child = Reaper(), os.fork()
    if not child:
        signal.pause()
    assert reaper.reap() == 0
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert reaper.reap() == child
    status, cpu_us, size = reaper.told()
    assert (os.WTERMSIG(status), cpu_us >= 0, size > 1 << 20) == (9, True, True)
    assert reaper.reap() == -1


def test_the_sandbox_is_the_same_when_the_mould_knows_the_plan(node_name: str) -> None:
    """What a job finds of its view, rights, limits and environment does not tell whether its mould knew the plan."""

    async def scenario(rig: Rig) -> None:
        same = rig.plan()
        ids: dict[str, Any] = {"uid": same.uid, "gid": same.gid}
        await rig.run(["true"], **ids)
        mould = rig.slot.mould_pid
        seen = [(await rig.run(["sh", "-c", LOOK], **ids)).out.decode() for _ in range(4)]
        found = [OWN.sub("-", text) for text in seen]
        assert "NoNewPrivs" in found[0]
        for later in found[1:]:
            assert later.splitlines() == found[0].splitlines()
        results: list[Any] = [(await rig.run(task="guest_tasks:found", **ids)).result for _ in range(4)]
        for result in results:
            result["ok"]["environment"].pop("RINGFENCE_ATTEMPT")
            result["ok"].pop("real")
        assert results[1:] == results[:1] * 3
        assert rig.slot.mould_pid == mould  # one that could not learn would have ended

    in_rig(node_name, scenario)


def test_the_last_look_finds_what_is_left() -> None:
    """A process with a capability in any set, without no_new_privs or a filter, or of other ids does not pass it."""
    memory, ids = Memory(), (os.geteuid(), os.getegid())
    rows = outfit._last_look(memory, LEVEL)
    with pytest.raises(StepError, match="prctl returned 1") as caught:
        Table(rows).run()  # the bounding set
    assert caught.value.step == "check"
    with pytest.raises(StepError, match="prctl returned 0"):
        Table([one for one in rows if one[4] != outfit._BOUNDING_READ and one[3] != outfit._BOUNDING_READ]).run()
    Table([one for one in rows if one[2] != row("", "prctl")[2] and one[2] != row("", "getgroups")[2]]).run()
    found = memory.begin(len(outfit.looked(*ids)))
    assert (found == outfit.looked(*ids)) is (ids[0] != 0)
    assert found[24:] == outfit.looked(*ids)[24:]
    assert found not in (outfit.looked(ids[0] + 1, ids[1]), outfit.looked(ids[0], ids[1] + 1))
    for one in outfit._own_ids(ids[0] + 1, ids[1] + 1):
        with pytest.raises(StepError, match="returned"):
            Table([one]).run()


def test_a_worker_is_born_with_its_own_score(node_name: str) -> None:
    """At level A the mould is safe from the killer that its job has to meet, before, during and after a job."""

    theirs, safe = 500, 0 if LEVEL == "A" else 500

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async def scenario(rig: Rig) -> None:
        async def settled(when: str) -> None:
            # It has its workers' score while it forks, and a busy machine may let the job run before its mould goes on.
            mould = rig.slot.mould_pid
            assert mould is not None
            await await_until(lambda: score(mould) == safe, f"the mould's score to be {safe} {when} a job")

        for _ in range(3):
            await rig.slot.prepare(PROFILE)
            await settled("before")
            attempt, mark = await rig.running(["sh", "-c", "echo up; sleep 30"])
            assert {score(pid) for pid in marked(mark)} == {theirs}
            await settled("during")
            attempt.kill()
            await rig.finish(attempt)
            await rig.run(["true"])
            await settled("after")

    in_rig(node_name, scenario)
