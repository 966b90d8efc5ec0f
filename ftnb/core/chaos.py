"""Random faults, reproducible from a seed: when, what and whom, and which of them a run could not survive."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Of these each is found within a second. The others need a time-out, or options of the run.
DEFAULT_KINDS = ("kill", "exit", "exception", "hang", "partition")


@dataclass(frozen=True)
class Stroke:
    """One fault of the plan. `pick` in [0, 1) chooses the rank among those that live when it is due."""

    number: int  # from 1
    at_s: float  # from the start of the chaos
    kind: str
    pick: float
    seed: int
    duration_s: float | None = None


@dataclass(frozen=True)
class Moment:
    """What the run is doing when a fault is due."""

    state: str  # as users see it: running, paused, …
    healthy: int  # members of the present generation that live; all of them hold the state
    outstanding: str = ""  # why the last fault is not over yet
    options: Mapping[str, Any] = field(default_factory=dict)


def plan(seed: int, mtbf_s: float, kinds: Sequence[str]) -> Iterator[Stroke]:
    """Without end: a Poisson process with one fault in `mtbf_s` seconds on average, all kinds equally likely.

    Every fault takes the same four random numbers, so times and picks do not depend on the kinds, nor on anything
    that happens meanwhile.
    """
    generator = random.Random(f"ftnb chaos:{seed}")
    at_s, number = 0.0, 0
    while True:
        number += 1
        at_s += generator.expovariate(1.0) * mtbf_s
        kind = kinds[int(generator.random() * len(kinds))]
        pick, own_seed = generator.random(), generator.getrandbits(32)
        # What slows a rank down must end some time, or all ranks would be slow. All else is ended by the run.
        yield Stroke(number, at_s, kind, pick, own_seed, mtbf_s / 2 if kind == "slow" else None)


def choose(pick: float, living: Collection[int]) -> int:
    """The rank that it happens to."""
    ranks = sorted(living)
    return ranks[int(pick * len(ranks))]


def spare(kind: str, moment: Moment) -> str | None:
    """Why this fault is left out, because the run might not survive it; None: it may happen."""
    if moment.state != "running":
        return "a recovery is going on" if moment.state == "recovering" else f"the run is {moment.state}"
    if not moment.healthy:
        return "the next generation is being formed"
    if moment.healthy < 2:
        return "only one rank holds the state of the training"
    if moment.outstanding:
        return moment.outstanding
    if kind == "nan" and moment.options.get("on_nan", "stop") == "stop":
        return "NaN ends the run (--on-nan stop)"
    if kind == "bitflip" and not moment.options.get("check_replicas"):
        return "nothing would find it (--check-replicas K)"
    return None
