"""Full disks: jobs that fill one by a write grant are paused (attack 40); a node with a full one rests (A-F06)."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from node_agent.containment import linux
from node_agent.diskwatch import DiskWatch
from node_agent.pausing import Order
from node_agent.records import Notary, Signed
from node_agent.run import Run, now_ms
from node_agent.sandbox import Defaults
from runner import Grants
from runner.wire import codec
from runner.wire.grants import Grants as WireGrants
from runner.wire.grants import PathGrant
from runner.wire.receipt import PauseReceipt
from tests.agent.build import job, signer
from tests.support import rig as rigs
from tests.support.rig import Rig
from tests.support.wait import wait_until

NOTARY = Notary(signer(), "n1", "b00700000001", "A")


@dataclass(frozen=True, slots=True)
class Share:
    """A file system of 1 TB with so much free."""

    free: float
    f_frsize: int = 4096
    f_blocks: int = 250_000_000
    f_files: int = 0
    f_favail: int = 0

    @property
    def f_bavail(self) -> int:
        """Blocks for users."""
        return int(self.f_blocks * self.free)


class Scene:
    """A watch over injected disks, and what it ordered and said."""

    def __init__(self) -> None:
        self.free = {"/home": 0.5, "/w": 0.5, "/r": 0.5}
        self.orders: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.run_w = self._run("/w", "write")
        self.run_r = self._run("/r", "read")
        self.watch = DiskWatch(
            Path("/home"), lambda: [self.run_w, self.run_r], self, NOTARY, self._emit, statvfs=self._statvfs
        )

    async def carry_out(self, run: Run, order: Order, *, act: bool = True) -> PauseReceipt:
        """Note the order and hold the run as the pauser would."""
        self.orders.append((order.op, run.job_id))
        (run.holders.add if order.op == "pause" else run.holders.discard)(order.holder)
        return NOTARY.pause_receipt(run.job_id, "", order.op, "paused")

    def _run(self, path: str, mode: str) -> Run:
        spec = job(grants=WireGrants(paths=(PathGrant(path, mode),)))  # type: ignore[arg-type]  # one of the literals
        run = Run(spec.id, 1, 0, 1, spec)
        run.started_at_ms = now_ms()
        return run

    def _emit(self, tenant: str | None, event: Signed) -> None:
        told = codec.load(event.payload)
        assert tenant is None
        assert isinstance(told, dict)
        self.said.append(f"{told['type']} {told['detail']['what']}")  # type: ignore[index, call-overload]  # a record

    def _statvfs(self, path: str) -> Share:
        return Share(self.free[path])


def test_attack_40_jobs_that_may_write_to_a_full_disk_are_paused_until_it_has_room() -> None:
    """10 %: a warning, once. 5 %: pause those with a write grant there, alone. Above 10 % again: they go on."""

    async def main() -> None:
        scene = Scene()
        await scene.watch.look()
        assert (scene.orders, scene.said) == ([], [])
        for free, orders, said in (
            (0.09, [], ["node.degraded disk low"]),
            (0.08, [], []),
            (0.04, [("pause", scene.run_w.job_id)], ["node.degraded disk full"]),
            (0.03, [], []),
            (0.07, [], ["node.degraded disk low"]),
            (0.2, [("resume", scene.run_w.job_id)], []),
        ):
            scene.orders.clear()
            scene.said.clear()
            scene.free["/w"] = free
            await scene.watch.look()
            assert (scene.orders, scene.said) == (orders, said), free
        scene.free["/r"] = 0.0
        await scene.watch.look()
        assert scene.orders == [("resume", scene.run_w.job_id)], "a read grant fills nothing"

    asyncio.run(main())


def test_a_node_takes_no_work_while_its_own_disk_is_full() -> None:
    """By the look, and at once when something could not be written; it recovers by itself."""

    async def main() -> None:
        scene = Scene()
        scene.free["/home"] = 0.0
        await scene.watch.look()
        assert (scene.watch.full, scene.said) == (True, ["node.degraded own disk full"])
        scene.free["/home"] = 0.5
        await scene.watch.look()
        assert not scene.watch.full
        scene.watch.no_room()
        assert scene.said == ["node.degraded own disk full"] * 2
        await scene.watch.look()
        assert scene.watch.full is False

    asyncio.run(main())


def test_a_file_system_that_does_not_answer_holds_up_nothing() -> None:
    """The look returns within its second, and asks no second time while the first question hangs."""

    async def main() -> None:
        scene, asked = Scene(), []
        hold = threading.Event()

        def hang(path: str) -> Share:
            if path == "/w":
                asked.append(path)
                hold.wait(20)
            return Share(0.5)

        scene.watch._statvfs = hang
        try:
            for _ in range(2):
                await asyncio.wait_for(scene.watch.look(), 5)
            assert asked == ["/w"]
        finally:
            hold.set()

    asyncio.run(main())


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home; the test starts the agent."""
    with rigs.rigged(slots=2) as found:
        yield found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_attack_40_on_a_real_disk(rig: Rig) -> None:
    """A job fills the disk of its write grant: paused, told by whom and why; it goes on once there is room."""
    place = rig.work / "disk"
    place.mkdir()
    linux.mount("small", str(place), "tmpfs", 0, "size=4m,mode=0777")
    try:
        rig.start("one")
        fill = f"echo up; head -c 4000000 /dev/zero > {place}/big; echo full; while sleep 0.05; do echo tick; done"
        filler = rig.command("sh", "-c", fill, grants=Grants(write=(str(place),)))
        rig.wait_state(filler, "paused")
        told = next(event for event in filler.events() if event.type == "job.paused")
        assert "free" in str(told.detail["reason"])
        assert str(told.detail["by"]).startswith("node ")
        (place / "big").unlink()
        rig.wait_state(filler, "running")
        assert filler.kill().outcome == "killed"
    finally:
        linux.umount(str(place), linux.DETACH)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_node_with_a_full_disk_rests_and_recovers_by_itself(rig: Rig) -> None:
    """Scenario A-F06: its own folder is full: no job fails, none is taken; freed, all of them run."""
    place = rig.home / "nodes" / f"{rig.tag}-one"
    place.mkdir(parents=True, mode=0o700)
    linux.mount("small", str(place), "tmpfs", 0, "size=16m,mode=0700")
    try:
        node = rig.start("one")
        assert rig.command("true").outcome(20).state == "finished"
        with pytest.raises(OSError, match="No space left"):
            (place / "full").write_bytes(bytes(17 << 20))
        wait_until(lambda: rig.record(node).get("state") == "degraded(disk)", "the node to say so")
        jobs = [rig.command("true") for _ in range(20)]
        before = rig.record(node).get("heartbeat_at")
        wait_until(lambda: rig.record(node).get("heartbeat_at") != before, "another heartbeat")
        assert {rig.state(one) for one in jobs} == {"queued"}
        (place / "full").unlink()
        assert {one.outcome(20).state for one in jobs} == {"finished"}
        wait_until(lambda: rig.record(node).get("state") == "ready", "the node to be ready again")
        node.stop()
    finally:
        linux.umount(str(place), linux.DETACH)


def test_a_ledger_that_can_not_be_written_fails_no_job(rig: Rig) -> None:
    """Scenario A-F06: the job goes back to its lane, uncounted, the node says degraded, and takes it when it can."""
    rig.start("one", faulty=True)
    rig.fault.write_text("full-disk")
    jobs = [rig.command("true") for _ in range(20)]
    assert {one.outcome(30).state for one in jobs} == {"finished"}
    assert {rig.attempt(one) for one in jobs} == {1}
    wait_until(lambda: any(event.type == "node.degraded" for event in rig.app.events()), "the node's own word")


def test_defaults_are_bounded() -> None:
    """Every default of DESIGN §5 that bounds a job is set."""
    found = Defaults("A")
    assert (found.pids, found.files, found.wall_s, found.output_bytes) == (512, 1024, 3600.0, 64 << 20)
    assert (found.disk_bytes, found.result_bytes) == (1 << 30, 8 << 20)
