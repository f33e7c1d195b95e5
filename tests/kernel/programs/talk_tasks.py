"""Tasks that talk: mail, signals and watching from inside real jobs."""

from __future__ import annotations

import os
import signal
import sys
import time

from runner import App, current_job
from runner.inside import call, mail, signals, state

app = App()


@app.task
def asks(words: list[str]) -> list[object]:
    """Ask another job for each word, then wait until a plain letter is confirmed."""
    answers = [mail.ask("desk", word, timeout=20) for word in words]
    return [*answers, mail.send("desk", None, confirm=20).by]


@app.task
def answers() -> list[str]:
    """Answer every question until a letter that is none; return who wrote."""
    seen = []
    while True:
        for letter in mail.receive("desk", wait=20):
            seen.append(letter.sender)
            if not letter.asks:
                letter.ack()
                return seen
            letter.reply(str(letter.body).upper())


@app.task
def leads(rounds: int) -> list[object]:
    """Ask round by round, die by SIGKILL after the third of the first attempt, and go on from what was kept."""
    before = state.load("round", 0)
    for number in range(int(str(before)), rounds):
        answer = mail.ask("desk", f"round {number}", timeout=30)
        state.save("round", number + 1)
        if current_job.attempt == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    mail.send("desk", None)
    return [current_job.attempt, before, answer]


@app.task
def hears() -> list[str]:
    """Take signals until TERM, with USR2 held up from start to end; return what was told, and by whom."""
    heard: list[str] = []
    over: list[int] = []
    signals.on("USR1", lambda told: heard.append(f"{told.name} {told.why}"))
    signals.on("USR2", lambda told: heard.append(str(told.name)))
    signals.on("LOOP", lambda told: heard.append(str(told.name)))
    signals.on("TERM", lambda told: over.append(1))
    signals.block("USR2")
    sys.stdout.write("ready\n")
    while not over:
        time.sleep(0.01)
    heard.append("-")
    signals.block()
    while heard[-1] == "-":
        time.sleep(0.01)
    return heard


@app.task
def watches(job: str) -> list[str]:
    """Tell another job to end, and see it end."""
    news = signals.watch(wait=10)
    found = [signals.send("USR1", job).outcome]
    time.sleep(0.3)  # what happens before the first look is news, too
    for event in news:
        if event["job"] == job and event["type"] == "job.ended":
            return [*found, str(event["state"]), str(event["signed"])]
    return found


@app.task
def loops() -> None:
    """Call one tool with the same arguments again and again."""
    while True:
        call("tool.call", name="echo", args={"word": "same"})
        sys.stdout.write("called\n")


@app.task
def dies_with_a_letter() -> None:
    """Take a letter and end without a word."""
    mail.receive("once", wait=20)
    os._exit(3)


@app.task
def takes_over() -> int:
    """Take a letter that somebody else had; return how often it was given out."""
    (letter,) = mail.receive("once", wait=20)
    letter.ack()
    return letter.times


@app.task
def sends_once() -> None:
    """Send one letter."""
    mail.send("once", "x")
