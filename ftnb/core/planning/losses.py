"""Ranks that are lost: they died, or they live and the others cannot go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ftnb.core.planning import words
from ftnb.core.planning.basics import (
    end,
    fill,
    lose,
    one_less,
    open_incident,
    regroup,
    restart_after,
    restart_words,
    vacate,
)
from ftnb.core.planning.failures import same_step_again
from ftnb.core.planning.generations import maybe_go
from ftnb.core.planning.holds import stop_instead_of_restart
from ftnb.core.planning.state import State
from ftnb.core.protocol import Action, Emit, Kill, NobodyComes, RankCondemned, RankDied, RankFenced


@dataclass(frozen=True)
class _Loss:
    rank: int
    failure: str
    what: str  # goes on "Rank 2 …"
    last: str  # goes on "All ranks are lost; the last one …"
    gone: str  # goes on "rank 2 …", within a sentence
    kill: str
    fault_time: float
    crash: str | None = None  # how native code has ended it
    condemned: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


def rank_died(now: float, state: State, event: RankDied) -> tuple[State, list[Action]]:
    loss = _Loss(
        event.rank, event.failure, f"is gone: {event.reason}", f"was rank {event.rank}: {event.reason}",
        f"is gone ({event.reason})", "end whatever it had started", event.fault_time,
        event.reason if event.failure == "crash" else None,
    )  # fmt: skip
    return _lost(now, state, loss)


def rank_condemned(now: float, state: State, event: RankCondemned) -> tuple[State, list[Action]]:
    reason = event.reason.rstrip(".")
    loss = _Loss(
        event.rank, event.failure, reason, f"was rank {event.rank}, which {reason}", f"is given up (it {reason})",
        f"it {reason}", event.fault_time, None, True, event.fields,
    )  # fmt: skip
    return _lost(now, state, loss)


def _lost(now: float, state: State, loss: _Loss) -> tuple[State, list[Action]]:
    rank = loss.rank
    if rank not in state.has_run:
        return state, []
    was_left_out, had_not_entered = rank in state.left_out, rank in state.joiners
    had_no_state = rank in state.newcomers
    state = lose(state, {rank}, silently=was_left_out)
    kill: list[Action] = [Kill(rank, loss.kill)]
    if had_not_entered:
        reason = f"The process that was to take the place of rank {rank} {loss.what}."
        # Also where lost ranks are not replaced: this slot was to be filled, and still is.
        state, filled = fill(vacate(state, {rank}, refill=True))
        return state, [Emit("spare_lost", reason, rank), *kill, *filled]
    if was_left_out:
        state, filled = fill(vacate(state, {rank}, state.refill))
        return state, [*kill, *filled]  # already known as failed, and no member of the group
    at_step = state.committed + 1  # the step in flight, or the one that was to be tried again
    reason, fields = f"Rank {rank} {loss.what}.", {"failure": loss.failure}
    actions: list[Action] = []
    if loss.condemned:
        actions.append(Emit("rank_suspected", reason, rank, at_step, {**loss.fields, **fields}))
        fields = {**{name: value for name, value in loss.fields.items() if name != "stands"}, **fields}
    actions += [Emit("rank_failed", reason, rank, at_step, fields), *kill]
    state = open_incident(now, state, (rank,), loss.fault_time)
    if not state.alive and not state.restart:
        reason = f"All ranks are lost; the last one {loss.last}."
        if state.left_out:
            # An exception may have hit them in the middle of an update: their weights cannot be trusted.
            reason = (
                f"No rank is left to go on with: rank {rank} {loss.gone}, and before that "
                f"{words.ranks(state.left_out)} raised an exception"
                f"{f' in step {state.failed_step[0]}' if state.failed_step else ''}."
            )
        return end(state, actions, "failed", reason)
    if loss.crash and not had_no_state:
        # Native code that crashes on the same data takes one rank after the other: stop before all are gone.
        state, ended = same_step_again(state, actions, state.committed + 1, (rank,), loss.crash, None)
        if ended:
            return state, actions
    survivors = len(state.alive)
    state = restart_after(state, {rank})
    state, filled = fill(vacate(state, {rank}, state.refill or had_no_state))
    actions += filled
    if state.restart:
        going_on = restart_words(state, {rank})
    elif filled:
        going_on = f"a spare takes the place of rank {rank}."
    else:
        going_on = f"{words.count(survivors)} {'go' if survivors > 1 else 'goes'} on without rank {rank}."
    actions.append(Emit("regroup_started", f"Generation {state.generation + 1}: {going_on}", rank))
    state, more = regroup(state)
    if state.waits and state.stop_since is not None:
        return stop_instead_of_restart(state, actions)
    return state, actions + more


def rank_fenced(now: float, state: State, event: RankFenced) -> tuple[State, list[Action]]:
    if event.rank not in state.unfenced:
        return state, []
    told_before = event.rank in state.silently
    state = replace(
        state,
        unfenced=one_less(state.unfenced, event.rank),
        silently=one_less(state.silently, event.rank) if told_before else state.silently,
    )
    if state.incident and not state.unfenced:
        state = replace(state, incident=replace(state.incident, fenced=now))
    actions: list[Action] = []
    if not told_before:
        reason = f"Rank {event.rank} and all it had started are gone for certain."
        actions.append(Emit("rank_fenced", reason, event.rank))
    state, more = maybe_go(now, state)
    return state, actions + more


def nobody_comes(now: float, state: State, event: NobodyComes) -> tuple[State, list[Action]]:
    """Matters only while the run waits for somebody; else it goes on with those it has."""
    if not state.awaited:
        return state, []
    reason = (
        f"{words.ranks(state.awaited).capitalize()} cannot be replaced: {words.sentence(event.reason)} With --recovery "
        "restart a run goes on with all of its ranks only; --recovery replace goes on with those that are left."
    )
    return end(state, [], "failed", reason)
