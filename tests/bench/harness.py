"""Measuring A and B in turn, in one process tree, and saying what came out with its spread."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import ftnb
from ftnb.client.run import ENDED, Run

# A small model of 0.02 million parameters, and ones of about 1 and 25 million.
CELL = """
import torch
g = torch.Generator().manual_seed(0)
x = torch.randn({num_samples}, 64, generator=g)
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) * 3).long() % 10)
model = torch.nn.Sequential(
    torch.nn.Linear(64, {hidden}), torch.nn.ReLU(),
    *[m for _ in range({deep}) for m in (torch.nn.Linear({hidden}, {hidden}), torch.nn.ReLU())],
    torch.nn.Linear({hidden}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
"""
MODELS = {"mlp": {"hidden": 256, "deep": 0}, "1M": {"hidden": 640, "deep": 2}, "25M": {"hidden": 1570, "deep": 10}}
ENDLESS = 1_000_000  # steps of a run that is stopped when enough has been seen
PHASES = ("detect_s", "fence_s", "regroup_s", "restore_s", "first_step_s")


def cell(model: str, num_samples: int = 20_000) -> str:
    return CELL.format(num_samples=num_samples, **MODELS[model])


@contextlib.contextmanager
def cluster(num_ranks: int, num_spares: int = 0, environment: dict[str, str] | None = None) -> Iterator[ftnb.Session]:
    """A cluster in a scratch directory of its own, ended in any case. `environment`: more of it, for the supervisor."""
    name = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ftnb-bench-") as scratch:
        directory, variables = os.getcwd(), dict(os.environ)
        os.chdir(scratch)
        os.environ.update(environment or {})
        try:
            with ftnb.Session.start(num_ranks, num_spares, name=name, show=lambda _: None) as session:
                yield session
        finally:
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(variables)


@contextlib.contextmanager
def training(session: ftnb.Session, model: str, **options: Any) -> Iterator[Run]:
    """A run without an end of its own, stopped when the block is left."""
    options = {"steps": ENDLESS, "global_batch": 64, **options}
    run = session.train(cell(model), show=lambda _: None, **options)
    try:
        yield run
    finally:
        run.stop()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    """Ask again and again, sparing the processors, until the answer is true; returns it."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"Gave up after {timeout_s:.0f} s of waiting until {what}.")
        time.sleep(0.01)
    return answer


def wait_full(run: Run, num_ranks: int, num_spares: int = 0, settle_steps: int = 10) -> None:
    """Wait until all ranks train, the spares have run the cell, and it has gone on like that for some steps."""

    def full() -> dict[str, Any] | None:
        info = run.info()
        if info["state"] in ENDED:
            raise SystemExit(f"Run {run.name!r} has ended ({info['state']}): {info['reason']}")
        complete = info["state"] == "running" and info["world_size"] == num_ranks
        return info if complete and info["num_spares"] >= num_spares else None

    since = wait_until(full, f"{num_ranks} ranks train and {num_spares} spares are ready")["step"]
    wait_until(lambda: run.step >= since + settle_steps, f"step {since + settle_steps} is committed")


def kill(run: Run, rank: int, dice: random.Random, within_s: float = 0.1) -> None:
    """SIGKILL to a rank, at a moment that does not depend on its steps; returns when training goes on without it."""
    seen = len(_of_kind(run.events(), "recovered"))
    run.inject("kill", rank=rank, after_s=dice.uniform(0, within_s))
    wait_until(lambda: len(_of_kind(run.events(), "recovered")) > seen, f"the loss of rank {rank} is recovered from")


@dataclass(frozen=True)
class Recovery:
    """Seconds from a SIGKILL to the next committed step, and to the next one with all ranks (None: there was none)."""

    rank: int
    next_s: float
    full_s: float | None
    phases: dict[str, float] = field(default_factory=dict)


def recoveries(run: Run, num_ranks: int) -> list[Recovery]:
    """One per kill of this run, from its own files. Steps of the generation in which the kill fell do not count."""
    events, metrics = run.events(), run.metrics()
    kills = [*_of_kind(events, "fault_injected"), {"time": float("inf")}]
    found = []
    for killed, following in itertools.pairwise(kills):
        generation = max((m["generation"] for m in metrics if m["time"] <= killed["time"]), default=1)
        after = [m for m in metrics if m["generation"] > generation and m["time"] <= following["time"]]
        full = next((m for m in after if m["world_size"] == num_ranks), None)
        told = next((e for e in _of_kind(events, "recovered") if e["time"] > killed["time"]), {})
        found.append(Recovery(
            killed["rank"], after[0]["time"] - killed["time"], full and full["time"] - killed["time"],
            {phase: told[phase] for phase in PHASES if phase in told},
        ))  # fmt: skip
    return found


def check(run: Run) -> None:
    """A figure of a run that has lost or repeated a sample is worth nothing."""
    report = run.report()
    if not report.ok:
        raise SystemExit(f"The report of run {run.name!r} is not ok: {report!r} {report.problems}")


def _of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["kind"] == kind]


def spread(values: list[float], unit: str = "", digits: int = 3) -> str:
    """Median with the full range and the number of values."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:.{digits}f}{unit} (from {low:.{digits}f} to {high:.{digits}f}, n={len(values)})"


def in_turn(rounds: int, a: Callable[[], float], b: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Measure a, b, b, a, a, b, … so that a drift of the machine hits both alike."""
    measured_a, measured_b = [], []
    for number in range(rounds):
        for which in ("ab" if number % 2 == 0 else "ba"):
            (measured_a if which == "a" else measured_b).append((a if which == "a" else b)())
    return measured_a, measured_b


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def machine() -> str:
    import torch

    load = os.getloadavg()[0]
    return (
        f"{psutil.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}, ftnb {ftnb.__version__}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
