"""Faults that concern the process alone, done by the training thread to its own process."""

from __future__ import annotations

import os
import signal

from ftnb.rank.orders import Fault


def strike(fault: Fault, rank: int, step: int) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
