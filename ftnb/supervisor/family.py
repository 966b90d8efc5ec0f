"""The supervisor's own family of processes, as `/proc` shows it: children, adopted ones, and their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from pathlib import Path

from ftnb.wire import proc

log = logging.getLogger("ftnb.engines")

_PR_SET_CHILD_SUBREAPER = 36


def is_nanny(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"ipyparallel.engine.nanny" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def children() -> list[int]:
    """Pids of this process's children, adopted ones included; cheap, since it is asked in every recovery."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def descendants() -> list[proc.ProcessId]:
    found, waiting = [], children()
    while waiting:
        pid = waiting.pop()
        if (process := proc.identify(pid)) and process.is_alive():
            found.append(process)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (prctl PR_SET_CHILD_SUBREAPER, Linux).

    Without it, what a killed rank had started would move to init and out of sight.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        log.warning("this system cannot adopt orphans; what a killed rank had started is found by its session alone")
