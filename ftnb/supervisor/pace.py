"""How quickly steps are committed."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

# Without a new step for so long, or for so many typical steps if that is longer, there is no rate to tell.
STALLED_S, STALLED_STEPS = 3.0, 10
COMMITS_KEPT = 51


class Pace:
    """The last commits: when (Unix seconds), of which step, and how long that step had taken."""

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque(maxlen=COMMITS_KEPT)
        self._took_s: deque[float] = deque(maxlen=COMMITS_KEPT)

    def committed(self, when: float, step: int, took_s: float) -> None:
        """A step is committed for the first time, or again after the state was rolled back."""
        if self._commits and step <= self._commits[-1][1]:
            self._commits.clear()
        self._commits.append((when, step))
        self._took_s.append(took_s)

    def recall(self, took_s: Iterable[float | None]) -> None:
        """How long steps took under an earlier supervisor."""
        self._took_s.extend(seconds for seconds in took_s if seconds is not None)

    @property
    def median_step_s(self) -> float | None:
        """How long one of the last steps took; None before the first one.

        It is known from the first step on, and after a rollback, since it makes the limit of the next one: nobody is
        stuck in the second step who takes as long for it as for the first. Of two, the shorter counts.
        """
        return statistics.median_low(self._took_s) if self._took_s else None

    def steps_per_s(self, now: float) -> float | None:
        """None when there is none to tell: at first, and when nothing moves."""
        median_s = self.median_step_s
        if median_s is None or len(self._commits) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self._commits[0], self._commits[-1]
        if last_time <= first_time or now - last_time > max(STALLED_S, STALLED_STEPS * median_s):
            return None
        return (last_step - first_step) / (last_time - first_time)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
