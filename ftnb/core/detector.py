"""How suspicious is a silence? Phi-accrual over heartbeats, as a pure function of their arrival times.

Hayashibara, Défago, Yared, Katayama: "The φ accrual failure detector" (SRDS 2004). φ = 1 means that a gap
this long happens once in ten by chance, φ = 3 once in a thousand. Here φ informs (status); verdicts on
heartbeats come with the detection of hung ranks.
"""

from __future__ import annotations

import math
from collections import deque

# Below this spread a punctual sender would be suspected for a delay that any busy machine causes.
MIN_STD_S = 0.05
WINDOW = 100


class Heartbeats:
    """Arrival times of one rank's heartbeats; the clock is passed in (seconds, any origin)."""

    def __init__(self, expected_interval_s: float) -> None:
        self._intervals: deque[float] = deque([expected_interval_s], maxlen=WINDOW)
        self.last: float | None = None

    def beat(self, now: float) -> None:
        if self.last is not None:
            self._intervals.append(now - self.last)
        self.last = now

    def age_s(self, now: float) -> float | None:
        return None if self.last is None else max(0.0, now - self.last)

    def phi(self, now: float) -> float | None:
        """φ at time `now`; None before the first heartbeat."""
        age = self.age_s(now)
        if age is None:
            return None
        mean = sum(self._intervals) / len(self._intervals)
        variance = sum((x - mean) ** 2 for x in self._intervals) / len(self._intervals)
        std = max(math.sqrt(variance), MIN_STD_S)
        # Probability of a longer gap, for normally distributed gaps; far out, erfc underflows to 0.
        later = 0.5 * math.erfc((age - mean) / (std * math.sqrt(2)))
        return min(99.0, max(0.0, -math.log10(later))) if later > 0 else 99.0
