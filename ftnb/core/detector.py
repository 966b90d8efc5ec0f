"""How suspicious is a silence? An accrual detector over heartbeats, as a pure function of when they came.

After Hayashibara, Défago, Yared, Katayama: "The φ accrual failure detector" (SRDS 2004): φ = -log10 of the probability
that somebody who lives is silent for this long, so φ = 1 happens once in ten by chance and φ = 8 practically never.

Where this one differs, and why. The paper takes the gaps between arrivals for normally distributed. That fits
messages that come in order, one delay at a time. Where delays are longer than the interval, several heartbeats are on
their way at once and overtake each other: a gap between two arrivals then says little, and the normal distribution's
tail (a delay of 2 s is no outlier, but the end of a range) says the wrong thing. Here a heartbeat carries its number
and the time when it was sent. Every heartbeat that should have been sent since the newest one that has come is either
still on its way or lost; how probable that is for each is read from the delays seen lately, and the probabilities
are multiplied, since delays on the way are independent of each other. One that is missing adds 2 at most, because
one in a hundred may be lost, so only several in a row convince.

The sender's clock has an origin of its own. It drops out: a delay and the age of a heartbeat that is awaited are
measured with the same two clocks, so both are wrong by the same amount.

A sender that pauses (its interpreter lock is held) delays many heartbeats at once, and φ overestimates that. Such a
pause is no failure to be found by φ: its connection still answers (watch.py). In return a single pause in the window
hardly makes a later, real failure harder to see.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

# Delays that are remembered: half a minute's at ten heartbeats a second. Clocks that drift apart do not matter in that
# time.
WINDOW = 300
# A heartbeat is not awaited before it is this late: any busy machine causes that.
TOLERANCE_S = 0.05
# The probability that a heartbeat never comes, so that none that is missing adds more than 2.
LOST = 0.01
# Before so many delays are known, the assumption that any up to `longest_delay_s` may happen counts as well.
ENOUGH, PRIOR_WEIGHT = 50, 10.0
# The delays are put in order again after so many new ones, not for each.
_REFRESH = 32
PHI_MAX = 99.0


class Heartbeats:
    """Heartbeats of one rank; the clock is passed in (seconds, any origin)."""

    __slots__ = ("_delays", "_gap_s", "_interval_s", "_longest_delay_s", "_new", "_next_delay", "_number", "_offset",
                 "_offset_now", "_offset_seen", "_ordered", "_reference", "_sent", "_unfair_until", "last")  # fmt: skip

    def __init__(self, expected_interval_s: float, longest_delay_s: float = 2.0) -> None:
        """`longest_delay_s`: what the way of a heartbeat may take for all that is known before the first ones."""
        self._interval_s, self._longest_delay_s = expected_interval_s, longest_delay_s
        self.last: float | None = None  # when one came last, old or new
        self._number = 0
        self._sent = -math.inf  # when the newest one was sent, on the sender's clock
        self._reference = -math.inf  # the same, moved on by what was excused
        self._delays = array("d")  # a ring: how late each was, on the difference between the clocks
        self._next_delay = 0
        self._ordered: array[float] | None = None  # the same in order, perhaps a little out of date
        self._new = 0  # delays since then
        self._offset = math.inf  # the smallest arrival minus sending of this block of heartbeats and the one before
        self._offset_now = math.inf
        self._offset_seen = 0
        # The watcher's last pause: its end on the sender's clock (what was sent before may have waited for it)
        self._unfair_until, self._gap_s = -math.inf, 0.0

    def beat(self, now: float, number: int | None = None, sent: float | None = None) -> None:
        """One came; `number` counts those that were sent, `sent` is the sender's monotonic time.

        Without these it is taken for the next one, sent just now.
        """
        if number is None or sent is None:
            number, sent = self._number + 1, now
        self.last = now
        travel = now - sent
        if travel < self._offset_now:
            self._offset_now = travel
            self._offset = min(self._offset, travel)
        self._offset_seen += 1
        if self._offset_seen == WINDOW:  # so that an offset that has become wrong (clocks drift) is forgotten
            self._offset, self._offset_now, self._offset_seen = self._offset_now, math.inf, 0
        newest = self._sent
        if sent <= newest:  # overtaken: it still shows how long the way can take
            if sent >= self._unfair_until:
                self._remember(travel)
            return
        if newest >= self._unfair_until and newest > -math.inf:
            # From when it was due, not from when it was sent: a sender that is late counts like a long way.
            self._remember(now - newest - max(1, number - self._number) * self._interval_s)
        self._number, self._sent = number, sent
        self._reference = sent if sent >= self._unfair_until else max(self._reference, self._moved(sent))

    def _remember(self, delay: float) -> None:
        self._new += 1
        if len(self._delays) < WINDOW:
            self._delays.append(delay)
        else:
            self._delays[self._next_delay] = delay
            self._next_delay = (self._next_delay + 1) % WINDOW

    def excuse(self, gap_s: float, now: float) -> None:
        """The watcher itself was stopped for `gap_s` until now: silence in this time counts for nobody.

        What arrives from now on may have waited for the watcher, so its delay says nothing about the way.
        """
        if self.last is None:
            return
        here = now - self._offset  # now, on the sender's clock
        self._unfair_until, self._gap_s = here, gap_s
        self._reference = max(self._reference, self._moved(self._reference))

    def _moved(self, sent: float) -> float:
        """A time before the end of the watcher's last pause, moved on by the pause."""
        return min(sent + self._gap_s, self._unfair_until)

    def age_s(self, now: float) -> float | None:
        """How old the newest news is: since it was sent, as far as two clocks can tell (at least since it came)."""
        return None if self.last is None else max(0.0, now - self._sent - self._offset)

    def phi(self, now: float) -> float | None:
        """φ at time `now`; None before the first heartbeat. It only grows until one comes."""
        if self.last is None:
            return None
        age = now - self._reference - self._interval_s - TOLERANCE_S  # of the first one that is missing
        if age <= self._offset:
            return 0.0
        if self._ordered is None or self._new >= _REFRESH or len(self._ordered) < ENOUGH:
            self._ordered, self._new = array("d", sorted(self._delays)), 0
        ordered, offset = self._ordered, self._offset
        known = len(ordered)
        weight = PRIOR_WEIGHT * max(0.0, 1 - known / ENOUGH)
        shortest = min(offset, ordered[0]) if known else offset
        probability = 1.0
        while age > shortest:
            longer = float(known - bisect_right(ordered, age))
            if weight:
                longer += weight * max(0.0, 1 - max(0.0, age - offset) / self._longest_delay_s)
            probability *= min(1.0, max(LOST, longer / (known + weight)))
            if probability < 1e-98:
                return PHI_MAX
            age -= self._interval_s
        return max(0.0, -math.log10(probability))
