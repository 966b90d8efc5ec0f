"""Why a rank left a step: the user's code, a peer that did not answer, or what all ranks have found together."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from ftnb.errors import CheckError
from ftnb.rank import cell
from ftnb.rank.health import NotFinite
from ftnb.rank.replicas import ReplicasDiffer

# What torch 2.13 says when a Gloo or NCCL peer is gone; anything else that comes up in a step is the user's.
_COLLECTIVE_SIGNS = (
    "gloo", "nccl", "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "connectfullmesh", "timed out waiting", "socket", "process group",
)
# DDP's forward (buffers) and backward (gradients), torch.distributed itself, and ftnb's own calls of it.
_COLLECTIVE_FILES = (
    *(os.path.join(os.path.dirname(torch.__file__), *part) for part in
      (("autograd", ""), ("distributed", ""), ("nn", "parallel", "distributed.py"))),
    os.path.join(os.path.dirname(os.path.abspath(__file__)), ""),
)  # fmt: skip


def explain(error: BaseException, step: int, group_aborted: bool) -> dict[str, Any]:
    """The failure as plain data (`protocol.Failure`): what the supervisor decides on. `step`: where it came up."""
    if isinstance(error, (NotFinite, ReplicasDiffer)):
        return {**error.failure, "time": time.time()}
    text = cell.printable(error).lower()
    collective = aborted = False
    if isinstance(error, RuntimeError) and _talks_to_peers(error):
        collective = any(sign in text for sign in _COLLECTIVE_SIGNS)
        aborted = group_aborted
    details = cell.describe_error(error, step)
    if isinstance(error, CheckError):
        details["check"] = True
    return {
        "cause": "collective" if collective or aborted else "user",
        "step": step,
        "time": details["time"],
        "error": details,
    }


def _talks_to_peers(error: BaseException) -> bool:
    """Whether it was raised where collectives run: elsewhere it is the user's own error, whatever its words."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_filename.startswith(_COLLECTIVE_FILES)
