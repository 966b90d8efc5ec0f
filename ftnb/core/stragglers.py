"""Which rank is slower than the others, by the time of its own work in each step (without waiting for its peers)?

All ranks of a group do their steps at the speed of the slowest, so the time of whole steps says nothing; their own
times do. A rank is a straggler when its median over a window of steps is well above what is typical of the others
(`MIN_FACTOR`), and also far outside the spread of the others (`MIN_SCORE`), in two windows in a row. Medians, and the
median deviation as spread, since one slow step (a checkpoint, a page from the disk) must not count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

MIN_FACTOR = 1.5
MIN_SCORE = 4.0
# The spread of the others is taken for this at least: as a part of their typical time, and in seconds. Two equal ranks,
# or one alone, have none, and steps of a fraction of a millisecond vary by as much.
MIN_SPREAD, MIN_SPREAD_S = 0.1, 0.00025
# Standard deviations in a median deviation, for normally distributed times.
_MAD = 1.4826
_IN_A_ROW = 2


@dataclass(frozen=True)
class Straggler:
    rank: int
    factor: float  # how many times as long as the others' typical time


@dataclass
class _Times:
    last: deque[float]
    fresh: int = 0  # since the last comparison
    slow: int = 0  # comparisons in a row
    told: bool = False


@dataclass
class Stragglers:
    """Own times of the ranks of one run."""

    window: int = 20
    _times: dict[int, _Times] = field(default_factory=dict)

    def step(self, step: int, rank: int, own_s: float) -> None:
        """This rank has done a step; one that is done again counts again."""
        times = self._times.get(rank)
        if times is None:
            times = self._times[rank] = _Times(deque(maxlen=self.window))
        times.last.append(own_s)
        times.fresh += 1

    def changed(self, members: Iterable[int], newcomers: Iterable[int] = ()) -> None:
        """A new generation. Who left is forgotten, and so is what is known of a slot that has another process now.

        With another number of ranks each has another share of the work, so all are compared by new steps only.
        """
        stay = set(members) - set(newcomers)
        self._times = {rank: times for rank, times in self._times.items() if rank in stay}
        for times in self._times.values():
            times.fresh = 0

    def typical(self) -> dict[int, float]:
        """Median own time of each rank, over the steps at hand."""
        return {rank: median(times.last) for rank, times in sorted(self._times.items())}

    def look(self) -> list[Straggler]:
        """Who has turned out to be a straggler; each is told once, until it has been normal for a window."""
        if len(self._times) < 2 or any(times.fresh < self.window for times in self._times.values()):
            return []
        slow = _slow(self.typical())
        found = []
        for rank, times in sorted(self._times.items()):
            times.fresh = 0
            if rank not in slow:
                times.slow, times.told = 0, False
                continue
            times.slow += 1
            if times.slow >= _IN_A_ROW and not times.told:
                times.told = True
                found.append(Straggler(rank, slow[rank]))
        return found


def _slow(typical: dict[int, float]) -> dict[int, float]:
    """Ranks that are slow in this window, with the factor."""
    ordered = sorted(typical.values())
    slow = {}
    for rank, own_s in typical.items():
        if own_s < ordered[0] * MIN_FACTOR:
            continue  # for speed: the others' typical time is no less than the smallest
        at = bisect_left(ordered, own_s)
        others = ordered[:at] + ordered[at + 1 :]
        normal = median(others)
        if own_s < MIN_FACTOR * normal:
            continue
        spread = _MAD * median(abs(other - normal) for other in others)
        if own_s - normal >= MIN_SCORE * max(spread, MIN_SPREAD * normal, MIN_SPREAD_S):
            slow[rank] = round(own_s / max(normal, 1e-6), 2)
    return slow
