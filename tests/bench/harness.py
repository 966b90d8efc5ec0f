"""Measuring A and B in turn, in one process tree, and saying what came out with its spread."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import ftnb

# The small model of the findings, and one of about a million parameters.
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
MODELS = {"mlp": {"hidden": 256, "deep": 0}, "1M": {"hidden": 640, "deep": 2}}


def cell(model: str, num_samples: int = 20_000) -> str:
    return CELL.format(num_samples=num_samples, **MODELS[model])


@contextlib.contextmanager
def cluster(num_ranks: int) -> Iterator[ftnb.Session]:
    """A cluster in a scratch directory of its own, ended in any case."""
    name = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ftnb-bench-") as scratch:
        before = os.getcwd()
        os.chdir(scratch)
        try:
            with ftnb.Session.start(num_ranks, name=name, show=lambda _: None) as session:
                yield session
        finally:
            os.chdir(before)


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


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def machine() -> str:
    import torch

    load = os.getloadavg()[0]
    return (
        f"{psutil.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}, ftnb {ftnb.__version__}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
