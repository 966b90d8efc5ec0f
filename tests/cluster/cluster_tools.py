"""Tools of the cluster tests: cells to train, an audit and a reference that share no code with ftnb.

Everything is waited for by a condition with a deadline. A deadline here is never a claim about speed: it only
keeps a hung test from blocking the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ftnb
from ftnb.wire import proc

DEADLINE_S = 60.0
NUM_RANKS = 4

# The losses of two runs may differ by the order in which floating-point sums are taken (how a batch is shared out
# among the ranks), and by nothing else. In float64 that is 1e-16 relative, which some hundred steps of these
# smooth little models do not raise above 1e-12; in float32 it is 6e-8, raised to a few 1e-6. A sample that
# is lost or doubled, or an average over a wrong number, changes the loss by 1e-3 and more.
SAME_F64 = 1e-9
SAME_F32 = 1e-4

NUM_SAMPLES = 50
GLOBAL_BATCH = 16  # 50 = 3 * 16 + 2: the last batch of an epoch has two samples, fewer than there are ranks

# Regression, float64, no BatchNorm and no dropout; momentum, so that the optimizer has a state to keep.
DATA = f"""
import torch
_numbers = torch.Generator().manual_seed(1)
inputs = torch.randn({NUM_SAMPLES}, 6, generator=_numbers, dtype=torch.float64)
targets = torch.sin(inputs.sum(1, keepdim=True))
dataset = torch.utils.data.TensorDataset(inputs, targets)
"""
MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""
LOSS = "loss_fn = torch.nn.functional.mse_loss\n"
CELL = DATA + MODEL + LOSS

# `training_step` that counts its calls, as a place to go wrong in: {trouble} may use `calls`, `rank`, `x`.
STEP = """
import os, signal, sys, time
rank = int(os.environ["FTNB_RANK"])
calls = 0

def training_step(model, batch):
    global calls
    calls += 1
    x, y = batch
    {trouble}
    return torch.nn.functional.mse_loss(model(x), y)
"""


def cell_with_trouble(trouble: str) -> str:
    """A cell whose `training_step` runs the one-line statement `trouble` before it works."""
    return DATA + MODEL + STEP.replace("{trouble}", trouble)


def meeting(name: str, num_ranks: int = NUM_RANKS) -> str:
    """A statement in which every rank waits until all are there: nobody is left in an earlier step."""
    return (
        f"open(f'{name}-{{rank}}.met', 'w').close(); "
        f"[time.sleep(0.002) for _ in iter(lambda: all(os.path.exists(f'{name}-{{r}}.met') "
        f"for r in range({num_ranks})), True)]"
    )


# --- waiting and processes


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = DEADLINE_S, every_s: float = 0.01) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s in vain: {what}"
        time.sleep(every_s)
    return value


class Census:
    """All processes that belong to clusters below one runtime directory, whoever started them.

    They are known by their environment, which every child inherits; so a process that nobody recorded is
    found as well. Remembered by pid and start time.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._mark = f"FTNB_RUNTIME_DIR={runtime_dir}".encode()
        self.seen: set[proc.ProcessId] = set()

    def take(self) -> set[proc.ProcessId]:
        """The processes that are there now."""
        now = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found = proc.identify(int(entry.name))
                    if found is not None and found.is_alive():
                        now.add(found)
        self.seen |= now
        return now

    def left(self) -> list[str]:
        """Those that live, with their command lines: empty if all is well."""
        self.take()
        return sorted(f"pid {p.pid}: {command_line(p.pid)}" for p in self.seen if p.is_alive())

    def end_all(self) -> None:
        """SIGKILL to every process that was ever seen and still is that very process."""
        self.take()
        for process in self.seen:
            process.signal(signal.SIGKILL)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def processes_of(session: ftnb.Session) -> dict[int, proc.ProcessId]:
    """The process of each rank that has one."""
    entries = session.status()["ranks"]
    found = {entry["rank"]: proc.identify(entry["pid"]) for entry in entries if entry["pid"]}
    return {rank: process for rank, process in found.items() if process is not None and process.is_alive()}


def pids_of(session: ftnb.Session) -> dict[int, int]:
    return {rank: process.pid for rank, process in processes_of(session).items()}


# --- a reference without ftnb: permutation, digest, and the training in one process


def order_of(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of the samples in an epoch, from the definition in the documentation."""
    order = list(range(num_samples))
    random.Random(f"ftnb:{seed}:{epoch}").shuffle(order)
    return order


def splitmix64(index: int) -> int:
    mask = 2**64 - 1
    z = (index + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def batch_of(step: int, num_samples: int, global_batch: int) -> tuple[int, int, int]:
    """(epoch, start, stop) of a step; both count from 1."""
    per_epoch = math.ceil(num_samples / global_batch)
    epoch, number = (step - 1) // per_epoch + 1, (step - 1) % per_epoch
    return epoch, number * global_batch, min((number + 1) * global_batch, num_samples)


def indices_of(step: int, num_samples: int, global_batch: int, seed: int = 0) -> list[int]:
    epoch, start, stop = batch_of(step, num_samples, global_batch)
    return order_of(num_samples, seed, epoch)[start:stop]


class Reference:
    """The cell trained here, in one process, on whole global batches: losses, rates, norms and weights per step."""

    def __init__(
        self,
        cell: str,
        steps: int,
        *,
        global_batch: int = GLOBAL_BATCH,
        seed: int = 0,
        clip_norm: float | None = None,
        scheduler_interval: str = "epoch",
        watch: Callable[[Any], float] | None = None,
    ) -> None:
        import numpy as np
        import torch
        from torch.utils.data import default_collate

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        names: dict[str, Any] = {"__name__": "reference"}
        exec(cell, names)
        model, optimizer, dataset = names["model"], names["optimizer"], names["dataset"]
        per_epoch = math.ceil(len(dataset) / global_batch)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.watched: list[float] = []
        for step in range(1, steps + 1):
            batch = default_collate([dataset[i] for i in indices_of(step, len(dataset), global_batch, seed)])
            if "training_step" in names:
                loss = names["training_step"](model, batch)
                loss = loss["loss"] if isinstance(loss, dict) else loss
            else:
                loss = names["loss_fn"](model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            limit = math.inf if clip_norm is None else clip_norm
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            self.losses.append(float(loss.detach()))
            self.rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if "scheduler" in names and (scheduler_interval == "step" or step % per_epoch == 0):
                names["scheduler"].step()
            if watch is not None:
                with torch.no_grad():
                    self.watched.append(watch(model))
        self.model = model


def assert_same(found: Iterable[float], wanted: Iterable[float], tolerance: float) -> None:
    """Equal step by step, relative to the size of the numbers."""
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    worst = max((abs(a - b) / max(abs(b), 1e-3), step, a, b) for step, (a, b) in enumerate(zip(found, wanted), start=1))
    assert worst[0] <= tolerance, f"step {worst[1]}: {worst[2]!r}, not {worst[3]!r}"


def losses_of(run: ftnb.Run) -> list[float]:
    return [line["loss"] for line in run.metrics()]


def digest_of_model(model: Any) -> str:
    """sha256 over all parameters, then all buffers, in the model's order."""
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- what must hold of the files of every run


def check_books(run: ftnb.Run, steps: int, *, num_samples: int = NUM_SAMPLES, global_batch: int = GLOBAL_BATCH,
                seed: int = 0) -> None:  # fmt: skip
    """One line per step in both files, and by the ledger every sample of every epoch exactly once."""
    ledger, metrics, events = run.ledger(), run.metrics(), run.events()
    assert [line["step"] for line in ledger] == list(range(1, steps + 1))
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    generations = [line["generation"] for line in ledger]
    assert generations == sorted(generations), "generations only grow"
    assert [line["generation"] for line in metrics] == generations
    members = members_by_generation(run)
    used: dict[int, Counter[int]] = {}
    for line, metric in zip(ledger, metrics):
        step = line["step"]
        epoch, start, stop = batch_of(step, num_samples, global_batch)
        assert (line["epoch"], line["start"], line["stop"]) == (epoch, start, stop), f"step {step}"
        assert metric["epoch"] == epoch
        shares = {int(rank): size for rank, size in line["shares"].items()}
        assert list(shares) == members[line["generation"]], f"step {step}: the shares of the living ranks"
        assert metric["world_size"] == len(shares)
        assert sum(shares.values()) == stop - start, f"step {step}: the global batch is constant"
        assert max(shares.values()) - min(shares.values()) <= 1, f"step {step}: even shares"
        order = order_of(num_samples, seed, epoch)
        fetched, position = [], start
        unreported = line.get("unreported", [])
        assert line["shares_reported"] == f"{len(shares) - len(unreported)}/{len(shares)}"
        for rank, size in shares.items():
            if rank not in unreported:
                fetched += order[position : position + size]
            position += size
        digest = sum(map(splitmix64, fetched)) % 2**64
        assert line["digest"] == f"{digest:016x}", f"step {step}: other samples were fetched than belong to it"
        used.setdefault(epoch, Counter()).update(order[start:stop])
    lost = [event for event in events if event["kind"] == "rank_failed"]
    assert sum(bool(line.get("unreported")) for line in ledger) <= len(lost), "only the dead may fail to report"
    for epoch, counts in used.items():
        if epoch * math.ceil(num_samples / global_batch) <= steps:
            assert counts == Counter(range(num_samples)), f"epoch {epoch}: every sample exactly once"


def members_by_generation(run: ftnb.Run) -> dict[int, list[int]]:
    events = run.events()
    members = {1: list(range(events[0]["world_size"]))}
    members |= {event["generation"]: event["members"] for event in events if event["kind"] == "regrouped"}
    return members


PHASES = ("detect_s", "fence_s", "regroup_s", "restore_s", "first_step_s")


def check_recoveries(run: ftnb.Run, lost: Iterable[int], *, injected: Iterable[int] | None = None) -> list[dict]:
    """The events of a run that lost these ranks and recovered: all there, once, in order. Returns `recovered`."""
    events = run.events()
    lost = sorted(lost)
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished", kinds
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert all(event.get("reason") for event in events)
    for kind in ("rank_failed", "rank_fenced"):
        assert sorted(e["rank"] for e in events if e["kind"] == kind) == lost, f"{kind}: {kinds}"
    injected = lost if injected is None else sorted(injected)
    assert sorted(e["rank"] for e in events if e["kind"] == "fault_injected") == injected
    recovered = [event for event in events if event["kind"] == "recovered"]
    assert sorted(rank for event in recovered for rank in event["ranks"]) == lost, "each loss is recovered from once"
    for rank in lost:
        place = {kind: position(events, kind, rank) for kind in ("rank_failed", "rank_fenced")}
        if rank in injected:
            assert position(events, "fault_injected", rank) < place["rank_failed"]
        assert place["rank_failed"] < place["rank_fenced"]
        # Nobody takes over before the dead rank is fenced.
        regrouped = [
            number for number, event in enumerate(events)
            if event["kind"] == "regrouped" and number > place["rank_failed"]
        ]  # fmt: skip
        assert regrouped and place["rank_fenced"] < regrouped[0], kinds
        assert rank not in events[regrouped[0]]["members"]
        back = next(
            number for number, event in enumerate(events) if event["kind"] == "recovered" and rank in event["ranks"]
        )
        assert regrouped[0] < back
    for event in recovered:
        assert all(event[phase] >= 0 for phase in PHASES), event
        assert abs(sum(event[phase] for phase in PHASES) - event["mttr_s"]) < 1e-4, event
        assert event["lost_steps"] in (0, 1), "at most the step in flight is done again"
    # A failure names the generation that it broke; a second one may come when the next is forming already.
    generations = [e["generation"] for e in events if e["kind"] not in ("rank_suspected", "rank_failed")]
    assert generations == sorted(generations), "generations only grow"
    return recovered


def position(events: list[dict[str, Any]], kind: str, rank: int) -> int:
    found = [number for number, event in enumerate(events) if event["kind"] == kind and event.get("rank") == rank]
    assert len(found) == 1, f"{kind} of rank {rank}: {len(found)} times"
    return found[0]


def check_report(report: Any, lost: Iterable[int], *, kind: str = "kill", world_size: int = NUM_RANKS) -> None:
    lost = sorted(lost)
    assert report.state == "finished", report
    assert report.problems == []
    assert report.ok, str(report)
    assert sorted(failure.rank for failure in report.failures) == lost
    assert {failure.kind for failure in report.failures} <= {kind}, report.failures
    assert all(failure.mttr_s is not None and failure.mttr_s > 0 for failure in report.failures)
    assert report.samples_used == report.samples_expected
    assert report.samples_missed == report.samples_repeated == 0
    assert report.weights_agree and report.weights_ranks == world_size - len(lost)
    assert (report.world_size_start, report.world_size_end) == (world_size, world_size - len(lost))


def says(error: BaseException, *parts: str) -> None:
    """The message holds every part (a regular expression)."""
    for part in parts:
        assert re.search(part, str(error)), f"{part!r} is not in: {error}"
