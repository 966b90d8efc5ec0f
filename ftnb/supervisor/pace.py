"""How quickly steps are committed."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

# Without a new step for so long, or for so many typical steps if that is longer, there is no rate to tell.
STALLED_S, STALLED_STEPS = 3.0, 10
COMMITS_KEPT = 51


class Pace:
    """The last commits: when (Unix seconds), and of which step."""

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque(maxlen=COMMITS_KEPT)

    def committed(self, when: float, step: int) -> None:
        """A step is committed for the first time, or again after the state was rolled back."""
        if self._commits and step <= self._commits[-1][1]:
            self._commits.clear()
        self._commits.append((when, step))

    @property
    def median_step_s(self) -> float | None:
        """Of the last steps; None before the second one."""
        gaps = [(late - early) / (last - first) for (early, first), (late, last) in pairwise(self._commits)]
        return statistics.median(gaps) if gaps else None

    def steps_per_s(self, now: float) -> float | None:
        """None when there is none to tell: at first, and when nothing moves."""
        median_s = self.median_step_s
        if median_s is None:
            return None
        (first_time, first_step), (last_time, last_step) = self._commits[0], self._commits[-1]
        if last_time <= first_time or now - last_time > max(STALLED_S, STALLED_STEPS * median_s):
            return None
        return (last_step - first_step) / (last_time - first_time)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
