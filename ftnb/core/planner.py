"""What a run does next when ranks get ready, train, raise, die or are told to stop: a pure state machine.

`step(now, state, event)` returns the next state and the actions that the supervisor carries out. It knows
no sockets, processes or torch, and the time is passed in, so that thousands of failure sequences can be
tried in a second (tests/core/test_planner.py).

The life of one generation:

    SendRegroup ──▶ every member tears its old group down and answers RankReady(committed step, what broke)
        │           (the dead are fenced meanwhile)
        ▼
    SendGo(members, first step, who copies its state to whom) ──▶ RankFormed from every member ──▶ training

Training in data parallel needs every member's input in every all-reduce, so the survivors of a failure are
at most one step apart: the most advanced state wins, and only the step in flight is tried again.

Growing, shrinking and replacing use the same path. A process that has run the cell is *ready*; when a slot is
*vacant*, it takes the slot and enters with the next generation, which copies the state to it. If a failure calls
for a new generation anyway, that is the one; else the members stop at a step boundary first, and no work is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ftnb.core.plain import from_plain, to_plain
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
    OpenGeneration,
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
    Started,
    StepCommitted,
    StepFailed,
    TakeSpare,
    Tick,
    Unpause,
)

# A failed collective is a symptom. Its cause (a death, an exception elsewhere) is nearly always known within
# milliseconds; only when none turns up for this long is the group formed again with everybody.
UNEXPLAINED_S = 1.0
# When one rank raises, the others get this long to leave the step by themselves (its closed connections bring
# them out of the collective): those that raise as well show that the code is at fault, not the rank.
RAISE_GRACE_S = 0.15
# Regroups in a row without a single committed step before the run gives up.
MAX_FRUITLESS_REGROUPS = 4
# How long a stop waits for the ranks to reach a step boundary before it takes them out of the step.
STOP_PATIENCE_S = 5.0


# --- state -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Incident:
    """A failure from its first cause to the first step committed after it, with the time of each phase."""

    ranks: tuple[int, ...]
    broke: int  # the generation that it broke; commits of that one may still come in, and are no recovery
    fault_time: float
    detected: float
    fenced: float | None = None
    formed: float | None = None
    restored: float | None = None
    lost_steps: int = 0


@dataclass(frozen=True)
class State:
    total_steps: int
    phase: str = "new"  # new, regrouping, forming, training, ended
    generation: int = 0
    alive: frozenset[int] = frozenset()  # ranks of this run that are neither dead nor left out
    left_out: frozenset[int] = (
        frozenset()
    )  # raised; fenced by the generation until the step worked without them
    # dead, but the kill of what they started is not confirmed; how many processes of each slot
    unfenced: Mapping[int, int] = field(default_factory=dict)
    silently: Mapping[int, int] = field(default_factory=dict)  # of these, how many have been told as fenced before
    wanted: int = 0  # the run shall have the slots 0 … wanted-1
    refill: bool = False  # slots of lost ranks are to be filled again ("replace")
    vacant: frozenset[int] = frozenset()  # slots that wait for a process
    spares: int = 0  # processes that are ready to take a slot
    joiners: frozenset[int] = frozenset()  # have got their slot; enter with the next generation
    newcomers: frozenset[int] = frozenset()  # entered with this one
    leaving: frozenset[int] = frozenset()  # leave with the next generation that begins at a step boundary
    members: tuple[int, ...] = ()
    ready: Mapping[int, RankReady] = field(default_factory=dict)
    formed: Mapping[int, RankFormed] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    first_step: int = 1
    committed: int = 0  # last step known to be in the weights of the most advanced member
    trained: int = 0  # the generation that was told to train last
    raised: Mapping[int, Failure] = field(default_factory=dict)  # by user code in that generation, per rank
    failed_step: tuple[int, int, str] | None = None  # (step, generation, what broke it: exception or crash)
    unexplained_since: float | None = None
    raised_since: float | None = None
    left: frozenset[int] = frozenset()  # members that have left this generation's step by themselves
    fruitless: int = 0
    incident: Incident | None = None
    early_commits: tuple[StepCommitted, ...] = ()  # came before the last RankFormed of their generation
    # hold: pause or stop at a step boundary that all members agree on
    hold_why: str | None = None  # "pause", "stop", or "change" (somebody joins or leaves)
    hold_id: int = 0
    hold_after: int | None = None
    hold_tries: int = 0
    hold_answers: Mapping[int, HoldAnswered] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    paused_at: int | None = None  # the step after which it is paused, once that has been said
    stop_since: float | None = None
    end: End | None = None  # how the run has ended

    @property
    def paused(self) -> bool:
        return self.phase == "training" and self.hold_why == "pause" and self.held >= set(self.members)


    @property
    def has_run(self) -> frozenset[int]:
        """Slots whose process belongs to this run."""
        return self.alive | self.left_out | self.joiners


# All that a state may consist of.
_SAVED = {
    kind.__name__: kind
    for kind in (State, Incident, End, Failure, HoldAnswered, RankFormed, RankReady, StepCommitted)
}  # fmt: skip


def to_json(state: State) -> str:
    """For the next supervisor, should this one die."""
    return json.dumps(to_plain(state), allow_nan=False)


def from_json(text: str) -> State:
    """ValueError for what this version does not write."""
    state = from_plain(json.loads(text), _SAVED)
    if not isinstance(state, State):
        raise ValueError(f"Not the state of a run: {text[:100]}")
    return state


def new(total_steps: int, refill: bool = False) -> State:
    return State(total_steps=total_steps, refill=refill)


def step(now: float, state: State, event: Any) -> tuple[State, list[Action]]:
    """The next state and what to do. Events that come too late, from an old generation, change nothing."""
    if state.phase == "ended":
        # The supervisor before may have died before it could do the last things.
        return state, _last_actions(state) if isinstance(event, Adopted) else []
    return _HANDLERS[type(event)](now, state, event)


# --- handlers ----------------------------------------------------------------------------------------------


def _started(now: float, state: State, event: Started) -> tuple[State, list[Action]]:
    state = replace(state, alive=frozenset(event.members), wanted=len(event.members))
    return _regroup(state)


def _regroup(state: State) -> tuple[State, list[Action]]:
    """Ask every living rank to leave its group; the next generation begins when all have answered.

    Whoever has got a slot meanwhile enters with it.
    """
    generation = state.generation + 1
    state = replace(
        state,
        phase="regrouping",
        generation=generation,
        alive=state.alive | state.joiners,
        newcomers=(state.newcomers & state.alive) | state.joiners,
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


def _rank_died(now: float, state: State, event: RankDied) -> tuple[State, list[Action]]:
    rank = event.rank
    if rank not in state.has_run:
        return state, []
    was_left_out, had_not_entered = rank in state.left_out, rank in state.joiners
    had_no_state = rank in state.newcomers
    state = replace(
        state, alive=state.alive - {rank}, left_out=state.left_out - {rank}, joiners=state.joiners - {rank},
        leaving=state.leaving - {rank}, newcomers=state.newcomers - {rank},
        raised={r: failure for r, failure in state.raised.items() if r != rank}, left=state.left - {rank},
    )
    state = _unfence(state, {rank}, silently=was_left_out)
    kill: list[Action] = [Kill(rank, "end whatever it had started")]
    if had_not_entered:
        words = f"The process that was to take the place of rank {rank} is gone: {event.reason}."
        # Also where lost ranks are not replaced: this slot was to be filled, and still is.
        state, filled = _fill(_vacate(state, {rank}, refill=True))
        return state, [Emit("spare_lost", words, rank), *kill, *filled]
    if was_left_out:
        state, filled = _fill(_vacate(state, {rank}, state.refill))
        return state, [*kill, *filled]  # already known as failed, and no member of the group
    at_step = state.committed + 1  # the step in flight, or the one that was to be tried again
    actions: list[Action] = [
        Emit(
            "rank_failed", f"Rank {rank} is gone: {event.reason}.", rank, at_step, {"failure": event.failure}
        ),
        *kill,
    ]
    state = _open_incident(now, state, (rank,), event.fault_time)
    if not state.alive:
        reason = f"All ranks are lost; the last one was rank {rank}: {event.reason}."
        if state.left_out:
            # An exception may have hit them in the middle of an update: their weights cannot be trusted.
            reason = (
                f"No rank is left to go on with: rank {rank} is gone ({event.reason}), and before that "
                f"{_ranks(state.left_out)} raised an exception"
                f"{f' in step {state.failed_step[0]}' if state.failed_step else ''}."
            )
        return _end(state, actions, "failed", reason)
    if event.failure == "crash" and not had_no_state:
        # Native code that crashes on the same data takes one rank after the other: stop before all are gone.
        state, ended = _same_step_again(state, actions, state.committed + 1, (rank,), event.reason, None)
        if ended:
            return state, actions
    survivors = len(state.alive)
    state, filled = _fill(_vacate(state, {rank}, state.refill or had_no_state))
    going_on = f"{_count(survivors)} {'go' if survivors > 1 else 'goes'} on without rank {rank}."
    if filled:
        going_on = f"a spare takes the place of rank {rank}."
    actions += [*filled, Emit("regroup_started", f"Generation {state.generation + 1}: {going_on}", rank)]
    state, more = _regroup(state)
    return state, actions + more


def _rank_fenced(now: float, state: State, event: RankFenced) -> tuple[State, list[Action]]:
    if event.rank not in state.unfenced:
        return state, []
    told_before = event.rank in state.silently
    state = replace(
        state,
        unfenced=_one_less(state.unfenced, event.rank),
        silently=_one_less(state.silently, event.rank) if told_before else state.silently,
    )
    if state.incident and not state.unfenced:
        state = replace(state, incident=replace(state.incident, fenced=now))
    actions: list[Action] = []
    if not told_before:
        words = f"Rank {event.rank} and all it had started are gone for certain."
        actions.append(Emit("rank_fenced", words, event.rank))
    state, more = _maybe_go(now, state)
    return state, actions + more


def _step_failed(now: float, state: State, event: StepFailed) -> tuple[State, list[Action]]:
    if event.failure.cause == "user":
        if event.generation != state.trained or event.rank not in state.alive or event.rank in state.raised:
            return state, []
        # Kept until the next Go: the rank tells it only once, and a death may call for one generation more.
        state = replace(state, raised={**state.raised, event.rank: event.failure})
        if state.phase == "regrouping":
            return state, []
    elif event.generation != state.generation or event.rank not in state.members or event.rank in state.left:
        return state, []
    actions: list[Action] = []
    state = replace(state, left=state.left | {event.rank})
    if event.failure.cause == "user" and state.raised_since is None:
        state = replace(_open_incident(now, state, (), event.failure.time), raised_since=now)
        words = f"Rank {event.rank} raised {_short(event.failure.error)} {_when(event.failure)}."
        actions.append(Emit("rank_suspected", words, event.rank, _step_of(event.failure)))
    elif state.unexplained_since is None:
        state = replace(state, unexplained_since=now)
    if state.raised_since is not None and state.left >= state.alive & set(state.members):
        state, more = _regroup(state)
        actions += more
    return state, actions


def _tick(now: float, state: State, event: Tick) -> tuple[State, list[Action]]:
    if state.raised_since is not None and now - state.raised_since >= RAISE_GRACE_S:
        return _regroup(state)
    unexplained = state.unexplained_since if state.raised_since is None else None
    if unexplained is not None and now - unexplained >= UNEXPLAINED_S:
        state = _open_incident(now, state, (), unexplained)
        reason = "A collective failed, yet no rank died or raised; all ranks connect again."
        if state.fruitless >= MAX_FRUITLESS_REGROUPS:
            actions: list[Action] = []
            return _end(
                state,
                actions,
                "failed",
                f"The ranks could not form a working group in {MAX_FRUITLESS_REGROUPS} attempts in a row.",
            )
        state, more = _regroup(replace(state, fruitless=state.fruitless + 1))
        return state, [Emit("regroup_started", reason), *more]
    if state.stop_since is not None and now - state.stop_since >= STOP_PATIENCE_S:
        actions = []
        return _end(
            state,
            actions,
            "stopped",
            "Stopped on request; the step in flight took too long and was given up.",
        )
    return state, []


def _rank_ready(now: float, state: State, event: RankReady) -> tuple[State, list[Action]]:
    if state.phase != "regrouping" or event.generation != state.generation:
        return state, []
    if event.rank not in state.alive | state.left_out or event.rank in state.ready:
        return state, []
    state = replace(state, ready={**state.ready, event.rank: event})
    return _maybe_go(now, state)


def _maybe_go(now: float, state: State) -> tuple[State, list[Action]]:
    """Begin the generation once every living rank has answered and every dead one is fenced."""
    if state.phase != "regrouping" or state.unfenced or not state.alive <= set(state.ready):
        return state, []
    actions: list[Action] = []
    told = {rank: ready.failure for rank, ready in state.ready.items() if ready.failure is not None}
    raised = {
        rank: failure
        for rank, failure in {**told, **state.raised}.items()
        if rank in state.alive and failure.cause == "user"
    }
    if raised:
        # Those that have just come hold no state yet, and have not tried the step: one of them proves nothing.
        have = {rank for rank in state.alive if state.ready[rank].committed >= 0}
        tried = have.intersection(raised) or raised
        # Should the run end here: what the survivors have. A rank that died may have been a step ahead.
        state = replace(state, committed=max([0, *(state.ready[rank].committed for rank in have)]))
        first = min(tried, key=lambda rank: raised[rank].time)
        failure = raised[first]
        all_raised = set(raised) | state.left_out
        error = {**failure.error, "rank": first, "step": failure.step, "ranks": sorted(all_raised)}
        # A mistake that ftnb knows: another rank would make it as well.
        if failure.error.get("check") and first in have:
            return _end(state, actions, "failed", f"In {_place(failure)}: {failure.error.get('evalue')}", error)
        if have and have <= raised.keys():
            everyone = "Every rank" if len(all_raised) > 1 else f"Rank {first}, the only one left,"
            return _end(
                state,
                actions,
                "failed",
                f"{everyone} raised {_short(failure.error)} in {_place(failure)}: a bug in the training "
                "code. Nothing was killed; look at the ranks with %%px, mend the cell and run it again.",
                error,
            )
        if first in have:
            blamed = tuple(sorted(tried))
            what = f"raised {_short(failure.error)}"
            state, ended = _same_step_again(state, actions, failure.step, blamed, what, error)
            if ended:
                return state, actions
        for rank in sorted(raised):
            actions.append(
                Emit(
                    "rank_failed",
                    f"Rank {rank} raised {_short(raised[rank].error)}.",
                    rank,
                    _step_of(raised[rank]),
                    {"failure": "exception"},
                )
            )
            actions.append(
                Emit(
                    "rank_fenced",
                    f"Rank {rank} is left out of generation {state.generation}; "
                    "the step is tried without it.",
                    rank,
                )
            )
        survivors = len(state.alive) - len(raised)
        going_on = f"{'try' if survivors > 1 else 'tries'} step {failure.step} again"
        if first not in have:
            going_on = f"{'go' if survivors > 1 else 'goes'} on"
        actions.append(
            Emit(
                "regroup_started",
                f"Generation {state.generation}: {_count(survivors)} {going_on} without {_ranks(raised)}.",
            )
        )
        state = replace(
            state,
            alive=state.alive.difference(raised),
            left_out=state.left_out.union(raised),
            newcomers=state.newcomers.difference(raised),
        )
        if state.incident:
            incident = state.incident
            state = replace(
                state,
                incident=replace(
                    incident, ranks=tuple(sorted({*incident.ranks, *raised})), fenced=incident.fenced or now
                ),
            )
    members = tuple(sorted(state.alive))
    # A rank that is left out may have been a step ahead of all others: that step is done again without it.
    committed = max((state.ready[rank].committed for rank in members), default=-1)
    if committed < 0:
        reason = "All ranks that held the state of the training are lost; those that were to join had none yet."
        return _end(state, actions, "failed", reason)
    first_step = committed + 1
    behind = tuple(rank for rank in members if state.ready[rank].committed < committed)
    source = next(rank for rank in members if state.ready[rank].committed == committed) if behind else None
    if state.generation > 1:
        actions.append(CloseGeneration(state.generation - 1, committed))
    if first_step < state.first_step:
        # The books were closed with this step, but who had it died before it could copy it to the others.
        actions.append(
            Emit(
                "rolled_back",
                f"Step {first_step} is done again: the only rank that had committed it is lost.",
                None,
                first_step,
                {"first_step": first_step, "last_step": state.first_step - 1},
            )
        )
    if state.incident:
        repeated = any(state.ready[rank].in_flight == first_step for rank in members)
        state = replace(
            state, incident=replace(state.incident, lost_steps=max(state.incident.lost_steps, int(repeated)))
        )
    hold_after = committed if state.hold_why else None
    state = replace(
        state,
        phase="forming",
        members=members,
        first_step=first_step,
        committed=committed,
        hold_after=hold_after,
        trained=state.generation,
        raised={},
    )
    actions.append(OpenGeneration(state.generation, members, first_step))
    actions.append(SendGo(state.generation, members, first_step, source, behind, hold_after))
    return state, actions


def _rank_formed(now: float, state: State, event: RankFormed) -> tuple[State, list[Action]]:
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
    state, actions = _stands(state)
    if state.hold_why == "pause" and state.first_step > state.total_steps:
        state = replace(state, hold_why=None)
    # A wish that came after the Go was kept until here: a rank may take its Go in later than a hold or a
    # release that was sent after it, and would then forget the newer order.
    if state.hold_why and state.hold_after is None:
        state, more = _send_hold(state, state.committed + 2)
        actions += more
    elif not state.hold_why and state.hold_after is not None:
        state = replace(state, held=frozenset())
        actions.append(SendRelease(state.members))
    early, state = state.early_commits, replace(state, early_commits=())
    for commit in early:
        state, more = _step_committed(now, state, commit)
        actions += more
    state, more = _want_change(state)
    return state, actions + more


def _stands(state: State) -> tuple[State, list[Action]]:
    """All members of the generation have formed their group."""
    state = replace(state, phase="training")
    actions: list[Action] = []
    if state.generation > 1:
        actions.append(
            Emit(
                "regrouped",
                f"Generation {state.generation} stands: {_count(len(state.members))}, "
                f"next step {state.first_step}.",
                None,
                state.first_step,
                {"world_size": len(state.members), "members": list(state.members)},
            )
        )
    actions += [
        Emit(
            "rank_joined", f"Rank {rank} has joined with the state after step {state.first_step - 1}.", rank,
            state.first_step, {"world_size": len(state.members)},
        )
        for rank in sorted(state.newcomers)
    ]
    state = replace(state, newcomers=frozenset())
    return state, actions


def _step_committed(now: float, state: State, event: StepCommitted) -> tuple[State, list[Action]]:
    if (
        event.generation != state.generation
        or event.step <= state.committed
        or event.rank not in state.members
    ):
        return state, []
    if state.phase == "forming":
        # A commit proves that all have formed; only their messages are late, and carry times that are needed.
        if state.early_commits and event.step <= state.early_commits[-1].step:
            return state, []
        return replace(state, early_commits=(*state.early_commits, event)), []
    state = replace(state, committed=event.step, fruitless=0)
    actions: list[Action] = []
    if state.left_out:
        # The step worked without them, so the fault was theirs: now they are fenced for good.
        actions += [Kill(rank, "its step has been committed without it") for rank in sorted(state.left_out)]
        state = _unfence(state, state.left_out, silently=True)
        state, filled = _fill(_vacate(replace(state, left_out=frozenset()), state.left_out, state.refill))
        actions += filled
    if state.failed_step and event.step >= state.failed_step[0]:
        state = replace(state, failed_step=None)
    if state.incident and event.generation > state.incident.broke:
        actions.append(_recovered(state, state.incident, event))
        state = replace(state, incident=None)
    state, more = _want_change(state)
    return state, actions + more


def _recovered(state: State, incident: Incident, commit: StepCommitted) -> Emit:
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
    who = _ranks(incident.ranks) if incident.ranks else "a broken connection"
    return Emit(
        "recovered",
        f"Step {commit.step} is committed by {_count(len(state.members))}, "
        f"{phases['mttr_s'] * 1000:.0f} ms after the loss of {who}.",
        None,
        commit.step,
        {
            **{name: round(max(value, 0.0), 6) for name, value in phases.items()},
            "ranks": list(incident.ranks),
            "lost_steps": incident.lost_steps,
            "world_size": len(state.members),
        },
    )


def _rank_finished(now: float, state: State, event: RankFinished) -> tuple[State, list[Action]]:
    if event.generation != state.generation or event.rank not in state.members:
        return state, []
    if event.rank in state.finished:
        return state, []
    state = replace(state, finished=state.finished | {event.rank})
    if state.finished >= set(state.members):
        state = replace(state, committed=max(state.committed, state.total_steps))
        actions: list[Action] = []
        state = _close_incident(now, state, actions, event.rank)
        return _end(state, actions, "finished", f"All {state.total_steps} steps are committed.")
    return state, []


def _hold_wanted(now: float, state: State, event: HoldWanted) -> tuple[State, list[Action]]:
    if event.why == "stop":
        if state.stop_since is not None:
            return state, []
        state = replace(state, stop_since=now)
        if state.paused:
            actions: list[Action] = []
            return _end(state, actions, "stopped", f"Stopped on request after step {state.committed}.")
    elif state.hold_why not in (None, "change"):
        return state, []
    state = replace(state, hold_why=event.why)
    if state.phase != "training":
        return state, []  # the next Go carries the hold; if it is on its way already, the hold follows it
    return _send_hold(state, max(event.max_step, state.committed) + 2)


def _send_hold(state: State, after_step: int, tries: int = 0) -> tuple[State, list[Action]]:
    hold_id = state.hold_id + 1
    # Never the same step twice in one generation: "held" then always belongs to the newest proposal.
    after_step = max(after_step, (state.hold_after or 0) + 1)
    state = replace(
        state, hold_id=hold_id, hold_after=after_step, hold_tries=tries, hold_answers={}, held=frozenset()
    )
    return state, [SendHold(state.members, hold_id, after_step)]


def _hold_answered(now: float, state: State, event: HoldAnswered) -> tuple[State, list[Action]]:
    if event.hold_id != state.hold_id or state.hold_why is None or event.rank not in state.members:
        return state, []
    if event.rank in state.hold_answers:
        return state, []
    state = replace(state, hold_answers={**state.hold_answers, event.rank: event})
    if set(state.hold_answers) < set(state.members) or all(a.accepted for a in state.hold_answers.values()):
        return state, []
    # Somebody is beyond the proposed step already: propose one further ahead.
    ahead = max(answer.step for answer in state.hold_answers.values())
    return _send_hold(state, ahead + 2 ** (state.hold_tries + 2), state.hold_tries + 1)


def _rank_held(now: float, state: State, event: RankHeld) -> tuple[State, list[Action]]:
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
        actions: list[Action] = []
        return _end(state, actions, "stopped", f"Stopped on request after step {event.step}.")
    if state.hold_why == "change":
        return _change(state)
    actions = []
    state = _close_incident(now, state, actions, event.rank)
    if state.paused_at != event.step:  # else somebody has joined or left meanwhile
        actions.append(Emit("paused", f"Paused after step {event.step}.", None, event.step))
    state, more = _want_change(replace(state, paused_at=event.step))
    return state, [*actions, *more]


def _unpause(now: float, state: State, event: Unpause) -> tuple[State, list[Action]]:
    if state.hold_why != "pause":
        return state, []
    actions: list[Action] = [
        Emit("unpaused", f"Goes on with step {state.committed + 1}.", None, state.committed)
    ]
    if state.phase == "training" and (state.joiners or _can_leave(state)):
        # They are at a step boundary, or on their way to one: this hold goes on, for another reason.
        state = replace(state, hold_why="change", paused_at=None)
        if state.held >= set(state.members):
            state, more = _change(state)
            actions += more
        return state, actions
    state = replace(state, hold_why=None, paused_at=None, hold_id=state.hold_id + 1)
    if state.phase == "training":
        state = replace(state, held=frozenset())
        actions.insert(0, SendRelease(state.members))
    # While a generation forms, the release waits until all have taken their Go in (see _rank_formed).
    return state, actions


def _spare_ready(now: float, state: State, event: SpareReady) -> tuple[State, list[Action]]:
    state, actions = _fill(replace(state, spares=state.spares + 1), first=event.rank)
    state, more = _want_change(state)
    return state, actions + more


def _spare_lost(now: float, state: State, event: SpareLost) -> tuple[State, list[Action]]:
    return replace(state, spares=max(0, state.spares - 1)), []


def _resized(now: float, state: State, event: Resized) -> tuple[State, list[Action]]:
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
    state, filled = _fill(state)
    state, more = _want_change(state)
    return state, [*actions, *filled, *more]


def _adopted(now: float, state: State, event: Adopted) -> tuple[State, list[Action]]:
    """A new supervisor: go on as if nothing had happened where that is certain, else begin a new generation."""
    state = replace(state, spares=0)  # those that are there are told anew
    # Nobody has taken the slot: the supervisor before died first. (Or who was left out of it still lives.)
    missing = {
        rank for rank in state.joiners if rank not in event.standing or event.standing[rank].generation > 0
    }  # fmt: skip
    state = _vacate(replace(state, joiners=state.joiners - missing), missing, refill=True)
    state = _unfence(state, missing, silently=True)
    actions: list[Action] = [Kill(rank, "its slot is to be filled anew") for rank in sorted(missing)]
    standing = [event.standing[rank] for rank in state.members if rank in event.standing]
    if state.phase == "forming" and any(
        s.generation == state.generation and s.committed >= state.first_step for s in standing
    ):
        # They could not tell it to anybody; a commit needs all of them.
        state, stands = _stands(replace(state, early_commits=()))
        actions += stands
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
    state, more = _regroup(state)
    return state, [*actions, Emit("regroup_started", reason), *more]


def _give_up(now: float, state: State, event: GiveUp) -> tuple[State, list[Action]]:
    actions: list[Action] = []
    return _end(state, actions, event.outcome, event.reason)


_HANDLERS = {
    GiveUp: _give_up,
    Started: _started,
    RankDied: _rank_died,
    RankFenced: _rank_fenced,
    StepFailed: _step_failed,
    RankReady: _rank_ready,
    RankFormed: _rank_formed,
    StepCommitted: _step_committed,
    RankFinished: _rank_finished,
    SpareReady: _spare_ready,
    SpareLost: _spare_lost,
    Resized: _resized,
    Adopted: _adopted,
    HoldWanted: _hold_wanted,
    HoldAnswered: _hold_answered,
    RankHeld: _rank_held,
    Unpause: _unpause,
    Tick: _tick,
}


# --- helpers -----------------------------------------------------------------------------------------------


def _vacate(state: State, ranks: Any, refill: bool) -> State:
    """Slots that have lost their process are to be filled again, if that is wanted."""
    wanted = {rank for rank in ranks if rank < state.wanted} if refill else set()
    return replace(state, vacant=state.vacant | wanted)


def _unfence(state: State, ranks: Any, silently: bool = False) -> State:
    """One more process of each of these slots has to be fenced before a generation may begin."""
    state = replace(state, unfenced=_one_more(state.unfenced, ranks))
    return replace(state, silently=_one_more(state.silently, ranks)) if silently else state


def _one_more(numbers: Mapping[int, int], ranks: Any) -> dict[int, int]:
    return {**numbers, **{rank: numbers.get(rank, 0) + 1 for rank in ranks}}


def _one_less(numbers: Mapping[int, int], rank: int) -> dict[int, int]:
    return {r: number for r, number in {**numbers, rank: numbers[rank] - 1}.items() if number}


def _fill(state: State, first: int | None = None) -> tuple[State, list[Action]]:
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


def _want_change(state: State) -> tuple[State, list[Action]]:
    """Let the members stop at a step boundary when somebody is to join or to leave; paused, they stand at one."""
    if state.phase != "training" or not (state.joiners or _can_leave(state)):
        return state, []
    if state.paused:
        return _change(state)
    if state.hold_why:
        return state, []
    return _send_hold(replace(state, hold_why="change"), state.committed + 2)


def _change(state: State) -> tuple[State, list[Action]]:
    """All members stand at a step boundary: take in who joins, let go who leaves."""
    leaving = _can_leave(state)
    goes_on = state.hold_why if state.hold_why == "pause" else None
    state = replace(state, hold_why=goes_on, leaving=state.leaving - leaving, alive=state.alive - leaving)
    if not (leaving or state.joiners):
        return replace(state, held=frozenset()), [SendRelease(state.members)]
    words = [f"{_ranks(state.joiners)} {_joins(state.joiners)}"] if state.joiners else []
    words += [f"{_ranks(leaving)} {'leave' if len(leaving) > 1 else 'leaves'}"] if leaving else []
    reason = f"Generation {state.generation + 1}: {' and '.join(words)} after step {state.committed}."
    actions: list[Action] = [Emit("regroup_started", reason, None, state.committed)]
    if leaving:
        actions += [SendDrop(tuple(sorted(leaving))), Release(tuple(sorted(leaving)))]
    state, more = _regroup(state)
    return state, actions + more


def _can_leave(state: State) -> frozenset[int]:
    """Of those that shall leave; where no other holds the state, one stays until a newcomer has got it."""
    leaving = state.leaving & state.alive
    return leaving if state.alive - leaving else leaving - {min(leaving, default=0)}


def _joins(ranks: Any) -> str:
    return "join" if len(ranks) > 1 else "joins"


def _open_incident(now: float, state: State, ranks: tuple[int, ...], fault_time: float) -> State:
    """Begin an incident, or add to the one that is open (a second loss during the recovery of the first)."""
    fault_time = min(fault_time, now)
    if state.incident is None:
        return replace(state, incident=Incident(ranks, state.trained, fault_time, now))
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
        ),
    )


def _close_incident(now: float, state: State, actions: list[Action], rank: int) -> State:
    """A failure after the last step, or while paused: recovered, although no step is committed after it."""
    if state.incident:
        commit = StepCommitted(rank, state.generation, state.committed, now)
        actions.append(_recovered(state, state.incident, commit))
    return replace(state, incident=None)


def _same_step_again(
    state: State, actions: list[Action], broken: int, ranks: tuple[int, ...], what: str,
    error: Mapping[str, Any] | None,
) -> tuple[State, bool]:
    """Note that step `broken` broke; True (and the run ends) when it had broken in an earlier generation."""
    before = state.failed_step
    if before is None or before[0] != broken:
        return replace(state, failed_step=(broken, state.trained, f"{_ranks(ranks)} {what}")), False
    if before[1] == state.trained:
        return state, False  # several ranks at once, in the same attempt
    state, _ = _end(
        state, actions, "failed",
        f"Step {broken} failed twice: first {before[2]}; and when it was tried again, {_ranks(ranks)} {what}. That "
        "points at the data or the code of this step, not at a machine. The other ranks stay for %%px; mend the cell "
        "and run it again.",
        error,
    )
    return state, True


def _end(
    state: State, actions: list[Action], outcome: str, reason: str, error: Mapping[str, Any] | None = None
) -> tuple[State, list[Action]]:
    """Close the books and let every living rank go; appends to `actions` and returns it."""
    state = replace(state, phase="ended", end=End(outcome, reason, error))
    actions += _last_actions(state)
    return state, actions


def _last_actions(state: State) -> list[Action]:
    assert state.end is not None
    return [
        CloseGeneration(state.generation, state.committed), SendDrop(tuple(sorted(state.has_run))), state.end,
    ]  # fmt: skip


def _ranks(ranks: Any) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _step_of(failure: Failure) -> int | None:
    return failure.step if failure.step >= 0 else None  # it has no state yet, so it was in no step


def _when(failure: Failure) -> str:
    return f"in step {failure.step}" if failure.step >= 0 else "while it took over the state of the training"


def _place(failure: Failure) -> str:
    line = failure.error.get("lineno")
    return f"step {failure.step}" + (f" (line {line} of the cell)" if line else "")


def _short(error: Mapping[str, Any]) -> str:
    text = f"{error.get('etype', 'an exception')}: {error.get('evalue', '')}".rstrip(": ")
    return text if len(text) <= 200 else text[:197] + "..."
