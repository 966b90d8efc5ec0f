"""Steps that failed while their ranks live: exceptions, broken collectives, replicas that differ, gradients that are
not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftnb.core import checks
from ftnb.core.planning import words
from ftnb.core.planning.basics import (
    blame,
    end,
    fill,
    lose,
    open_incident,
    regroup,
    restart_after,
    restart_words,
    stands,
    vacate,
)
from ftnb.core.planning.state import (
    CLOCK_STEP_S,
    MAX_FRUITLESS_REGROUPS,
    RAISE_GRACE_S,
    STOP_PATIENCE_S,
    UNEXPLAINED_S,
    VERDICTS,
    GoingBack,
    State,
)
from ftnb.core.protocol import Action, Emit, Failure, Kill, NoProgress, StepFailed, Tick


def step_failed(now: float, state: State, event: StepFailed) -> tuple[State, list[Action]]:
    failure = event.failure
    found = failure.cause in VERDICTS
    if failure.cause == "user" or found:
        told = state.verdicts if found else state.raised
        if event.generation != state.trained or event.rank not in state.alive or event.rank in told:
            return state, []
        if found and _is_known(state, failure, event.generation):
            return state, []
        # Kept until the next Go: the rank tells it only once, and a death may call for one generation more.
        if found:
            state = replace(state, verdicts={**state.verdicts, event.rank: failure})
        else:
            state = replace(state, raised={**state.raised, event.rank: failure})
        if state.phase == "regrouping":
            return state, []
    elif event.generation != state.generation or event.rank not in state.members or event.rank in state.left:
        return state, []
    actions: list[Action] = []
    state = replace(state, left=state.left | {event.rank})
    if (failure.cause == "user" or found) and state.raised_since is None:
        state = replace(open_incident(now, state, (), failure.time), raised_since=now)
        if not found:
            reason = f"Rank {event.rank} raised {words.short(failure.error)} {words.when(failure)}."
            actions.append(Emit("rank_suspected", reason, event.rank, words.step_of(failure)))
    elif state.unexplained_since is None:
        state = replace(state, unexplained_since=now)
    if state.raised_since is not None and state.left >= state.alive & set(state.members):
        state, more = _settle(now, state)
        actions += more
    return state, actions


def tick(now: float, state: State, event: Tick) -> tuple[State, list[Action]]:
    if state.raised_since is not None and _is_over(now, state.raised_since, RAISE_GRACE_S):
        return _settle(now, state)
    unexplained = state.unexplained_since if state.raised_since is None else None
    if unexplained is not None and _is_over(now, unexplained, UNEXPLAINED_S):
        reason = "A collective failed, yet no rank died or raised; all ranks connect again."
        return _connect_again(now, state, unexplained, reason, {})
    if state.stop_since is not None and _is_over(now, state.stop_since, STOP_PATIENCE_S):
        return end(state, [], "stopped", "Stopped on request; the step in flight took too long and was given up.")
    return state, []


def _is_over(now: float, since: float, limit_s: float) -> bool:
    return not -CLOCK_STEP_S <= now - since < limit_s


def no_progress(now: float, state: State, event: NoProgress) -> tuple[State, list[Action]]:
    if not event.waiting:
        reason = (
            f"{words.sentence(event.reason)} No rank is more to blame than the others, so none was ended: look where "
            "they stand with %ft_stacks, mend the cell and run it again; if their code only takes long, give it more "
            "time with --hang-timeout."
        )
        return end(state, [], "failed", reason, fields=event.fields)
    if state.phase not in ("forming", "training"):
        return state, []
    return _connect_again(now, state, now, words.sentence(event.reason), event.fields)


def _connect_again(
    now: float, state: State, since: float, reason: str, fields: Mapping[str, Any]
) -> tuple[State, list[Action]]:
    """Nobody is lost and nobody is to blame: the same ranks form a new group."""
    state = open_incident(now, state, (), since)
    if state.fruitless >= MAX_FRUITLESS_REGROUPS:
        reason = f"The ranks could not form a working group in {MAX_FRUITLESS_REGROUPS} attempts in a row."
        return end(state, [], "failed", reason)
    state, more = regroup(replace(state, fruitless=state.fruitless + 1))
    return state, [Emit("regroup_started", reason, fields=fields), *more]


def _settle(now: float, state: State) -> tuple[State, list[Action]]:
    """All have left the step, or had the time to: what did they find?"""
    return judge(now, state) if state.verdicts else regroup(state)


# --- verdicts: what all members find at the same point of a step ---------------------------------------------


def _is_known(state: State, failure: Failure, generation: int | None = None) -> bool:
    """This has been acted upon; somebody is late to tell it, or tells it again because it heard no Go since."""
    verdict = state.going_back.verdict if state.going_back else None
    if verdict is None:
        return False
    return verdict[2] == generation if generation is not None else verdict[:2] == (failure.cause, failure.step)


def hear_verdicts(state: State) -> State:
    """What the ranks found may also be told with their answers to a regroup (it was lost with a supervisor, say)."""
    told = {
        rank: ready.failure
        for rank, ready in state.ready.items()
        if ready.failure is not None and ready.failure.cause in VERDICTS and rank in state.alive
    }
    new = {rank: failure for rank, failure in told.items() if not _is_known(state, failure)}
    return replace(state, verdicts={**new, **state.verdicts}) if new.keys() - state.verdicts.keys() else state


def judge(now: float, state: State) -> tuple[State, list[Action]]:
    """Act upon `verdicts`. The next phase is "regrouping" or "ended"."""
    verdicts, actions = state.verdicts, []
    failure = min(verdicts.values(), key=lambda failure: failure.time)
    if state.phase == "forming":
        state, actions = stands(state)  # what was found takes all members; only their messages are late
    state = replace(state, verdicts={})
    if failure.cause == "nan":
        return _judge_nan(now, state, actions, failure.step, verdicts)
    return _judge_divergence(now, state, actions, failure)


def _judge_nan(
    now: float, state: State, actions: list[Action], step: int, verdicts: Mapping[int, Failure]
) -> tuple[State, list[Action]]:
    told = {
        rank: (bool(verdict.error.get("source")), str(verdict.error.get("where", "")))
        for rank, verdict in sorted(verdicts.items())
    }
    reason = checks.nan_words(step, told)
    fields = {
        "ranks": [rank for rank, (source, _) in told.items() if source],
        "where": {str(rank): where for rank, (source, where) in told.items() if source and where},
    }
    actions.append(Emit("nan_detected", reason, None, step, fields))
    state = replace(state, committed=step - 1)
    no_update = (
        f"{reason} The update of step {step} was not made; the weights are those "
        f"{f'after step {step - 1}' if step > 1 else 'from the start'}. "
    )
    if state.on_nan != "rollback":
        advice = "Try a lower learning rate or --clip-norm, or go on regardless with --on-nan skip or rollback."
        return end(state, actions, "stopped", no_update + advice)
    if state.last_verdict is not None and state.last_verdict[:2] == ("nan", step):
        advice = "All had gone back once, and the same numbers came again. Look at the data of this step, try a lower "
        advice += "learning rate or --clip-norm, or leave such updates out with --on-nan skip."
        return end(state, actions, "stopped", no_update + advice)
    state = replace(state, last_verdict=("nan", step, -1))
    what = f"the gradient of step {step} was not finite"
    return _go_back(now, state, actions, ("nan", step), what, frozenset())


def _judge_divergence(
    now: float, state: State, actions: list[Action], failure: Failure
) -> tuple[State, list[Action]]:
    step = failure.step
    state = replace(state, committed=max(state.committed, step))  # replicas are compared after the commit
    digests = {int(rank): digest for rank, digest in failure.error["digests"].items()}
    odd = checks.odd_ones(digests)
    reason = checks.divergence_words(step, digests)
    fields = {"digests": {str(rank): digest for rank, digest in sorted(digests.items())}, "ranks": list(odd)}
    actions.append(Emit("divergence_detected", reason, None, step, fields))
    suspects = state.alive.intersection(odd) - state.newcomers
    if not state.alive - suspects - state.newcomers:
        suspects = frozenset()  # the others are lost meanwhile: with its earlier state this one is as good as any
    for rank in sorted(suspects):
        words_for_it = (
            f"Rank {rank} holds other values than the majority after step {step}: a bit has flipped in its memory, or "
            "it computes wrongly."
        )
        actions += [
            Emit("rank_suspected", words_for_it, rank, step, {"failure": "bitflip"}),
            Emit("rank_failed", f"Rank {rank} is taken out: its replica differs.", rank, step, {"failure": "bitflip"}),
            Kill(rank, "its replica differs from the others"),
        ]
    return _go_back(now, state, actions, ("divergence", step), f"the replicas differed after step {step}", suspects)


def _go_back(
    now: float, state: State, actions: list[Action], verdict: tuple[str, int], what: str, lost: frozenset[int]
) -> tuple[State, list[Action]]:
    """All go back to an earlier state, without those that are `lost`."""
    in_answers = state.phase == "regrouping"
    if state.incident is None:
        state = open_incident(now, state, (), now)
    state = blame(state, lost)
    if state.incident is not None and not state.incident.what:
        state = replace(state, incident=replace(state.incident, what=f"it was noticed that {what}"))
    waits = bool(state.going_back and state.going_back.waits)
    state = replace(state, going_back=GoingBack(what, waits, (*verdict, state.trained)))
    filled: list[Action] = []
    if lost:
        state = restart_after(lose(state, lost), lost)
        state, filled = fill(vacate(state, lost, state.refill))
        actions += filled
    if in_answers and not lost:
        return state, actions  # who has answered need not answer again
    said = "all ranks go back to an earlier state"
    if lost:
        said += f" without {words.ranks(lost)}"
        if state.going_back and state.going_back.waits:
            said = restart_words(state, lost).rstrip(".")
        elif filled:
            said = f"all ranks go back to an earlier state, and a spare takes the place of {words.ranks(lost)}"
    actions.append(Emit("regroup_started", f"Generation {state.generation + 1}: {said}."))
    state, more = regroup(state)
    return state, actions + more


# --- exceptions of the user's code -----------------------------------------------------------------------------


def judge_exceptions(now: float, state: State) -> tuple[State, list[Action]]:
    """All have answered: end the run where the code is at fault, else leave out who raised."""
    actions: list[Action] = []
    told = {rank: ready.failure for rank, ready in state.ready.items() if ready.failure is not None}
    raised = {
        rank: failure
        for rank, failure in {**told, **state.raised}.items()
        if rank in state.alive and failure.cause == "user"
    }
    if not raised:
        return state, []
    # Those that have just come hold no state yet, and have not tried the step: one of them proves nothing.
    have = {rank for rank in state.alive if state.ready[rank].committed >= 0}
    tried = have.intersection(raised) or raised
    if have and (state.going_back is None or state.going_back.sent is None):
        # Should the run end here: what the survivors have. A rank that died may have been a step ahead.
        state = replace(state, committed=max(state.ready[rank].committed for rank in have))
    first = min(tried, key=lambda rank: raised[rank].time)
    failure = raised[first]
    all_raised = set(raised) | state.left_out
    error = {**failure.error, "rank": first, "step": failure.step, "ranks": sorted(all_raised)}
    # A mistake that ftnb knows: another rank would make it as well.
    if failure.error.get("check") and first in have:
        reason = f"In {words.place(failure)}: {failure.error.get('evalue')}"
        return end(state, actions, "failed", reason, error)
    if have and have <= raised.keys():
        everyone = "Every rank" if len(all_raised) > 1 else f"Rank {first}, the only one left,"
        reason = (
            f"{everyone} raised {words.short(failure.error)} in {words.place(failure)}: a bug in the training "
            "code. Nothing was killed; look at the ranks with %%px, mend the cell and run it again."
        )
        return end(state, actions, "failed", reason, error)
    if first in have:
        what = f"raised {words.short(failure.error)}"
        state, ended = same_step_again(state, actions, failure.step, tuple(sorted(tried)), what, error)
        if ended:
            return state, actions
    for rank in sorted(raised):
        reason = f"Rank {rank} raised {words.short(raised[rank].error)}."
        step = words.step_of(raised[rank])
        actions.append(Emit("rank_failed", reason, rank, step, {"failure": "exception"}))
        if not state.restart:
            reason = f"Rank {rank} is left out of generation {state.generation}; the step is tried without it."
            actions.append(Emit("rank_fenced", reason, rank))
    state = blame(state, raised)
    if state.restart:
        return _replace_raisers(state, actions, frozenset(raised))
    survivors = len(state.alive) - len(raised)
    going_on = f"{'try' if survivors > 1 else 'tries'} step {failure.step} again"
    if first not in have:
        going_on = f"{'go' if survivors > 1 else 'goes'} on"
    reason = f"Generation {state.generation}: {words.count(survivors)} {going_on} without {words.ranks(raised)}."
    actions.append(Emit("regroup_started", reason))
    state = replace(
        state,
        alive=state.alive.difference(raised),
        left_out=state.left_out.union(raised),
        newcomers=state.newcomers.difference(raised),
    )
    if state.incident:
        state = replace(state, incident=replace(state.incident, fenced=state.incident.fenced or now))
    return state, actions


def _replace_raisers(state: State, actions: list[Action], raised: frozenset[int]) -> tuple[State, list[Action]]:
    """With recovery "restart" nothing goes on before all slots are filled, so they cannot wait for a step's success."""
    actions += [Kill(rank, "it raised an exception, and is to be replaced") for rank in sorted(raised)]
    state = restart_after(lose(state, raised), raised)
    state, filled = fill(vacate(state, raised, state.refill))
    reason = f"Generation {state.generation}: {restart_words(state, raised)}"
    return state, [*actions, *filled, Emit("regroup_started", reason)]


def same_step_again(
    state: State, actions: list[Action], broken: int, ranks: tuple[int, ...], what: str, error: Mapping[str, Any] | None
) -> tuple[State, bool]:
    """Note that step `broken` broke; True (and the run ends) when it had broken in an earlier generation."""
    before = state.failed_step
    if before is None or before[0] != broken:
        return replace(state, failed_step=(broken, state.trained, f"{words.ranks(ranks)} {what}")), False
    if before[1] == state.trained:
        return state, False  # several ranks at once, in the same attempt
    reason = (
        f"Step {broken} failed twice: first {before[2]}; and when it was tried again, {words.ranks(ranks)} {what}. "
        "That points at the data or the code of this step, not at a machine. The other ranks stay for %%px; mend the "
        "cell and run it again."
    )
    state, _ = end(state, actions, "failed", reason, error)
    return state, True
