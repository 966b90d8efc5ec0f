"""From the ranks' reports to one metrics line and one ledger line per committed step.

Every rank reports a step twice: `fetched` (which samples, and their loss) before backward, `committed` after
the update. Reports may come late, twice, in any order, or from a generation that is over. StepAssembler
holds them until the step is settled and then gives out its line: steps in order, none missing, none twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftnb.core.sampler import batch_at, digest_hex, split, steps_per_epoch


class Line(NamedTuple):
    """What is written for one committed step: a line of metrics.jsonl and one of ledger.jsonl."""

    metrics: dict[str, Any]
    ledger: dict[str, Any]


class _Fetched(NamedTuple):
    num_samples: int
    digest: int
    loss: float | None
    weight: float
    scalars: Mapping[str, float]


class _Committed(NamedTuple):
    time: float
    lr: float | None
    grad_norm: float | None
    step_s: float


@dataclass(slots=True)
class _OpenStep:
    fetched: dict[int, _Fetched] = field(default_factory=dict)
    committed: dict[int, _Committed] = field(default_factory=dict)
    evaluation: Mapping[str, float] | None = None


class StepAssembler:
    """Collects reports, returns the lines they complete. Ranks are slots; one generation is open at a time.

    `evaluate_every` makes the line of every such step wait for `evaluated`; leave it None where nothing is
    evaluated.
    """

    def __init__(
        self, dataset_len: int, global_batch: int, evaluate_every: int | None = None, *, next_step: int = 1
    ) -> None:
        steps_per_epoch(dataset_len, global_batch)  # refuses impossible sizes at once
        self._dataset_len = dataset_len
        self._global_batch = global_batch
        self._evaluate_every = evaluate_every
        self._is_open = False
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._living: set[int] = set()
        self._open_steps: dict[int, _OpenStep] = {}
        self._next_step = next_step  # not 1 when an earlier supervisor has written the lines before

    @property
    def next_step(self) -> int:
        """The first step that has no line yet."""
        return self._next_step

    def open_generation(self, generation: int, members: Sequence[int], first_step: int) -> list[Line]:
        """Start to accept reports of `generation`; `members` are its slots in torch-rank order."""
        problem = None
        if self._is_open:
            problem = f"generation {self._generation} is still open; close it first"
        elif generation <= self._generation:
            problem = f"generation {self._generation} came before; generations only grow"
        elif not members or len(set(members)) != len(members):
            problem = f"its members are {list(members)}; each slot must be named once, and at least one"
        elif not 1 <= first_step <= self._next_step:
            problem = f"it starts at step {first_step}, but step {self._next_step} is the next one due"
        if problem:
            raise ValueError(f"cannot open generation {generation}: {problem}")
        self._is_open = True
        self._generation = generation
        self._members = tuple(members)
        self._living = set(members)
        self._next_step = first_step  # an earlier step than due: a rollback, whose lines replace the old ones
        return []

    def fetched(
        self,
        generation: int,
        step: int,
        rank: int,
        num_samples: int,
        digest: int,
        loss: float | None,
        weight: float,
        scalars: Mapping[str, float] | None = None,
    ) -> list[Line]:
        """`rank` has fetched its share of `step`: the digest of its indices, and the loss of this share."""
        if not self._accepts(generation, step, rank):
            return []
        open_step = self._open_step(step)
        if rank in open_step.fetched:
            return []
        open_step.fetched[rank] = _Fetched(num_samples, digest, loss, weight, scalars or {})
        return self._completed_lines() if step == self._next_step else []

    def committed(
        self,
        generation: int,
        step: int,
        rank: int,
        time: float,
        lr: float | None,
        grad_norm: float | None,
        step_s: float,
    ) -> list[Line]:
        """The update of `step` is in the weights of `rank` since `time`."""
        if not self._accepts(generation, step, rank):
            return []
        open_step = self._open_step(step)
        if rank in open_step.committed:
            return []
        open_step.committed[rank] = _Committed(time, lr, grad_norm, step_s)
        return self._completed_lines() if step == self._next_step else []

    def evaluated(
        self, step: int, scalars: Mapping[str, float], *, generation: int | None = None
    ) -> list[Line]:
        """What `evaluate` returned after `step`; if `generation` is given, it must be the open one."""
        if not self._is_open or step < self._next_step or generation not in (None, self._generation):
            return []
        open_step = self._open_step(step)
        if open_step.evaluation is not None:
            return []
        open_step.evaluation = scalars
        return self._completed_lines()

    def lost(self, rank: int) -> list[Line]:
        """`rank` is gone: wait for it no more. What it sent before may still arrive and counts."""
        self._living.discard(rank)
        return self._completed_lines()

    def close_generation(self, last_committed_step: int) -> list[Line]:
        """Steps up to `last_committed_step` get their lines with what is there; later ones never happened."""
        if not self._is_open:
            return []
        lines = []
        while self._next_step <= last_committed_step:
            lines.append(self._take_line())
        self._open_steps.clear()
        self._living.clear()
        self._is_open = False
        return lines

    def _accepts(self, generation: int, step: int, rank: int) -> bool:
        return (
            self._is_open
            and generation == self._generation
            and step >= self._next_step
            and rank in self._members
        )

    def _open_step(self, step: int) -> _OpenStep:
        open_step = self._open_steps.get(step)
        if open_step is None:
            open_step = self._open_steps[step] = _OpenStep()
        return open_step

    def _completed_lines(self) -> list[Line]:
        lines = []
        # Without a living member nobody can say whether a step will last: that is settled at the closing.
        while self._living and self._is_complete(self._next_step):
            lines.append(self._take_line())
        return lines

    def _is_complete(self, step: int) -> bool:
        open_step = self._open_steps.get(step)
        if open_step is None or len(open_step.committed) < len(self._living):
            return False
        if not (open_step.committed.keys() >= self._living and open_step.fetched.keys() >= self._living):
            return False
        evaluator = self._members[0]
        waits_for_evaluation = (
            self._evaluate_every is not None
            and step % self._evaluate_every == 0
            and evaluator in self._living
            and open_step.evaluation is None
        )
        return not waits_for_evaluation

    def _take_line(self) -> Line:
        step = self._next_step
        self._next_step += 1
        open_step = self._open_steps.pop(step, None) or _OpenStep()
        batch = batch_at(step, self._dataset_len, self._global_batch)
        # In the order of the members, so that sums do not depend on the order of arrival.
        fetched = [open_step.fetched[rank] for rank in self._members if rank in open_step.fetched]
        committed = [open_step.committed[rank] for rank in self._members if rank in open_step.committed]
        world_size = len(self._members)
        # A rank without samples has no loss to give; its report counts, so that "3/4" means a loss is lost.
        num_losses = sum(report.loss is not None or not report.weight > 0 for report in fetched)
        metrics = {
            "time": min((report.time for report in committed), default=None),
            "step": step,
            "epoch": batch.epoch,
            "loss": _weighted_mean([(report.weight, report.loss) for report in fetched]),
            "loss_shares": f"{num_losses}/{world_size}",
            "lr": _finite_or_none(committed[0].lr) if committed else None,
            "grad_norm": _finite_or_none(committed[0].grad_norm) if committed else None,
            "world_size": world_size,
            "generation": self._generation,
            "step_s": max((report.step_s for report in committed), default=None),
        }
        names = dict.fromkeys(name for report in fetched for name in report.scalars)
        means = {
            name: _weighted_mean([(report.weight, report.scalars.get(name)) for report in fetched])
            for name in names
        }
        _add_scalars(metrics, means, "training_")
        if open_step.evaluation:
            finite = {name: _finite_or_none(value) for name, value in open_step.evaluation.items()}
            _add_scalars(metrics, finite, "evaluate_")

        # A commit needs every member's input, so a share that nobody reported was used all the same: it is
        # entered as planned and named under `unreported`, since the digest does not cover it.
        planned = split(batch.start, batch.stop, world_size)
        shares = {}
        for rank, (start, stop) in zip(self._members, planned, strict=True):
            report = open_step.fetched.get(rank)
            shares[str(rank)] = report.num_samples if report else stop - start
        ledger = {
            "step": step,
            "epoch": batch.epoch,
            "generation": self._generation,
            "start": batch.start,
            "stop": batch.stop,
            "shares": shares,
            "digest": digest_hex(sum(report.digest for report in fetched)),
            "shares_reported": f"{len(fetched)}/{world_size}",
        }
        if len(fetched) < world_size:
            ledger["unreported"] = [rank for rank in self._members if rank not in open_step.fetched]
        return Line(metrics, ledger)


def _finite_or_none(value: float | None) -> float | None:
    """JSON knows neither NaN nor infinity: both are written as null."""
    return value if value is not None and math.isfinite(value) else None


def _weighted_mean(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    pairs = [(weight, value) for weight, value in pairs if weight > 0 and value is not None]
    if not pairs:
        return None
    total = sum(weight for weight, _ in pairs)
    return _finite_or_none(sum(weight * value for weight, value in pairs) / total)


def _add_scalars(metrics: dict[str, Any], scalars: Mapping[str, float | None], prefix: str) -> None:
    """Enter the user's scalars; one whose name is taken gets the prefix, so no curve mixes two things."""
    for name, value in scalars.items():
        metrics[name if name not in metrics else prefix + name] = value
