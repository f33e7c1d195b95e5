"""`ringfence schedule` and the times of `run`: words in, words out, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from runner import keyring
from runner.cli.commands import run_words
from runner.client import disconnect
from runner.home import Home
from runner.place import Place
from tests.schedule.clock import KEYS
from tests.store.desk import Desk
from tests.support import scratch
from tests.support.valkey import Valkey

Ran = tuple[int, str, str]
RULE = ("--cron", "30 2 * * *", "--zone", "Europe/Berlin")


@pytest.fixture
def ringfence(valkey: Valkey, desk: Desk, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs one command of Ringfence on a home of the test's own."""
    with scratch.folder() as folder:
        home = Home(folder / "h")
        keyring.init(home, redis_url=valkey.url)
        capfd.readouterr()

        def run(*words: str) -> Ran:
            code = run_words(["--home", str(home.path), *words])
            out, err = capfd.readouterr()
            return code, out, err

        yield run
        disconnect(Place.named(home.path, None, "main"))
        desk.redis.flushall()


def test_the_life_of_a_schedule(ringfence: Callable[..., Ran], desk: Desk) -> None:
    """Added, listed, shown, paused, resumed and removed; the command after -- keeps its own options."""
    code, out, _ = ringfence("schedule", "add", "nightly", *RULE, "--tag", "k=v", "--", "tidy", "--all")
    assert (code, out.startswith("nightly active, next at ")) == (0, True)
    code, out, _ = ringfence("schedule", "list", "--json")
    (view,) = json.loads(out)
    assert (view["name"], view["task"], view["cron"], view["zone"]) == ("nightly", "tidy", RULE[1], RULE[3])
    assert view["verified"] is True
    stored = desk.redis.hget(KEYS.schedules("main"), "nightly")
    assert b'"argv":["tidy","--all"]' in stored
    _, out, _ = ringfence("schedule", "list")
    assert "30 2 * * * Europe/Berlin" in out
    _, out, _ = ringfence("schedule", "next", "nightly", "--count", "3", "--json")
    assert len(json.loads(out)) == 3
    assert ringfence("schedule", "pause", "nightly")[0] == 0
    assert json.loads(ringfence("schedule", "show", "nightly", "--json")[1])["state"] == "paused"
    assert ringfence("schedule", "resume", "nightly")[0] == 0
    assert ringfence("schedule", "rm", "nightly")[0] == 0
    assert json.loads(ringfence("schedule", "list", "--json")[1]) == []


def test_a_task_on_schedule(ringfence: Callable[..., Ran], desk: Desk) -> None:
    """--call names a task, with its arguments."""
    words = ("--every", "60", "--call", "app:tidy", "--arg", "1", "--kw", 'mode="fast"', "--missed", "skip")
    assert ringfence("schedule", "add", "poll", *words, "--expires", "30")[0] == 0
    stored = desk.redis.hget(KEYS.schedules("main"), "poll")
    for part in (b'"task":"app:tidy"', b'"args":[1]', b'"mode":"fast"', b'"missed":"skip"', b'"expires_ms":30000'):
        assert part in stored


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("schedule", "add", "x", "--every", "60"), "--call MODULE:TASK"),
        (("schedule", "add", "x", "--every", "60", "--call", "a:b", "--", "true"), "--call MODULE:TASK"),
        (("schedule", "add", "x", "--cron", "* * L * *", "--", "true"), "not supported"),
        (("schedule", "add", "x", *RULE[:3], "Nowhere", "--", "true"), "time zone"),
        (("schedule", "add", "x", "--every", "60", "--missed", "most", "--", "true"), "skip, once or all"),
        (("schedule", "add", "x", "--every", "60", "--start", "2030-01-01", "--", "true"), "with its zone"),
        (("schedule", "rm", "x"), "no schedule"),
        (("schedule", "show", "x"), "no schedule"),
        (("run", "--eta", "tomorrow", "--", "true"), "with its zone"),
        (("run", "--eta", "2030-01-01T00:00Z", "--countdown", "5", "--", "true"), "one of them"),
        (("run", "--countdown", "10", "--expires", "5", "--", "true"), "later than"),
    ],
)
def test_what_means_nothing_exits_2(
    ringfence: Callable[..., Ran], desk: Desk, words: tuple[str, ...], says: str
) -> None:
    """The message says what is meant; nothing is stored."""
    code, _, err = ringfence(*words)
    assert code == 2
    assert says in err
    assert desk.redis.exists(KEYS.schedules("main"), KEYS.ticks(), KEYS.seq()) == 0


def test_run_puts_a_job_off(ringfence: Callable[..., Ran], desk: Desk) -> None:
    """--eta and --expires reach the store; ps shows until when."""
    code, job, _ = ringfence("run", "--detach", "--countdown", "3600", "--expires", "7200", "--", "true")
    assert code == 0
    found = desk.job(job.strip())
    assert found["rf_state"] == "scheduled"
    assert int(found["rf_not_after"]) - int(found["rf_due"]) == 3_600_000
    assert "scheduled(2" in ringfence("ps")[1]
