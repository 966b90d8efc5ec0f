"""What the supervisor knows of one engine process: a rank that fills a slot, or one of the pool that has none yet."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftnb.core.detector import Heartbeats
from ftnb.wire import proc
from ftnb.wire.ring import RingReader

BEAT_S = 0.1
# A rank that has not been heard of for this long is shown as suspect (what follows from it: a later version).
SILENT_S = 2.0

_LIVING = ("starting", "idle", "training", "suspect", "spare", "joining")


@dataclass(eq=False)
class Slot:
    """One engine process; `state` as in the design (starting, idle, training, …), or "leaving"."""

    key: str  # "engine3": never used twice in a cluster
    rank: int | None = None  # the slot it fills
    intended: int | None = None  # of the pool: the slot it was started for; None: a warm spare
    engine_id: int | None = None  # ipyparallel's number
    state: str = "starting"
    process: proc.ProcessId | None = None
    host: str | None = None
    agent: bytes | None = None  # socket identity of its agent thread
    num_gpus: int = 0
    gpu: int | None = None
    torch: str | None = None
    step: int | None = None
    phase: str = "starting"  # what its training thread does: starting, idle, loading, training
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(BEAT_S))
    ring: RingReader | None = None  # its reports of steps, in shared memory
    unfreed: deque[tuple[int, int | None]] = field(default_factory=deque)  # (end of a report, the step it is about)
    answered: float = 0.0  # monotonic time of the last "beat_seen" sent to it
    last_sign: float = 0.0  # wall clock of its last message of any kind
    started: float = 0.0  # monotonic time
    fault: str | None = None  # the kind of an injected fault that is to end it (or has)
    fault_time: float | None = None  # when that took effect
    problem: str | None = None  # why it is failed
    loaded: str | None = None  # of the pool: the run whose cell it has run ("?name" while it does)
    joined_step: int | None = None  # the first step it shall do as a replacement, until it has proved itself
    joined_run: str | None = None

    @property
    def alive(self) -> bool:
        return self.state in _LIVING

    @property
    def usable(self) -> bool:
        return self.alive and self.state != "starting"

    @classmethod
    def restored(cls, record: dict[str, Any], directory: Path) -> Slot:
        """As an earlier supervisor had it."""
        known = ("rank", "intended", "engine_id", "state", "host", "num_gpus", "gpu", "torch", "problem", "loaded",
                 "joined_step", "joined_run")  # fmt: skip
        slot = cls(record["key"], started=time.monotonic(), **{name: record[name] for name in known})
        if record["pid"] is not None:
            slot.process = proc.ProcessId(record["pid"], record["pid_started"])
        with contextlib.suppress(OSError):  # it was not there yet, or not any more
            slot.ring = RingReader(directory / f"{slot.key}.ring", create=False)
        return slot

    def free_reports(self, written_through: int | None) -> None:
        """Reports about steps up to `written_through` (None: all) are in the files: their memory can be used again."""
        if self.ring is None:
            return
        position = None
        while self.unfreed and (
            written_through is None or self.unfreed[0][1] is None or self.unfreed[0][1] <= written_through
        ):
            position, _ = self.unfreed.popleft()
        if position is not None:
            self.ring.free(position)

    def status(self, now: float) -> dict[str, Any]:
        age, phi = self.heartbeats.age_s(now), self.heartbeats.phi(now)
        silent = self.usable and age is not None and age > SILENT_S
        return {
            "rank": self.rank,
            "engine": self.engine_id,
            "pid": self.process.pid if self.process else None,
            "host": self.host,
            "state": "suspect" if silent else self.state,
            "step": self.step,
            "heartbeat_age_s": round(age, 3) if age is not None and self.alive else None,
            "phi": round(phi, 2) if phi is not None and self.alive else None,
            "problem": self.problem,
        }

    def record(self) -> dict[str, Any]:
        """What a successor needs to take this process over."""
        return {
            "key": self.key, "rank": self.rank, "intended": self.intended, "engine_id": self.engine_id,
            "pid": self.process.pid if self.process else None,
            "pid_started": self.process.started if self.process else None,
            "state": self.state, "host": self.host, "num_gpus": self.num_gpus, "gpu": self.gpu, "torch": self.torch,
            "problem": self.problem, "loaded": self.loaded,
            "joined_step": self.joined_step, "joined_run": self.joined_run,
        }
