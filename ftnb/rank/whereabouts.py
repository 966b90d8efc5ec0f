"""Where the training thread is, and how long it has waited for others. Written by that thread, read by any."""

from __future__ import annotations

import time

# In these phases a wait for the others is what the phase is made of, so it keeps the phase's name.
_WAITING_PHASES = ("form", "share")


class Whereabouts:
    """`place` is (name, step, time.monotonic() since when): one tuple, replaced as a whole, so reading needs no lock.

    As a context manager it marks a wait for the other ranks: `collective` inside, the place before it afterwards.
    """

    def __init__(self) -> None:
        self.place: tuple[str, int | None, float] = ("wait", None, time.monotonic())
        self.waited_s = 0.0  # for other ranks, all in all
        self._before = self.place

    def at(self, name: str, step: int | None) -> None:
        self.place = (name, step, time.monotonic())

    def __enter__(self) -> None:
        name, step, _ = self._before = self.place
        self.place = (name if name in _WAITING_PHASES else "collective", step, time.monotonic())

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self.waited_s += now - self.place[2]
        self.place = (self._before[0], self._before[1], now)
