"""The events a run writes, one JSON object a line in events.jsonl."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

KINDS = frozenset({
    "run_started", "run_finished", "run_stopped", "run_failed", "supervisor_started",
    "fault_injected", "fault_not_fired",
    "rank_suspected", "rank_failed", "rank_fenced", "rank_joined", "spare_lost",
    "regroup_started", "regrouped", "recovered", "rolled_back",
    "straggler_detected", "divergence_detected", "nan_detected",
    "checkpoint_started", "checkpoint_saved", "checkpoint_failed", "checkpoint_skipped",
    "checkpoint_restored", "paused", "unpaused",
})  # fmt: skip


def make_event(
    kind: str,
    time: float,
    generation: int | None,
    *,
    rank: int | None = None,
    step: int | None = None,
    reason: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """An event ready to be written: `time` in Unix seconds, fields that are None are left out."""
    if kind not in KINDS:
        near = get_close_matches(kind, sorted(KINDS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(sorted(KINDS))}"
        raise ValueError(f"unknown event kind {kind!r}; {hint}")
    event = {"time": float(time), "kind": kind, "generation": generation, "rank": rank, "step": step}
    event |= {"reason": reason, **fields}
    return {key: value for key, value in event.items() if value is not None}
