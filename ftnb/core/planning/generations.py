"""From a regroup to the first committed step: who has answered, what the next generation does, when it stands."""

from __future__ import annotations

from dataclasses import replace

from ftnb.core.planning import words
from ftnb.core.planning.basics import (
    close_incident,
    end,
    fill,
    lose,
    recovered,
    regroup,
    stands,
    unfence,
    vacate,
    went_back,
)
from ftnb.core.planning.failures import hear_verdicts, judge, judge_exceptions
from ftnb.core.planning.holds import send_hold, stop_instead_of_restart, want_change
from ftnb.core.planning.state import GoingBack, State
from ftnb.core.protocol import (
    Action,
    CloseGeneration,
    Emit,
    Kill,
    OpenGeneration,
    RankFinished,
    RankFormed,
    RankReady,
    SendGo,
    SendRelease,
    Started,
    StepCommitted,
)


def started(now: float, state: State, event: Started) -> tuple[State, list[Action]]:
    return regroup(replace(state, alive=frozenset(event.members), wanted=len(event.members)))


def rank_ready(now: float, state: State, event: RankReady) -> tuple[State, list[Action]]:
    if state.phase != "regrouping" or event.generation != state.generation:
        return state, []
    if event.rank not in state.alive | state.left_out or event.rank in state.ready:
        return state, []
    is_former = event.committed >= 0 and state.trained < state.entered.get(event.rank, 0)
    if is_former and (state.restart or state.alive > {event.rank}):
        return _former_rank(now, state, event.rank)
    state = replace(state, ready={**state.ready, event.rank: event})
    return maybe_go(now, state)


def _former_rank(now: float, state: State, rank: int) -> tuple[State, list[Action]]:
    """Whoever enters holds no state before its first Go: this is the one that was to be replaced. It had been stopped
    when a new supervisor asked where all stand, and the one before had died before it could kill it."""
    state, filled = fill(vacate(lose(state, {rank}, silently=True), {rank}, refill=True))
    actions = [Kill(rank, "its slot is to be filled anew"), *filled]
    if state.waits:
        state, more = complete(now, state)
    elif filled:
        reason = f"Generation {state.generation + 1}: a spare takes the place of {words.ranks({rank})}."
        actions.append(Emit("regroup_started", reason, rank))
        state, more = regroup(state)
    else:
        state, more = maybe_go(now, state)
    return state, actions + more


def maybe_go(now: float, state: State) -> tuple[State, list[Action]]:
    """Begin the generation once every living rank has answered and every lost one is fenced."""
    if not _all_answered(state):
        return state, []
    actions: list[Action] = []
    state = hear_verdicts(state)
    if state.verdicts:
        state, actions = judge(now, state)
    if state.unfenced or not _all_answered(state):
        return state, actions
    state, more = judge_exceptions(now, state)
    actions += more
    if state.phase == "ended":
        return state, actions
    if state.waits:
        state, more = complete(now, state, all_answered=True)
        actions += more
        if state.phase != "regrouping" or state.awaited or not _all_answered(state) or state.unfenced:
            return state, actions
    return _go(state, actions)


def _all_answered(state: State) -> bool:
    return state.phase == "regrouping" and state.alive <= set(state.ready)


def complete(now: float, state: State, all_answered: bool = False) -> tuple[State, list[Action]]:
    """While the run waits for its full world: is somebody there who completes it, or is nobody awaited any more?"""
    if not state.waits:
        return state, []
    if state.stop_since is not None:
        return stop_instead_of_restart(state, [])
    if state.joiners and not state.awaited:
        verb = "have" if len(state.joiners) > 1 else "has"
        reason = f"Generation {state.generation + 1}: {words.ranks(state.joiners)} {verb} come, so all are there."
        state, actions = regroup(state)
        return state, [Emit("regroup_started", reason), *actions]
    return (state, []) if all_answered else maybe_go(now, state)


def _go(state: State, actions: list[Action]) -> tuple[State, list[Action]]:
    """All have answered and nothing is in the way."""
    if state.going_back is not None:
        return _go_back(state, state.going_back, actions)
    members = tuple(sorted(state.alive))
    # A rank that is left out may have been a step ahead of all others: that step is done again without it.
    committed = max((state.ready[rank].committed for rank in members), default=-1)
    if committed < 0:
        return _all_lost(state, actions)
    first_step = committed + 1
    behind = tuple(rank for rank in members if state.ready[rank].committed < committed)
    source = next(rank for rank in members if state.ready[rank].committed == committed) if behind else None
    if state.generation > 1:
        actions.append(CloseGeneration(state.generation - 1, committed))
    if first_step < state.first_step:
        # The books were closed with this step, but who had it died before it could copy it to the others.
        reason = f"Step {first_step} is done again: the only rank that had committed it is lost."
        fields = {"first_step": first_step, "last_step": state.first_step - 1}
        actions.append(Emit("rolled_back", reason, None, first_step, fields))
    if state.incident:
        repeated = any(state.ready[rank].in_flight == first_step for rank in members)
        lost_steps = max(state.incident.lost_steps, int(repeated))
        state = replace(state, incident=replace(state.incident, lost_steps=lost_steps))
    return _send_go(state, actions, committed, source, behind, None)


def _all_lost(state: State, actions: list[Action]) -> tuple[State, list[Action]]:
    reason = "All ranks that held the state of the training are lost; those that were to join had none yet."
    return end(state, actions, "failed", reason)


def _go_back(state: State, back: GoingBack, actions: list[Action]) -> tuple[State, list[Action]]:
    """As `_go`, from the newest copy of an earlier state that a member has kept."""
    members = tuple(sorted(state.alive))
    told = {rank: state.ready[rank].committed for rank in members if state.ready[rank].committed >= 0}
    anchors = {rank: anchor for rank in members if (anchor := state.ready[rank].anchor) is not None}
    if not state.restart and state.newcomers >= set(members):
        return _all_lost(state, actions)  # they could begin anew, but nobody has asked for that
    # An anchor that is newer than what all had gone back to proves that they had, and have trained since.
    if back.sent is None or max(anchors.values(), default=-1) > state.committed:
        closed_with = max(told.values(), default=state.committed)
        undone = closed_with
    else:
        # It is not certain who has gone back, and whether anything has been trained since. The books are closed with
        # what was heard of; whoever is not where it was has gone back, so it tells of steps since.
        closed_with = state.committed
        undone = max([closed_with, *(step for rank, step in told.items() if step != back.were_at.get(rank))])
    if not anchors:
        reason = (
            f"All ranks were to go back to an earlier state ({back.why}), and none of them has kept one. Run the cell "
            "again to begin anew."
        )
        return end(replace(state, committed=closed_with), actions, "failed", reason)
    anchor = max(anchors.values())
    closed_with, undone = max(closed_with, anchor), max(undone, anchor)
    if back.sent is None and back.verdict is not None and back.verdict[0] == "divergence":
        step, before = back.verdict[1], state.last_verdict
        if before is not None and before[:2] == ("divergence", step) and anchor <= before[2]:
            reason = (
                f"The replicas differ again after step {step}, although all had gone back to "
                f"{words.state_after(before[2])}: that is no flipped bit. Something in the model or the cell makes the "
                "ranks differ: random numbers that are not torch's, the rank's number, the time, or a module that "
                "changes its parameters by itself."
            )
            return end(replace(state, committed=closed_with), actions, "failed", reason)
        state = replace(state, last_verdict=("divergence", step, anchor))
    behind = tuple(rank for rank in members if anchors.get(rank) != anchor)
    source = next(rank for rank in members if anchors.get(rank) == anchor) if behind else None
    if state.generation > 1:
        actions.append(CloseGeneration(state.generation - 1, closed_with))
    if undone > anchor:  # else only the step in flight is done again
        reason = (
            f"All ranks go back to {words.state_after(anchor)}; {words.steps(anchor + 1, undone)} done again, "
            f"because {back.why}."
        )
        fields = {"first_step": anchor + 1, "last_step": undone}
        actions.append(Emit("rolled_back", reason, None, anchor + 1, fields))
    if incident := state.incident:
        lost_steps = max(0, undone - anchor)
        if back.sent is None:
            lost_steps += any(state.ready[rank].in_flight == undone + 1 for rank in members)
        if incident.rolled_back_to is not None:
            lost_steps += incident.lost_steps  # a second time
        else:
            lost_steps = max(incident.lost_steps, lost_steps)
        state = replace(state, incident=replace(incident, lost_steps=lost_steps, rolled_back_to=anchor))
    state = replace(state, going_back=replace(back, sent=state.generation, were_at=told))
    return _send_go(state, actions, anchor, source, behind, anchor)


def _send_go(
    state: State, actions: list[Action], committed: int, source: int | None, behind: tuple[int, ...],
    restore: int | None,
) -> tuple[State, list[Action]]:
    members = tuple(sorted(state.alive))
    hold_after = committed if state.hold_why else None
    state = replace(
        state,
        phase="forming",
        members=members,
        first_step=committed + 1,
        committed=committed,
        hold_after=hold_after,
        trained=state.generation,
        raised={},
        verdicts={},
    )
    actions += [
        OpenGeneration(state.generation, members, committed + 1),
        SendGo(state.generation, members, committed + 1, source, behind, hold_after, restore),
    ]
    return state, actions


def rank_formed(now: float, state: State, event: RankFormed) -> tuple[State, list[Action]]:
    if state.phase != "forming" or event.generation != state.generation or event.rank not in state.members:
        return state, []
    if event.rank in state.formed:
        return state, []
    state = replace(state, formed={**state.formed, event.rank: event})
    if set(state.formed) < set(state.members):
        return state, []
    formed_at = max(f.formed_at for f in state.formed.values())
    restored_at = max(f.restored_at for f in state.formed.values())
    if state.incident:
        state = replace(state, incident=replace(state.incident, formed=formed_at, restored=restored_at))
    state, actions = stands(state)
    if state.hold_why == "pause" and state.first_step > state.total_steps:
        state = replace(state, hold_why=None)
    # A wish that came after the Go was kept until here: a rank may take its Go in later than a hold or a
    # release that was sent after it, and would then forget the newer order.
    if state.hold_why and state.hold_after is None:
        state, more = send_hold(state, state.committed + 2)
        actions += more
    elif not state.hold_why and state.hold_after is not None:
        state = replace(state, held=frozenset())
        actions.append(SendRelease(state.members))
    early, state = state.early_commits, replace(state, early_commits=())
    for commit in early:
        state, more = step_committed(now, state, commit)
        actions += more
    state, more = want_change(state)
    return state, actions + more


def step_committed(now: float, state: State, event: StepCommitted) -> tuple[State, list[Action]]:
    if event.generation != state.generation or event.step <= state.committed or event.rank not in state.members:
        return state, []
    if state.phase == "forming":
        # A commit proves that all have formed; only their messages are late, and carry times that are needed.
        if state.early_commits and event.step <= state.early_commits[-1].step:
            return state, []
        return went_back(replace(state, early_commits=(*state.early_commits, event))), []
    state = replace(state, committed=event.step, fruitless=0)
    actions: list[Action] = []
    if state.left_out and not (state.failed_step and event.step < state.failed_step[0]):
        # The step worked without them, so the fault was theirs: now they are fenced for good.
        actions += [Kill(rank, "its step has been committed without it") for rank in sorted(state.left_out)]
        state = unfence(state, state.left_out, silently=True)
        state, filled = fill(vacate(replace(state, left_out=frozenset()), state.left_out, state.refill))
        actions += filled
    if state.failed_step and event.step >= state.failed_step[0]:
        state = replace(state, failed_step=None)
    if state.last_verdict and event.step >= state.last_verdict[1] + (state.last_verdict[0] == "divergence"):
        state = replace(state, last_verdict=None)  # replicas are compared after the commit
    if state.incident and event.generation > state.incident.broke:
        actions.append(recovered(state, state.incident, event))
        state = replace(state, incident=None)
    state, more = want_change(state)
    return state, actions + more


def rank_finished(now: float, state: State, event: RankFinished) -> tuple[State, list[Action]]:
    if event.generation != state.generation or event.rank not in state.members:
        return state, []
    if event.rank in state.finished:
        return state, []
    state = replace(state, finished=state.finished | {event.rank})
    if state.finished >= set(state.members):
        state = replace(state, committed=max(state.committed, state.total_steps))
        actions: list[Action] = []
        state = close_incident(now, state, actions, event.rank)
        return end(state, actions, "finished", f"All {state.total_steps} steps are committed.")
    return state, []
