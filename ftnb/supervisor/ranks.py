"""The table of ranks: one slot per rank, whoever fills it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftnb.core.detector import Heartbeats
from ftnb.wire import proc
from ftnb.wire.ring import RingReader

BEAT_S = 0.1
# A rank that has not been heard of for this long is shown as suspect (what follows from it: a later version).
SILENT_S = 2.0


@dataclass
class Slot:
    """What the supervisor knows of one rank. `state` as in the design: starting, idle, training, …"""

    rank: int
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
    answered: float = 0.0  # monotonic time of the last "beat_seen" sent to it
    last_sign: float = 0.0  # wall clock of its last message of any kind
    fault_time: float | None = None  # when an injected fault took effect
    problem: str | None = None  # why it is failed

    @property
    def alive(self) -> bool:
        return self.state in ("starting", "idle", "training", "suspect")

    @property
    def usable(self) -> bool:
        return self.state in ("idle", "training", "suspect")

    def status(self, now: float) -> dict[str, Any]:
        age, phi = self.heartbeats.age_s(now), self.heartbeats.phi(now)
        silent = self.usable and age is not None and age > SILENT_S
        return {
            "rank": self.rank,
            "engine": self.rank,
            "pid": self.process.pid if self.process else None,
            "host": self.host,
            "state": "suspect" if silent else self.state,
            "step": self.step,
            "heartbeat_age_s": round(age, 3) if age is not None and self.alive else None,
            "phi": round(phi, 2) if phi is not None and self.alive else None,
            "problem": self.problem,
        }
