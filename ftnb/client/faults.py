"""The kinds of faults that can be injected, and the checks of a wish for one."""

from __future__ import annotations

from typing import Any

from ftnb.client.options import Option, did_you_mean, refuse_unknown
from ftnb.errors import UsageError

FAULTS = {"kill": "SIGKILL: the rank's process is gone at once"}

# Designed, but not built yet: said so, instead of "unknown kind".
LATER_FAULTS = {
    "exit": "a clean exit of the rank's process",
    "exception": "an exception raised inside the step",
    "hang": "SIGSTOP: everything in the process stops",
    "stall": "the training thread is stuck, heartbeats go on",
    "deadlock": "one rank skips a collective",
    "gil": "a native call that never lets go of the interpreter",
    "slow": "a straggler, slower by a factor",
    "nan": "NaN gradients",
    "bitflip": "silent corruption of a weight",
    "oom": "memory grows until the process is killed",
    "partition": "the rank's network is cut, the process lives",
    "kill-in-checkpoint": "SIGKILL while a checkpoint is written",
    "corrupt-checkpoint": "a damaged checkpoint",
    "disk-full": "no space left for a checkpoint",
}

FAULT_OPTIONS = (
    Option("rank", int, None, "the rank it happens to (one is picked when left out)", minimum=0),
    Option("at_step", int, None, "inside this step (steps count from 1)", minimum=1),
    Option("after_s", float, None, "after this many seconds", flag="--after", minimum=0),
)
LATER_FAULT_KEYWORDS = ("duration_s", "factor")


def check_fault(
    kind: str, rank: int | None, at_step: int | None, after_s: float | None, later: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an `inject` request."""
    if kind in LATER_FAULTS:
        raise UsageError(f"The fault {kind!r} is not available yet. Available: {', '.join(FAULTS)}.")
    if kind not in FAULTS:
        hint = did_you_mean(kind, (*FAULTS, *LATER_FAULTS))
        raise UsageError(f"There is no fault {kind!r}.{hint} Available: {', '.join(FAULTS)}.")
    for keyword in later:
        if keyword in LATER_FAULT_KEYWORDS:
            raise UsageError(f"The option {keyword} is not available yet.")
    refuse_unknown("inject", later, [option.keyword for option in FAULT_OPTIONS])
    given = {"rank": rank, "at_step": at_step, "after_s": after_s}
    fault = {option.keyword: option.checked(given[option.keyword]) for option in FAULT_OPTIONS}
    if at_step is not None and after_s is not None:
        raise UsageError("Give either at_step or after_s (--at-step or --after), not both.")
    return {"kind": kind, **fault}
