"""What a job finds when its own code starts: environment, signals, umask, descriptors."""

from __future__ import annotations

import signal
from typing import cast

from runner.guest.bootstrap import BASE_ENVIRONMENT
from tests.containment.rig import TASKS, Rig, in_rig

#: Set by the shell that `env` is started from, or by `env` itself.
SHELL = {"PWD", "OLDPWD", "SHLVL", "_"}


def test_a_task_finds_exactly_its_environment(node_name: str) -> None:
    """The base, what the job asked for over it, and the job's own names: in os.environ and for every child."""

    async def scenario(rig: Rig) -> None:
        outcome = await rig.run(task="guest_tasks:found", env={"OWN": "ö", "LANG": "C", "RINGFENCE_JOB": "no"})
        told = cast("dict[str, dict[str, object]]", outcome.result)["ok"]
        attempt = cast("dict[str, str]", told["environment"])["RINGFENCE_ATTEMPT"]
        own = {"RINGFENCE_FDS": "kernel=100,result=102", "RINGFENCE_JOB": "main-job", "RINGFENCE_ATTEMPT": attempt}
        wanted = BASE_ENVIRONMENT | {"OWN": "ö", "LANG": "C"} | own
        assert told["environment"] == wanted
        lines = [line for line in cast("list[str]", told["real"]) if line and line.partition("=")[0] not in SHELL]
        assert dict(line.split("=", 1) for line in lines) == wanted
        # The next attempt of the same mould sees nothing of it.
        again = cast("dict[str, dict[str, object]]", (await rig.run(task="guest_tasks:found")).result)["ok"]
        assert cast("dict[str, str]", again["environment"]).keys() == wanted.keys() - {"OWN"}

    in_rig(node_name, scenario)


def test_a_task_finds_signals_as_python_sets_them(node_name: str) -> None:
    """SIGINT interrupts, SIGPIPE is an exception, nothing is blocked, files are made readable, task paths come last."""

    async def scenario(rig: Rig) -> None:
        told = cast("dict[str, dict[str, object]]", (await rig.run(task="guest_tasks:found")).result)["ok"]
        assert (told["interrupt"], told["pipe"], told["blocked"], told["umask"]) == (True, True, [], 0o022)
        assert told["path"] == TASKS
        assert (await rig.run(task="guest_tasks:interrupted")).result == {"ok": "interrupted"}

    in_rig(node_name, scenario)


def test_a_command_finds_signals_as_a_shell_sets_them(node_name: str) -> None:
    """Nothing is ignored and nothing is blocked, so a pipeline ends when its reader does."""

    async def scenario(rig: Rig) -> None:
        told = (await rig.run(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"])).out.decode()
        assert {line.split()[1].strip("0") for line in told.splitlines()} == {""}, told
        endless = await rig.run(["sh", "-c", "yes | head -n 1"])
        assert (endless.out, endless.verdict.code) == (b"y\n", 0)

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as an agent's own parent may have left it
    try:
        in_rig(node_name, scenario)
    finally:
        signal.signal(signal.SIGUSR1, before)
