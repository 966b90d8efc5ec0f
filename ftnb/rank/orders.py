"""What the supervisor wants of this rank: written by the agent thread, obeyed by the training thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ftnb.rank.faults import POINTS


class Superseded(Exception):
    """A newer generation is wanted: leave this one."""


class Dropped(Exception):
    """The run is over for this rank."""


@dataclass
class Fault:
    """An injected fault. With no `at_step` it strikes in the step in flight, or in the next one."""

    fault_id: int
    kind: str
    at_step: int | None
    duration_s: float | None = None
    factor: float | None = None
    seed: int = 0
    # Set when the supervisor has put it on record: nothing happens before.
    allowed: threading.Event = field(default_factory=threading.Event)


class Orders:
    """Shared by two threads; every change wakes the training thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forget everything about the last run."""
        with self._changed:
            self._wanted = 0  # the newest generation the supervisor asked for
            self._go: dict[str, Any] | None = None
            self._dropped = False
            self._hold: tuple[int, int] | None = None  # (hold id, last step to do)
            self._step = 0
            self._faults: list[Fault] = []  # whose time is to come
            self._struck: list[Fault] = []  # whose time has come
            self._snapshot_wanted = False

    # --- agent thread

    def want(self, generation: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, generation)
            self._changed.notify_all()

    def go(self, order: dict[str, Any]) -> None:
        with self._changed:
            self._go = order
            self._changed.notify_all()

    def drop(self) -> None:
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    def hold(self, hold_id: int, after_step: int) -> tuple[bool, int]:
        """Stop after `after_step`. (False, step) when that is no longer possible; asked again, the newer counts."""
        with self._changed:
            accepted = self._step <= after_step
            if accepted:
                self._hold = (hold_id, after_step)
                self._changed.notify_all()
            return accepted, self._step

    def release(self) -> None:
        with self._changed:
            self._hold = None
            self._changed.notify_all()

    def add_fault(self, fault: Fault) -> bool:
        """False when `at_step` is past already."""
        if fault.kind not in POINTS:
            raise ValueError(f"fault {fault.kind!r} is unknown here")
        with self._changed:
            if fault.at_step is not None and fault.at_step <= self._step:
                return False
            self._faults.append(fault)
            return True

    def allow_fault(self, fault_id: int) -> None:
        with self._changed:
            for fault in self._struck:
                if fault.fault_id == fault_id:
                    fault.allowed.set()

    def want_snapshot(self) -> None:
        with self._changed:
            self._snapshot_wanted = True
            self._changed.notify_all()

    # --- training thread

    def check(self, generation: int) -> None:
        """Raise when this generation is not wanted any more. Reads without the lock: it is asked often."""
        if self._dropped:
            raise Dropped
        if self._wanted > generation:
            raise Superseded(generation)

    def next_generation(self, after: int) -> int:
        """Wait until a generation newer than `after` is wanted; raises `Dropped` at the end of the run."""
        with self._changed:
            while not self._dropped and self._wanted <= after and not self._snapshot_wanted:
                self._changed.wait()
            if self._dropped:
                raise Dropped
            return self._wanted

    def wait_go(self, generation: int) -> dict[str, Any]:
        """The order to start `generation`; `Superseded` when a newer one is wanted first."""
        with self._changed:
            while True:
                self.check(generation)
                if self._go is not None and self._go["generation"] == generation:
                    order, self._go = self._go, None
                    self._hold = (0, order["hold_after"]) if order.get("hold_after") is not None else None
                    self._step = order["first_step"] - 1
                    return order
                self._changed.wait()

    def enter_step(self, step: int, generation: int) -> int | None:
        """Begin `step`, or return the step after which this rank shall hold (it has reached it)."""
        with self._changed:
            self.check(generation)
            if self._hold is not None and step > self._hold[1]:
                return self._hold[1]
            self._step = step
            return None

    def wait_released(self, step: int, generation: int) -> None:
        """Sleep until the hold is lifted or moved beyond `step`, or a snapshot of the weights is wanted."""
        with self._changed:
            while self._hold is not None and step > self._hold[1] and not self._snapshot_wanted:
                self.check(generation)
                self._changed.wait()
            self.check(generation)

    def due_faults(self, step: int, point: str) -> list[Fault]:
        """Those that strike at this point of this step (see `POINTS`); each is told once, so it is dealt with once."""
        if not self._faults:
            return []
        with self._changed:
            due = [f for f in self._faults if f.at_step in (None, step) and POINTS[f.kind] == point]
            self._faults = [f for f in self._faults if f not in due]
            self._struck += due
            return due

    def take_snapshot_wish(self) -> bool:
        if not self._snapshot_wanted:
            return False
        with self._changed:
            wanted, self._snapshot_wanted = self._snapshot_wanted, False
            return wanted
