"""What the supervisor knows of one engine process: a rank that fills a slot, or one of the pool that has none yet."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftnb.core.detector import Heartbeats
from ftnb.supervisor.lastwords import LINES_KEPT
from ftnb.supervisor.links import Links
from ftnb.wire import proc
from ftnb.wire.letters import Received, Sent
from ftnb.wire.ring import RingReader

BEAT_S = 0.1
# The connection of a rank is given up when it has not answered for about so long: no message takes longer on its way.
LINK_DELAY_S = 0.4
# Shown as suspect: whose connection is gone; of whose connection nothing is known, with a φ like this; and, whatever
# its connection says, who has been silent for so long. What follows from it is decided by `core/watch`.
SUSPECT_PHI, SILENT_S = 5.0, 2.0
MEMORY_EVERY_S, MEMORY_KEPT = 1.0, 12

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
    place: str | None = None  # what it does in a run, and in which step: fetch, forward, collective, …
    place_step: int | None = None
    place_since: float = 0.0  # monotonic time
    moved: float = 0.0  # monotonic time of its last commit, which may be newer than its last heartbeat
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(BEAT_S, longest_delay_s=LINK_DELAY_S))
    memory: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY_KEPT))  # (time, MB)
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))  # its last lines
    last_output: list[str] = field(default_factory=list)  # the same and its process's own, when it has ended
    sent: Sent = field(default_factory=lambda: Sent("orders"))
    received: dict[str, Received] = field(default_factory=lambda: {s: Received() for s in ("agent", "work")})
    ring: RingReader | None = None  # its reports of steps, in shared memory
    unfreed: deque[tuple[int, int | None]] = field(default_factory=deque)  # (end of a report, the step it is about)
    answered: float = 0.0  # monotonic time of the last "beat_seen" sent to it
    last_sign: float = 0.0  # wall clock of its last message of any kind
    started: float = 0.0  # monotonic time
    fault: str | None = None  # the kind of an injected fault that is to end it (or has)
    fault_time: float | None = None  # when that took effect
    problem: str | None = None  # why it is failed
    cut_off: bool = False  # it does not end although it was killed: nothing that it says is heard
    loaded: str | None = None  # of the pool: the run whose cell it has run ("?name" while it does)
    joined_step: int | None = None  # the first step it shall do as a replacement, until it has proved itself
    joined_run: str | None = None

    @property
    def alive(self) -> bool:
        return self.state in _LIVING

    @property
    def usable(self) -> bool:
        return self.alive and self.state != "starting"

    @property
    def number(self) -> int:
        """Of this process in its cluster, never used twice."""
        return int(self.key.removeprefix("engine"))

    def beat(self, now: float, message: dict[str, Any]) -> None:
        """A heartbeat has come."""
        self.heartbeats.beat(now, message.get("n"), message.get("at"))
        self.phase = message["phase"]
        self.step = message["step"] if message["step"] is not None else self.step
        self.place, self.place_step = message.get("place"), message.get("place_step")
        self.place_since = now - (message.get("place_s") or 0.0)
        if rss_mb := message.get("rss_mb"):
            # One a second, and always the newest.
            if len(self.memory) > 1 and now - self.memory[-2][0] < MEMORY_EVERY_S:
                self.memory.pop()
            self.memory.append((now, rss_mb))

    def went_on(self, now: float, place: str, step: int) -> None:
        """It was told to, or has said so otherwise than by a heartbeat. Should it be silent from here on, it must not
        count as being where no time is too long (held, say)."""
        self.place, self.place_step, self.place_since = place, step, now

    def stood_s(self, now: float) -> float:
        """How long it has been where its newest heartbeat says. A commit since then proves that it has moved."""
        return max(0.0, now - max(self.place_since, self.moved))

    def is_elsewhere(self, answer: Mapping[str, Any] | None) -> bool:
        """Whether what it has just answered (see `stacks`) is not where its newest heartbeat says."""
        return answer is not None and (answer.get("place"), answer.get("step")) != (self.place, self.place_step)

    @classmethod
    def restored(cls, record: dict[str, Any], directory: Path) -> Slot:
        """As an earlier supervisor had it."""
        known = ("rank", "intended", "engine_id", "state", "host", "num_gpus", "gpu", "torch", "problem", "loaded",
                 "joined_step", "joined_run")  # fmt: skip
        slot = cls(record["key"], started=time.monotonic(), **{name: record[name] for name in known})
        if record["pid"] is not None:
            slot.process = proc.ProcessId(record["pid"], record["pid_started"])
            slot.heartbeats.beat(slot.started)  # from here on its silence counts: it may be stopped since long
        # What it has told before is settled by asking it where it stands.
        slot.received = {stream: Received(None) for stream in slot.received}
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

    def is_suspect(self, now: float, links: Links) -> bool:
        if not self.usable or self.heartbeats.last is None:
            return False
        linked, silent_s = links.is_up(self.agent), self.heartbeats.age_s(now) or 0.0
        unlikely = linked is None and (self.heartbeats.phi(now) or 0.0) >= SUSPECT_PHI
        return linked is False or unlikely or silent_s > SILENT_S

    def status(self, now: float, links: Links, step_s: float | None = None) -> dict[str, Any]:
        """`step_s`: what a step of the run takes it, without waiting for others."""
        age, phi = self.heartbeats.age_s(now), self.heartbeats.phi(now)
        return {
            "rank": self.rank,
            "engine": self.engine_id,
            "pid": self.process.pid if self.process else None,
            "host": self.host,
            "state": "suspect" if self.is_suspect(now, links) else self.state,
            "step": self.step,
            "heartbeat_age_s": round(age, 3) if age is not None and self.alive else None,
            "phi": round(phi, 2) if phi is not None and self.alive else None,
            "place": self.place if self.alive else None,
            "step_s": round(step_s, 6) if step_s is not None and self.alive else None,
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
