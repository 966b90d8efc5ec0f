"""Processes that are ready for a slot, the number of slots, and a new supervisor that finds the slots as they are."""

from __future__ import annotations

from dataclasses import replace

from ftnb.core.planning.basics import fill, regroup, stands, unfence, vacate
from ftnb.core.planning.generations import complete
from ftnb.core.planning.holds import want_change
from ftnb.core.planning.state import State
from ftnb.core.protocol import (
    Action,
    Adopted,
    Emit,
    Kill,
    Release,
    Resized,
    SendDrop,
    SendRelease,
    SpareLost,
    SpareReady,
    Standing,
)


def spare_ready(now: float, state: State, event: SpareReady) -> tuple[State, list[Action]]:
    state, actions = fill(replace(state, spares=state.spares + 1), first=event.rank)
    state, more = _go_on(now, state)
    return state, actions + more


def spare_lost(now: float, state: State, event: SpareLost) -> tuple[State, list[Action]]:
    return replace(state, spares=max(0, state.spares - 1)), []


def resized(now: float, state: State, event: Resized) -> tuple[State, list[Action]]:
    """Slots that are missing become vacant, those beyond the new number leave at the next step boundary."""
    slots = frozenset(range(event.num_ranks))
    given_up = state.joiners - slots  # have not entered yet, so they can go at once
    state = replace(
        state,
        wanted=event.num_ranks,
        vacant=slots - state.has_run,
        joiners=state.joiners & slots,
        leaving=state.alive - slots,
    )
    actions: list[Action] = []
    if given_up:
        actions += [SendDrop(tuple(sorted(given_up))), Release(tuple(sorted(given_up)))]
    state, filled = fill(state)
    state, more = _go_on(now, state)
    return state, [*actions, *filled, *more]


def _go_on(now: float, state: State) -> tuple[State, list[Action]]:
    """Somebody has got a slot, or other slots are to be filled."""
    return complete(now, state) if state.waits else want_change(state)


def adopted(now: float, state: State, event: Adopted) -> tuple[State, list[Action]]:
    """A new supervisor: go on as if nothing had happened where that is certain, else begin a new generation."""
    state = replace(state, spares=0)  # those that are there are told anew
    # Nobody has taken the slot: the supervisor before died first. (Or who was left out of it still lives.)
    missing = {
        rank for rank in state.joiners
        if rank not in event.standing or _was_there_before(event.standing[rank], state.generation + 1)
    }  # fmt: skip
    # The same where the slot's new process was to enter at once: who stands there is the one that had to go.
    former = frozenset(
        rank for rank, first in state.entered.items()
        if rank in event.standing and _was_there_before(event.standing[rank], first)
    )  # fmt: skip
    if state.restart or former < state.alive:  # else only these would be left
        missing |= former
        state = replace(state, alive=state.alive - former, newcomers=state.newcomers - former)
    state = vacate(replace(state, joiners=state.joiners - missing), missing, refill=True)
    state = unfence(state, missing, silently=True)
    actions: list[Action] = [Kill(rank, "its slot is to be filled anew") for rank in sorted(missing)]
    standing = [event.standing[rank] for rank in state.members if rank in event.standing]
    # They could not tell it to anybody; a commit needs all of them. Whoever waits may not have gone back yet.
    if state.phase == "forming" and any(
        s.generation == state.generation
        and s.committed >= state.first_step
        and (state.going_back is None or s.stage in ("training", "held", "finished"))
        for s in standing
    ):
        state, stood = stands(replace(state, early_commits=()))
        actions += stood
    stages = ("held",) if state.paused else ("training", "finished")
    if (
        state.phase == "training"
        and (state.hold_why is None or state.paused)
        and not state.left_out
        and state.raised_since is None
        and state.unexplained_since is None
        and all(s.generation == state.generation and s.stage in stages for s in standing)
    ):
        # They may still be told to stop at a step where nobody expects them any more.
        return state, [*actions, *([] if state.paused else [SendRelease(state.members)])]
    if not event.standing:
        return state, actions  # their deaths will be told
    reason = f"Generation {state.generation + 1}: all ranks connect again, under the new supervisor."
    state, more = regroup(state)
    return state, [*actions, Emit("regroup_started", reason), *more]


def _was_there_before(standing: Standing, generation: int) -> bool:
    """Whether it has been in a generation before this one, or was to be: who joins later begins without a state."""
    return standing.generation < generation and (standing.generation > 0 or standing.committed >= 0)
