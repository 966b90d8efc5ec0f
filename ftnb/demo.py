"""`ftnb demo`: train on a few ranks, lose one half-way, go on, and show the report."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from ftnb.client import container
from ftnb.client.run import ENDED, Run
from ftnb.client.session import Session
from ftnb.core.report import Report
from ftnb.demo_cell import SOURCE
from ftnb.display.live import MIN_INTERVAL_S, Terminal
from ftnb.display.status import ready_ranks, run_text, starting_cluster
from ftnb.errors import FtnbError, UsageError

MIN_STEPS = 20
# The steps of a short run are slowed down, so that the fault is planned before its step is due, and the replacement
# has half of the time to join.
AT_LEAST_S = 8.0
VICTIM = 1


def demo(num_ranks: int | None = None, steps: int = 400) -> int:
    """The exit code: 0 only if exactly one rank was lost, the run recovered, and every check holds."""
    if num_ranks is None:
        num_ranks = container.default_num_ranks(container.look())
    if num_ranks < 2:
        raise UsageError(
            "The demo loses a rank and goes on with the others, so it needs at least 2 ranks (0.6 GB of "
            "memory). Try ftnb demo -n 2 where more is free."
        )
    if steps < MIN_STEPS:
        raise UsageError(f"--steps takes a whole number of at least {MIN_STEPS}, not {steps}.")
    name = f"demo-{os.getpid()}"  # a name of its own: it never meets a cluster of yours
    terminal = Terminal()
    if importlib.util.find_spec("sklearn") is None:
        raise FtnbError(
            'The demo trains on the digits of scikit-learn, which is not installed: pip install "ftnb[lab]"'
        )
    session = Session.start(num_ranks, name=name, progress=_Progress(terminal, name))
    try:
        report = _train(session, steps, terminal)
    finally:
        with _undisturbed():
            session.stop()
    terminal.say("")
    terminal.say(str(report))
    problem = verdict(report)
    if problem:
        terminal.say(f"\nThe demo has failed: {problem}.")
        return 1
    terminal.say("\nGoodput is the time spent in steps that count, as a share of the whole time of the run.")
    terminal.say("The same in a notebook: ftnb lab")
    return 0


def _train(session: Session, steps: int, terminal: Terminal) -> Report:
    terminal.say(
        f"Training on handwritten digits, {session.num_ranks} ranks, {steps} steps; rank {VICTIM} will be "
        f"killed (SIGKILL) in step {steps // 2}."
    )
    run = session.train(
        cell(steps), steps=steps, evaluate_every=max(1, steps // 8), name="demo", show=terminal.say
    )
    _plan_kill(run, steps, terminal)
    _watch(run, terminal)
    return run.wait()


def cell(steps: int) -> str:
    """The demo's cell. A step of it takes a few milliseconds: with few of them, each gets a pause."""
    pause_s = AT_LEAST_S / steps
    if pause_s < 0.01:
        return SOURCE
    return f"""{SOURCE}

import time

quick_loss_fn = loss_fn


def loss_fn(output, target):
    time.sleep({pause_s:.3f})  # a short run, slowed down to be seen
    return quick_loss_fn(output, target)
"""


def _plan_kill(run: Run, steps: int, terminal: Terminal) -> None:
    """In the middle of the run, or, where the machine was too busy to say so in time, a little later."""
    at_step = steps // 2
    while True:
        try:
            run.inject("kill", rank=VICTIM, at_step=at_step)
            break
        except UsageError:  # that step is past already
            at_step = max(at_step + 1, (run.step + steps) // 2)
            if at_step > steps:
                raise
    if at_step != steps // 2:
        terminal.say(f"Step {steps // 2} has passed already; it will be killed in step {at_step}.")


def _watch(run: Run, terminal: Terminal) -> None:
    while True:
        info = run.info()
        terminal.show(run_text(info), (info["step"] or 0) / info["total_steps"], _one_line(info))
        if info["state"] in ENDED:
            return
        time.sleep(MIN_INTERVAL_S)


def _one_line(info: dict[str, Any]) -> str:
    loss = "–" if info.get("loss") is None else f"{info['loss']:.4f}"
    return (
        f"step {info['step']} of {info['total_steps']}: {info['state']}, loss {loss}, "
        f"world size {info['world_size']}"
    )


def verdict(report: Report) -> str:
    """What keeps the demo from having succeeded; empty if nothing does."""
    if report.state != "finished":
        return f"the run {report.state} ({report.reason})"
    recovered = [failure for failure in report.failures if failure.mttr_s is not None]
    if len(report.failures) != 1 or len(recovered) != 1:
        return (
            f"one rank was to be lost and recovered from, but {len(report.failures)} were lost and "
            f"{len(recovered)} of these were recovered from"
        )
    return "" if report.ok else "; ".join(report.problems) or "the report's checks do not hold"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals off: an impatient second Ctrl-C must not leave the cluster behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """The start of the cluster, on one line that is redrawn, or one line per further rank."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self.terminal = terminal
        self.name = name

    def __call__(self, status: dict[str, Any]) -> None:
        text = starting_cluster(status, self.name).text
        self.terminal.show(text, ready_ranks(status) / status["num_ranks"], text)
