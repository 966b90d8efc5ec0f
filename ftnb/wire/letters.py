"""Messages that must arrive: numbered, kept until the other side has heard them, and sent again when they are lost.

ZeroMQ loses what is under way when a connection breaks, and a connection to a rank counts as broken after less than
half a second without a sign of life. A rank that was stopped for a moment is back soon, but an order or an answer may
be missing by then, and everybody would wait for ever. So both sides say in each heartbeat how far they have come.

Each stream is heard in the order of its numbers: what comes out of turn, or twice, is not heard.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

# Lost is what has not been heard after so long: heartbeats and messages take different ways, so the one that tells of
# a message may come before it.
AGAIN_S = 0.3
# What is large takes its time. Sent again before it can have arrived, it would only be later, and fill the memory.
BYTES_PER_S = 5e6
NUM_KEPT = 64
# What needs no number: asked for or told again anyway, or of use only at once.
PASSING = frozenset(
    ("hello", "beat", "beat_seen", "adopt", "again", "store", "stacks", "names", "give_names", "agent_error")
)


class Sent:
    """One stream of messages, at the side that sends them; from several threads."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.last = 0
        self._kept: deque[tuple[int, dict[str, Any], float]] = deque(maxlen=NUM_KEPT)
        self._lock = threading.Lock()

    def numbered(self, message: dict[str, Any], now: float) -> dict[str, Any]:
        """The message as it is to be sent."""
        if message["op"] in PASSING:
            return message
        with self._lock:
            self.last += 1
            self._kept.append((self.last, message, now))
            return {**message, "letter": [self.stream, self.last, self.last - 1]}

    @property
    def keeps_any(self) -> bool:
        return bool(self._kept)

    def arrived(self, heard: int) -> None:
        """Up to this number nothing has to be kept."""
        with self._lock:
            while self._kept and self._kept[0][0] <= heard:
                self._kept.popleft()

    def again(self, heard: int, now: float | None = None) -> list[dict[str, Any]]:
        """What has to be sent again, since nothing after number `heard` was heard.

        With `now` only if it was sent long enough ago; else it may be on its way.
        """
        self.arrived(heard)
        with self._lock:
            if not self._kept or (now is not None and now - self._kept[0][2] < self._patience_s()):
                return []
            again, before = [], heard
            for number, message, _ in self._kept:
                again.append({**message, "letter": [self.stream, number, before]})
                before = number
            if now is not None:
                self._kept = deque([(number, message, now) for number, message, _ in self._kept], maxlen=NUM_KEPT)
            return again

    def _patience_s(self) -> float:
        num_bytes = sum(len(value) for _, message, _ in self._kept for value in message.values() if _is_raw(value))
        return AGAIN_S + num_bytes / BYTES_PER_S


def _is_raw(value: Any) -> bool:
    return isinstance(value, bytes)


class Received:
    """One stream, at the side that gets it. `heard`: up to which number; None: whatever comes first is the first."""

    def __init__(self, heard: int | None = 0) -> None:
        self.heard = heard
        self._lacking: tuple[int, float] | None = None  # (what was heard then, since when)

    def is_next(self, message: Mapping[str, Any]) -> bool:
        """Whether it is to be heard now."""
        if "letter" not in message:
            return True
        _, number, before = message["letter"]
        if self.heard is not None and not before <= self.heard < number:
            return False
        self.heard = number
        return True

    def lacks(self, told: int, now: float) -> bool:
        """Whether it has to be asked for what is missing; the other side says that it has sent up to `told`."""
        if self.heard is None or told <= self.heard:
            self._lacking = None
        elif self._lacking is None or self._lacking[0] != self.heard:
            self._lacking = self.heard, now
        elif now - self._lacking[1] >= AGAIN_S:
            self._lacking = self.heard, now
            return True
        return False
