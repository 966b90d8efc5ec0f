"""What an injected fault does to this rank's process."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftnb.rank.orders import Fault

# In which part of a step each kind strikes: in the user's code, before the gradients are summed, after the update.
POINTS = {
    "kill": "forward", "exit": "forward", "exception": "forward", "hang": "forward", "stall": "forward",
    "gil": "forward", "oom": "forward", "slow": "forward", "partition": "forward",
    "nan": "gradients", "deadlock": "gradients", "bitflip": "updated",
}  # fmt: skip


def strike(fault: Fault, rank: int | None, step: int) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
