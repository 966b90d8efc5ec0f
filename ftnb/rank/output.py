"""What the training thread prints goes to the run's log, not into whichever notebook cell ran last.

Everything printed elsewhere in the engine (by %%px, say) goes where it always went.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO


class ThreadOutput:
    """Stands in for sys.stdout or sys.stderr: lines written by one thread are handed to `sink`."""

    def __init__(self, wrapped: TextIO, thread_id: int, sink: Callable[[str], None]) -> None:
        self._wrapped, self._thread_id, self._sink = wrapped, thread_id, sink
        self._owner_pid = os.getpid()
        self._line = ""

    def write(self, text: str) -> int:
        if os.getpid() != self._owner_pid:  # a forked DataLoader worker: its own descriptors are safe to use
            os.write(1, text.encode(errors="replace"))
        elif threading.get_ident() == self._thread_id:
            *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
            for line in lines:
                self._sink(line)
        else:
            return self._wrapped.write(text)
        return len(text)

    def flush(self) -> None:
        if os.getpid() == self._owner_pid:
            if threading.get_ident() != self._thread_id:
                self._wrapped.flush()
            elif self._line:
                self._sink(self._line)
                self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def capture(sink: Callable[[str], None]) -> None:
    """From now on, hand what this thread prints to `sink`, line by line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, ThreadOutput):
            setattr(sys, name, ThreadOutput(stream, threading.get_ident(), sink))
