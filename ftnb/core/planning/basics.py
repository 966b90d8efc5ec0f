"""What the handlers have in common: the next generation, slots, incidents, the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ftnb.core.planning import words
from ftnb.core.planning.state import GoingBack, Incident, State
from ftnb.core.protocol import (
    Action,
    CloseGeneration,
    Emit,
    End,
    SendDrop,
    SendRegroup,
    StepCommitted,
    TakeSpare,
)

# --- generations -------------------------------------------------------------------------------------------


def regroup(state: State) -> tuple[State, list[Action]]:
    """Ask every living rank to leave its group; the next generation begins when all have answered.

    Whoever has got a slot meanwhile enters with it.
    """
    if state.early_commits:
        state = replace(state, committed=max(state.committed, state.early_commits[-1].step))
    generation = state.generation + 1
    newcomers = (state.newcomers & state.alive) | state.joiners
    entered = {**state.entered, **dict.fromkeys(state.joiners, generation)}
    state = replace(
        state,
        phase="regrouping",
        generation=generation,
        alive=state.alive | state.joiners,
        newcomers=newcomers,
        entered={rank: first for rank, first in entered.items() if rank in newcomers},
        joiners=frozenset(),
        hold_why=None if state.hold_why == "change" else state.hold_why,
        ready={},
        formed={},
        finished=frozenset(),
        unexplained_since=None,
        raised_since=None,
        left=frozenset(),
        early_commits=(),
        held=frozenset(),
        hold_answers={},
        hold_id=state.hold_id + 1,  # answers to an older proposal may still be on their way
    )
    return state, [SendRegroup(generation, tuple(sorted(state.alive | state.left_out)))]


def stands(state: State) -> tuple[State, list[Action]]:
    """All members of the generation have formed their group."""
    state = went_back(replace(state, phase="training"))
    actions: list[Action] = []
    if state.generation > 1:
        size, first = words.count(len(state.members)), state.first_step
        reason = f"Generation {state.generation} stands: {size}, next step {first}."
        fields = {"world_size": len(state.members), "members": list(state.members)}
        actions.append(Emit("regrouped", reason, None, state.first_step, fields))
    actions += [
        Emit(
            "rank_joined", f"Rank {rank} has joined with the state after step {state.first_step - 1}.", rank,
            state.first_step, {"world_size": len(state.members)},
        )
        for rank in sorted(state.newcomers)
    ]
    return replace(state, newcomers=frozenset(), entered={}), actions


def went_back(state: State) -> State:
    """It is certain that all members of the last generation have formed their group: if they were told to go back, they
    have done so before."""
    back = state.going_back
    return replace(state, going_back=None) if back and back.sent == state.trained else state


# --- slots -------------------------------------------------------------------------------------------------


def lose(state: State, ranks: Iterable[int], silently: bool = False) -> State:
    """These are not part of the run any more; what is left of them has to be fenced."""
    ranks = frozenset(ranks)
    state = replace(
        state, alive=state.alive - ranks, left_out=state.left_out - ranks, joiners=state.joiners - ranks,
        leaving=state.leaving - ranks, newcomers=state.newcomers - ranks, left=state.left - ranks,
        raised={rank: failure for rank, failure in state.raised.items() if rank not in ranks},
    )
    return unfence(state, ranks, silently)


def vacate(state: State, ranks: Iterable[int], refill: bool) -> State:
    """Slots that have lost their process are to be filled again, if that is wanted."""
    wanted = {rank for rank in ranks if rank < state.wanted} if refill else set()
    return replace(state, vacant=state.vacant | wanted)


def fill(state: State, first: int | None = None) -> tuple[State, list[Action]]:
    """Give vacant slots (`first` before others) to the processes that are ready."""
    order = sorted(state.vacant, key=lambda rank: (rank != first, rank))
    taken = order[: state.spares]
    state = replace(
        state,
        vacant=state.vacant.difference(taken),
        spares=state.spares - len(taken),
        joiners=state.joiners.union(taken),
    )
    return state, [TakeSpare(rank) for rank in taken]


def unfence(state: State, ranks: Iterable[int], silently: bool = False) -> State:
    """One more process of each of these slots has to be fenced before a generation may begin."""
    ranks = frozenset(ranks)
    state = replace(state, unfenced=_one_more(state.unfenced, ranks))
    return replace(state, silently=_one_more(state.silently, ranks)) if silently else state


def _one_more(numbers: Mapping[int, int], ranks: Iterable[int]) -> dict[int, int]:
    return {**numbers, **{rank: numbers.get(rank, 0) + 1 for rank in ranks}}


def one_less(numbers: Mapping[int, int], rank: int) -> dict[int, int]:
    return {r: number for r, number in {**numbers, rank: numbers[rank] - 1}.items() if number}


# --- going back --------------------------------------------------------------------------------------------


def restart_after(state: State, ranks: Iterable[int]) -> State:
    """With recovery "restart", the loss of these sends all others back, to wait for the full world."""
    if not state.restart:
        return state
    back = state.going_back or GoingBack(f"{words.ranks(ranks)} {'was' if len(list(ranks)) == 1 else 'were'} lost")
    return replace(state, going_back=replace(back, waits=True))


def restart_words(state: State, lost: Iterable[int]) -> str:
    """How a run goes on that is to go back with all its ranks."""
    missing = frozenset(range(state.wanted)) - state.alive - state.joiners
    if missing:
        there = f"{words.ranks(missing)} {'is' if len(missing) == 1 else 'are'} there again"
        return f"the run waits until {there}; then all go back."
    if replaced := state.joiners.intersection(lost):
        return f"a spare takes the place of {words.ranks(replaced)}, and all go back."
    return "all that are left go back."


# --- incidents ---------------------------------------------------------------------------------------------


def open_incident(now: float, state: State, ranks: tuple[int, ...], fault_time: float, what: str = "") -> State:
    """Begin an incident, or add to the one that is open (a second loss during the recovery of the first)."""
    fault_time = min(fault_time, now)
    if state.incident is None:
        return replace(state, incident=Incident(ranks, state.trained, fault_time, now, what=what))
    incident = state.incident
    return replace(
        state,
        incident=replace(
            incident,
            ranks=tuple(sorted({*incident.ranks, *ranks})), broke=state.trained,
            fault_time=min(incident.fault_time, fault_time),
            fenced=None,
            formed=None,
            restored=None,
            what=incident.what or what,
        ),
    )


def blame(state: State, ranks: Iterable[int]) -> State:
    """The incident that is open has cost these."""
    if state.incident is None:
        return state
    return replace(state, incident=replace(state.incident, ranks=tuple(sorted({*state.incident.ranks, *ranks}))))


def close_incident(now: float, state: State, actions: list[Action], rank: int) -> State:
    """A failure after the last step, or while paused: recovered, although no step is committed after it."""
    if state.incident:
        commit = StepCommitted(rank, state.generation, state.committed, now)
        actions.append(recovered(state, state.incident, commit))
    return replace(state, incident=None)


def recovered(state: State, incident: Incident, commit: StepCommitted) -> Emit:
    fenced = incident.fenced if incident.fenced is not None else incident.detected
    formed = max(incident.formed or fenced, fenced)
    restored = max(incident.restored or formed, formed)
    # A commit can be reported before the supervisor has heard that the group was formed.
    formed, restored = min(formed, commit.time), min(restored, commit.time)
    phases = {
        "detect_s": incident.detected - incident.fault_time,
        "fence_s": fenced - incident.detected,
        "regroup_s": formed - fenced,
        "restore_s": restored - formed,
        "first_step_s": commit.time - restored,
        "mttr_s": commit.time - incident.fault_time,
    }
    what = incident.what or "the loss of a broken connection"
    if incident.ranks:
        what = f"the loss of {words.ranks(incident.ranks)}"
    back = {} if incident.rolled_back_to is None else {"rolled_back_to": incident.rolled_back_to}
    return Emit(
        "recovered",
        f"Step {commit.step} is committed by {words.count(len(state.members))}, "
        f"{phases['mttr_s'] * 1000:.0f} ms after {what}.",
        None,
        commit.step,
        {
            **{name: round(max(value, 0.0), 6) for name, value in phases.items()},
            "ranks": list(incident.ranks),
            "lost_steps": incident.lost_steps,
            "world_size": len(state.members),
            **back,
        },
    )


# --- the end -----------------------------------------------------------------------------------------------


def end(
    state: State, actions: list[Action], outcome: str, reason: str, error: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> tuple[State, list[Action]]:
    """Close the books and let every living rank go; appends to `actions` and returns it."""
    state = replace(state, phase="ended", end=End(outcome, reason, error, dict(fields or {})))
    actions += last_actions(state)
    return state, actions


def last_actions(state: State) -> list[Action]:
    assert state.end is not None
    return [
        CloseGeneration(state.generation, state.committed), SendDrop(tuple(sorted(state.has_run))), state.end,
    ]  # fmt: skip
