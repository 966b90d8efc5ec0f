"""Stopping at a step boundary: to pause, to stop, or to let somebody join or leave."""

from __future__ import annotations

from dataclasses import replace

from ftnb.core.planning import words
from ftnb.core.planning.basics import close_incident, end, regroup
from ftnb.core.planning.state import State
from ftnb.core.protocol import (
    Action,
    Emit,
    HoldAnswered,
    HoldWanted,
    RankHeld,
    Release,
    SendDrop,
    SendHold,
    SendRelease,
    Unpause,
)


def hold_wanted(now: float, state: State, event: HoldWanted) -> tuple[State, list[Action]]:
    if event.why == "stop":
        if state.stop_since is not None:
            return state, []
        state = replace(state, stop_since=now)
        if state.paused:
            return end(state, [], "stopped", f"Stopped on request after step {state.committed}.")
        if state.waits:
            return stop_instead_of_restart(state, [])
    elif state.hold_why not in (None, "change"):
        return state, []
    state = replace(state, hold_why=event.why)
    if state.phase != "training":
        return state, []  # the next Go carries the hold; if it is on its way already, the hold follows it
    return send_hold(state, max(event.max_step, state.committed) + 2)


def stop_instead_of_restart(state: State, actions: list[Action]) -> tuple[State, list[Action]]:
    """Nothing trains, and it would not train before all have gone back: what they have now is worth more."""
    what = f"it waited for {words.ranks(state.awaited)}" if state.awaited else "all ranks were about to go back"
    return end(state, actions, "stopped", f"Stopped on request while {what}.")


def send_hold(state: State, after_step: int, tries: int = 0) -> tuple[State, list[Action]]:
    hold_id = state.hold_id + 1
    # Never the same step twice in one generation: "held" then always belongs to the newest proposal.
    after_step = max(after_step, (state.hold_after or 0) + 1)
    state = replace(
        state, hold_id=hold_id, hold_after=after_step, hold_tries=tries, hold_answers={}, held=frozenset()
    )
    return state, [SendHold(state.members, hold_id, after_step)]


def hold_answered(now: float, state: State, event: HoldAnswered) -> tuple[State, list[Action]]:
    if event.hold_id != state.hold_id or state.hold_why is None or event.rank not in state.members:
        return state, []
    if event.rank in state.hold_answers:
        return state, []
    state = replace(state, hold_answers={**state.hold_answers, event.rank: event})
    if set(state.hold_answers) < set(state.members) or all(a.accepted for a in state.hold_answers.values()):
        return state, []
    # Somebody is beyond the proposed step already: propose one further ahead.
    ahead = max(answer.step for answer in state.hold_answers.values())
    return send_hold(state, ahead + 2 ** (state.hold_tries + 2), state.hold_tries + 1)


def rank_held(now: float, state: State, event: RankHeld) -> tuple[State, list[Action]]:
    if event.generation != state.generation or event.rank not in state.members:
        return state, []
    if state.hold_why is None and state.phase != "forming":
        return state, []  # released in the meantime
    if event.step != state.hold_after or event.rank in state.held:
        return state, []  # it stopped at an earlier proposal and goes on to the newer one
    state = replace(state, held=state.held | {event.rank})
    if not state.held >= set(state.members):
        return state, []
    state = replace(state, phase="training", committed=max(state.committed, event.step))
    if state.hold_why == "stop":
        return end(state, [], "stopped", f"Stopped on request after step {event.step}.")
    if state.hold_why == "change":
        return change(state)
    actions: list[Action] = []
    state = close_incident(now, state, actions, event.rank)
    if state.paused_at != event.step:  # else somebody has joined or left meanwhile
        actions.append(Emit("paused", f"Paused after step {event.step}.", None, event.step))
    state, more = want_change(replace(state, paused_at=event.step))
    return state, [*actions, *more]


def unpause(now: float, state: State, event: Unpause) -> tuple[State, list[Action]]:
    if state.hold_why != "pause":
        return state, []
    actions: list[Action] = [Emit("unpaused", f"Goes on with step {state.committed + 1}.", None, state.committed)]
    if state.phase == "training" and (state.joiners or can_leave(state)):
        # They are at a step boundary, or on their way to one: this hold goes on, for another reason.
        state = replace(state, hold_why="change", paused_at=None)
        if state.held >= set(state.members):
            state, more = change(state)
            actions += more
        return state, actions
    state = replace(state, hold_why=None, paused_at=None, hold_id=state.hold_id + 1)
    if state.phase == "training":
        state = replace(state, held=frozenset())
        actions.insert(0, SendRelease(state.members))
    # While a generation forms, the release waits until all have taken their Go in (see generations.rank_formed).
    return state, actions


# --- somebody joins or leaves ------------------------------------------------------------------------------


def want_change(state: State) -> tuple[State, list[Action]]:
    """Let the members stop at a step boundary when somebody is to join or to leave; paused, they stand at one."""
    if state.phase != "training" or not (state.joiners or can_leave(state)):
        return state, []
    if state.paused:
        return change(state)
    if state.hold_why:
        return state, []
    return send_hold(replace(state, hold_why="change"), state.committed + 2)


def change(state: State) -> tuple[State, list[Action]]:
    """All members stand at a step boundary: take in who joins, let go who leaves."""
    leaving = can_leave(state)
    goes_on = state.hold_why if state.hold_why == "pause" else None
    state = replace(state, hold_why=goes_on, leaving=state.leaving - leaving, alive=state.alive - leaving)
    if not (leaving or state.joiners):
        return replace(state, held=frozenset()), [SendRelease(state.members)]
    said = [f"{words.ranks(state.joiners)} {words.joins(state.joiners)}"] if state.joiners else []
    said += [f"{words.ranks(leaving)} {'leave' if len(leaving) > 1 else 'leaves'}"] if leaving else []
    reason = f"Generation {state.generation + 1}: {' and '.join(said)} after step {state.committed}."
    actions: list[Action] = [Emit("regroup_started", reason, None, state.committed)]
    if leaving:
        actions += [SendDrop(tuple(sorted(leaving))), Release(tuple(sorted(leaving)))]
    state, more = regroup(state)
    return state, actions + more


def can_leave(state: State) -> frozenset[int]:
    """Of those that shall leave; where no other holds the state, one stays until a newcomer has got it."""
    leaving = state.leaving & state.alive
    return leaving if state.alive - leaving else leaving - {min(leaving, default=0)}
