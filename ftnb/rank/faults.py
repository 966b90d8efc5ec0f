"""What an injected fault does to this rank. Everything here is the real thing, and happens in the training thread.

What concerns a step's numbers (slow, nan, deadlock, bitflip) is done where they are, in `loop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ftnb.rank import cut
from ftnb.wire import cgroups

if TYPE_CHECKING:
    from ftnb.rank.orders import Fault

# In which part of a step each kind strikes: in the user's code, before the gradients are summed, after the update.
POINTS = {
    "kill": "forward", "exit": "forward", "exception": "forward", "hang": "forward", "stall": "forward",
    "gil": "forward", "oom": "forward", "slow": "forward", "partition": "forward",
    "nan": "gradients", "deadlock": "gradients", "bitflip": "updated",
}  # fmt: skip

# Memory that runs out: so much of what is free, in so many blocks, and slowly enough to be seen growing.
OOM_MOST_BYTES = 512 << 20
OOM_SHARE = 4
OOM_BLOCKS = 16
OOM_TAKES_S = 0.5
_LONGEST_MS = 2**31 - 1  # that poll(2) takes


class InjectedFault(RuntimeError):
    """Raised for `%ft_inject exception`, as if the user's code had raised it."""


def strike(fault: Fault, rank: int | None, step: int) -> None:
    """Let the fault happen to this process. Training thread (a partition: any thread)."""
    kind, duration_s = fault.kind, fault.duration_s
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
    elif kind == "exception":
        raise InjectedFault("injected by ftnb")
    elif kind == "hang":
        # To this thread, which then is sure to be stopped before it goes on; the others stop with it.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif kind == "stall":
        threading.Event().wait(duration_s)
    elif kind == "gil":
        _hold_interpreter(duration_s)
    elif kind == "oom":
        _use_memory_up(step)
    elif kind == "partition":
        cut.of_this_process.start(duration_s)
    else:
        raise ValueError(f"fault {kind!r} is not one that strikes a process")


def _hold_interpreter(duration_s: float | None) -> None:
    """Sleep in a native call that keeps the interpreter lock: no other thread runs a line of Python."""
    poll = ctypes.PyDLL(None).poll
    until = None if duration_s is None else time.monotonic() + duration_s
    while True:  # a signal ends the call early
        left_ms = _LONGEST_MS if until is None else round((until - time.monotonic()) * 1000)
        if left_ms <= 0:
            return
        poll(None, 0, min(left_ms, _LONGEST_MS))


def _use_memory_up(step: int) -> None:
    """Take memory until the bound is reached, and end as the kernel ends a process when there is none left.

    The bound keeps the machine, and the other ranks, out of it. Should the count here be wrong, the limit on
    the address space holds.
    """
    bound = min(OOM_MOST_BYTES, cgroups.memory()[1] // OOM_SHARE)
    _limit_address_space(bound + bound // 4)
    started, taken = time.monotonic(), []
    with contextlib.suppress(MemoryError):
        for number in range(1, OOM_BLOCKS + 1):
            taken.append(b"\1" * (bound // OOM_BLOCKS))  # written to, or it would be memory on paper only
            if number % (OOM_BLOCKS // 2) == 0:
                megabytes = number * (bound // OOM_BLOCKS) >> 20
                print(f"step {step}: memory grows (injected by ftnb), {megabytes} MB more by now", flush=True)
            time.sleep(max(0.0, started + OOM_TAKES_S * number / OOM_BLOCKS - time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_address_space(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [pages * resource.getpagesize() + more]
    limits += [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
