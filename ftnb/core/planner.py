"""What a run does next when ranks get ready, train, raise, die or are told to stop: a pure state machine.

`step(now, state, event)` returns the next state and the actions that the supervisor carries out. It knows
no sockets, processes or torch, and the time is passed in, so that thousands of failure sequences can be
tried in a second (tests/core/test_planner.py). The handlers are in ftnb/core/planning/.

The life of one generation:

    SendRegroup ──▶ every member tears its old group down and answers RankReady(committed step, what broke)
        │           (the lost are fenced meanwhile)
        ▼
    SendGo(members, first step, who copies its state to whom) ──▶ RankFormed from every member ──▶ training

Training in data parallel needs every member's input in every all-reduce, so the survivors of a failure are
at most one step apart: the most advanced state wins, and only the step in flight is tried again.

That is no way out where the most advanced state is not to be trusted (the replicas differ, the gradient was not
finite), or not wanted (recovery "restart"). Then all go back to the newest *anchor*: a copy of an earlier state that
ranks keep in memory. SendGo names it, and the state is shared with those that lack it.

Growing, shrinking and replacing use the same path. A process that has run the cell is *ready*; when a slot is
*vacant*, it takes the slot and enters with the next generation, which copies the state to it. If a failure calls
for a new generation anyway, that is the one; else the members stop at a step boundary first, and no work is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftnb.core.planning import failures, generations, holds, losses, slots
from ftnb.core.planning.basics import end, last_actions
from ftnb.core.planning.state import (
    MAX_FRUITLESS_REGROUPS,
    RAISE_GRACE_S,
    STOP_PATIENCE_S,
    UNEXPLAINED_S,
    GoingBack,
    Incident,
    State,
    from_json,
    to_json,
)
from ftnb.core.protocol import (
    Action,
    Adopted,
    CloseGeneration,
    Emit,
    End,
    Failure,
    GiveUp,
    HoldAnswered,
    HoldWanted,
    Kill,
    NobodyComes,
    NoProgress,
    OpenGeneration,
    RankCondemned,
    RankDied,
    RankFenced,
    RankFinished,
    RankFormed,
    RankHeld,
    RankReady,
    Release,
    Resized,
    SendDrop,
    SendGo,
    SendHold,
    SendRegroup,
    SendRelease,
    SpareLost,
    SpareReady,
    Standing,
    Started,
    StepCommitted,
    StepFailed,
    TakeSpare,
    Tick,
    Unpause,
)

# With the words of the protocol, for whoever speaks it.
__all__ = [
    "MAX_FRUITLESS_REGROUPS", "RAISE_GRACE_S", "STOP_PATIENCE_S", "UNEXPLAINED_S", "Action", "Adopted",
    "CloseGeneration", "Emit", "End", "Failure", "GiveUp", "GoingBack", "HoldAnswered", "HoldWanted",
    "Incident", "Kill", "NoProgress", "NobodyComes", "OpenGeneration", "RankCondemned", "RankDied",
    "RankFenced", "RankFinished", "RankFormed", "RankHeld", "RankReady", "Release", "Resized", "SendDrop",
    "SendGo", "SendHold", "SendRegroup", "SendRelease", "SpareLost", "SpareReady", "Standing", "Started",
    "State", "StepCommitted", "StepFailed", "TakeSpare", "Tick", "Unpause", "from_json", "new", "step",
    "to_json",
]  # fmt: skip


def new(total_steps: int, refill: bool = False, restart: bool = False, on_nan: str = "stop") -> State:
    """`refill`: lost ranks are replaced. `restart`: and nothing goes on before they are; then all go back.
    `on_nan`: "stop" or "rollback"."""
    return State(total_steps=total_steps, refill=refill or restart, restart=restart, on_nan=on_nan)


def step(now: float, state: State, event: Any) -> tuple[State, list[Action]]:
    """The next state and what to do. Events that come too late, from an old generation, change nothing."""
    if state.phase == "ended":
        # The supervisor before may have died before it could do the last things.
        return state, last_actions(state) if isinstance(event, Adopted) else []
    return _HANDLERS[type(event)](now, state, event)


def _give_up(now: float, state: State, event: GiveUp) -> tuple[State, list[Action]]:
    return end(state, [], event.outcome, event.reason)


_HANDLERS: dict[type, Callable[[float, State, Any], tuple[State, list[Action]]]] = {
    GiveUp: _give_up,
    Started: generations.started,
    RankReady: generations.rank_ready,
    RankFormed: generations.rank_formed,
    StepCommitted: generations.step_committed,
    RankFinished: generations.rank_finished,
    RankDied: losses.rank_died,
    RankCondemned: losses.rank_condemned,
    RankFenced: losses.rank_fenced,
    NobodyComes: losses.nobody_comes,
    StepFailed: failures.step_failed,
    NoProgress: failures.no_progress,
    Tick: failures.tick,
    HoldWanted: holds.hold_wanted,
    HoldAnswered: holds.hold_answered,
    RankHeld: holds.rank_held,
    Unpause: holds.unpause,
    SpareReady: slots.spare_ready,
    SpareLost: slots.spare_lost,
    Resized: slots.resized,
    Adopted: slots.adopted,
}
