"""Why a process of the cluster has ended, in words: from its exit status, its memory, and what it printed last."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from ftnb.wire import memory, proc

# What ipyparallel's engine and its nanny write whenever they start and end.
_CHATTER = re.compile(r"\d{4}-\d\d-\d\d [\d:.,]+ \[(IPEngine|KernelNanny)")
LINES_KEPT, CHARS_KEPT = 5, 300
# A rank whose memory has grown by so much within its last seconds has probably been killed for it.
GROWTH_WINDOW_S, GROWTH_FACTOR, GROWTH_MB = 10.0, 1.5, 100.0


class OomKills:
    """The kernel's count of processes that it killed because memory ran out, looked at now and then."""

    def __init__(self) -> None:
        self._seen = self._before = memory.oom_kills()

    def look(self) -> None:
        """Once a second or so: a kill counts for deaths within about that time."""
        self._before, self._seen = self._seen, memory.oom_kills()

    def rise(self) -> tuple[int, int] | None:
        """(before, now) if somebody has been killed for memory since the look before the last one."""
        now = memory.oom_kills()
        return None if now is None or self._before is None or now <= self._before else (self._before, now)


def growth(samples: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """(MB before, MB at last, seconds between) if it has grown suspiciously; `samples`: (time, MB), oldest first."""
    if not samples:
        return None
    end_s, last_mb = samples[-1]
    window = [(mb, when_s) for when_s, mb in samples if end_s - when_s <= GROWTH_WINDOW_S]
    least_mb, when_s = min(window)
    if last_mb - least_mb <= GROWTH_MB or last_mb <= GROWTH_FACTOR * least_mb:
        return None
    return least_mb, last_mb, end_s - when_s


def describe(
    status: int | None, samples: Sequence[tuple[float, float]], rise: tuple[int, int] | None
) -> tuple[str, str]:
    """(failure, words) as `proc.describe_exit`, with what its memory and the kernel's count say of a SIGKILL."""
    failure, words = proc.describe_exit(status)
    if status != -signal.SIGKILL:
        return failure, words
    grown = growth(samples)
    memory_words = ""
    if grown is not None:
        memory_words = f"its memory had grown from {grown[0]:.0f} to {grown[1]:.0f} MB in its last {grown[2]:.0f} s"
    if rise is not None:
        count = f"its count of such kills has risen from {rise[0]} to {rise[1]}"
        words = f"it was killed (SIGKILL), probably by the kernel because memory ran out: {count}"
        words += f", and {memory_words}" if memory_words else ""
    elif memory_words:
        words += f"; {memory_words}"
    return failure, words


def last_lines(text: str, but_not: Iterable[str] = ()) -> list[str]:
    """The last lines that are not empty, each cut to a readable length."""
    known = set(but_not)
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _CHATTER.match(line)]
    lines = [line for line in lines if line not in known]
    return [line[:CHARS_KEPT] for line in lines[-LINES_KEPT:]]
