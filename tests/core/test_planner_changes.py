"""The planner when ranks are replaced, join, leave, and when the supervisor itself dies and another goes on.

Readable cases first, then random stories (see simulated_ranks.py).
"""

from __future__ import annotations

import random

import pytest
from simulated_ranks import World

from ftnb.core import planner
from ftnb.core.planner import (
    Adopted,
    CloseGeneration,
    End,
    Failure,
    HoldAnswered,
    HoldWanted,
    Kill,
    RankDied,
    RankFenced,
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
    SpareReady,
    Started,
    StepCommitted,
    StepFailed,
    TakeSpare,
    Tick,
    Unpause,
)
from ftnb.core.protocol import Standing


def play(state, *events, now=50.0):
    """The state after `events`, and the actions that the last of them led to."""
    actions = []
    for event in events:
        state, actions = planner.step(now, state, event)
    return state, actions


def in_training(members=(0, 1, 2), *, refill=True):
    """The planner's state in generation 1, all formed; nothing committed yet."""
    state, _ = play(planner.new(20, refill), Started(members), *[RankReady(rank, 1, 0) for rank in members])
    return play(state, *[RankFormed(rank, 1, 10.0, 10.0) for rank in members])[0]


def died(rank, failure="kill"):
    return RankDied(rank, failure, "it was killed (SIGKILL)", 50.0)


def user_error(step, **error):
    return Failure("user", step, 50.0, {"etype": "ValueError", "evalue": "no", **error})


def formed_again(state, generation, committed, newcomers=(), step=None):
    """Every rank answers, forms, and (if `step` is given) the first of them commits it."""
    for rank in sorted(state.alive):
        state, _ = play(state, RankReady(rank, generation, -1 if rank in newcomers else committed))
    members = state.members
    state, actions = play(state, *[RankFormed(rank, generation, 51.0, 51.0) for rank in members])
    if step is not None:
        state, actions = play(state, StepCommitted(members[0], generation, step, 52.0))
    return state, actions


def standing(state, stage="training", **other):
    stages = dict.fromkeys(state.has_run, stage) | {int(rank[1:]): stage for rank, stage in other.items()}
    return {rank: Standing(state.generation, stage, state.committed) for rank, stage in stages.items()}


def only(kind, actions):
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def kinds(actions):
    return [action.kind for action in actions if isinstance(action, planner.Emit)]


# --- replacing ---------------------------------------------------------------------------------------------


def test_a_warm_spare_joins_in_the_generation_that_the_failure_calls_for_anyway():
    state, _ = play(in_training(), SpareReady())
    state, actions = play(state, died(1))
    assert [type(action) for action in actions if not isinstance(action, planner.Emit)] == [
        Kill, TakeSpare, SendRegroup,
    ], "the old process is ended before the slot is taken, and that before anything is sent to the new one"  # fmt: skip
    assert only(SendRegroup, actions).ranks == (0, 1, 2)
    state, _ = play(state, RankReady(0, 2, 4), RankReady(2, 2, 4), RankReady(1, 2, -1))
    state, actions = play(state, RankFenced(1))
    go = only(SendGo, actions)
    assert (go.members, go.source, go.behind, go.first_step) == ((0, 1, 2), 0, (1,), 5)
    state, actions = play(state, *[RankFormed(rank, 2, 51.0, 51.0) for rank in (0, 1, 2)])
    assert kinds(actions) == ["regrouped", "rank_joined"]
    _, actions = play(state, StepCommitted(0, 2, 5, 52.0))
    assert kinds(actions) == ["recovered"]


def test_a_replacement_joins_at_a_step_boundary_and_no_step_is_done_again():
    world = World(4, 10**6, refill=True)
    world.until(lambda: world.state.committed >= 3)
    world.die(2)
    world.settle()
    _, shrunk, grown = world.all_of(SendGo)
    assert (shrunk.members, grown.members) == ((0, 1, 3), (0, 1, 2, 3))
    assert grown.behind == (2,) and world.planned_generation == grown.generation
    assert world.kinds() == [
        "rank_failed", "regroup_started", "rank_fenced", "regrouped", "recovered", "regroup_started", "regrouped",
        "rank_joined",
    ]  # fmt: skip


def test_without_refill_a_lost_rank_is_not_replaced_until_the_run_is_resized():
    state, _ = play(in_training(refill=False), SpareReady(), died(1))
    assert state.vacant == frozenset() and state.spares == 1
    _, actions = play(state, Resized(3))
    assert only(TakeSpare, actions) == TakeSpare(1)


def test_a_process_takes_the_slot_it_was_started_for():
    state, _ = play(in_training((0, 1, 2, 3)), died(1), died(2))
    _, actions = play(state, SpareReady(2))
    assert only(TakeSpare, actions) == TakeSpare(2)


@pytest.mark.parametrize("refill", [True, False])
def test_a_joiner_that_is_lost_before_it_entered_breaks_nothing_and_its_slot_stays_vacant(refill):
    state, _ = play(in_training(refill=refill), Resized(4), SpareReady(3))
    state, actions = play(state, died(3))
    assert kinds(actions) == ["spare_lost"] and state.vacant == {3}
    assert (state.phase, state.generation, state.incident) == ("training", 1, None)


@pytest.mark.parametrize("refill", [True, False])
def test_a_newcomer_that_is_lost_before_it_got_the_state_leaves_its_slot_vacant(refill):
    state, _ = play(in_training(refill=refill), Resized(4), SpareReady(3), died(0), RankFenced(0))
    assert state.newcomers == {3}
    state, _ = play(state, died(3))
    assert 3 in state.vacant and (0 in state.vacant) == refill


def test_a_rank_that_was_left_out_and_dies_is_not_told_as_fenced_twice():
    state, _ = play(in_training(), StepFailed(1, 1, user_error(1)))
    state, _ = play(state, Tick(), now=51.0)
    answers = RankReady(0, 2, 0), RankReady(1, 2, 0, 1, user_error(1)), RankReady(2, 2, 0)
    state, actions = play(state, *answers)
    assert kinds(actions)[:2] == ["rank_failed", "rank_fenced"]
    state, actions = play(state, died(1), RankFenced(1))
    assert actions == [] and not state.unfenced and not state.silently


def test_a_newcomer_that_crashes_before_it_holds_the_state_does_not_condemn_the_step():
    state, _ = play(in_training(), SpareReady(), died(1), RankFenced(1), died(1, "crash"), SpareReady(1), RankFenced(1))
    state, _ = play(state, died(1, "crash"))
    assert state.phase == "regrouping" and state.failed_step is None


def test_newcomers_that_raise_are_left_out_and_condemn_nobody():
    state, _ = play(in_training(), SpareReady(), died(1), RankFenced(1))
    state, _ = play(state, RankReady(0, 2, 4), RankReady(1, 2, -1), RankReady(2, 2, 4))
    wrong = user_error(-1, check=True)  # even a mistake that ftnb knows: the others did not make it
    state, actions = play(state, StepFailed(1, 2, wrong))
    assert kinds(actions) == ["rank_suspected"] and "while it took over the state" in actions[0].reason
    state, _ = play(state, Tick(), now=51.0)
    state, actions = play(state, RankReady(0, 3, 4), RankReady(1, 3, -1, None, wrong), RankReady(2, 3, 4))
    assert only(SendGo, actions).members == (0, 2)
    assert state.left_out == {1} and state.failed_step is None
    state, actions = play(state, RankFormed(0, 3, 52.0, 52.0), RankFormed(2, 3, 52.0, 52.0))
    assert kinds(actions) == ["regrouped"], "it has not joined"


def test_an_exception_by_all_ranks_with_state_ends_the_run_whatever_newcomers_do():
    state, _ = play(in_training(), SpareReady(), died(1), RankFenced(1), StepFailed(0, 1, user_error(5)))
    _, actions = play(
        state, RankReady(0, 2, 4), RankReady(1, 2, -1), RankReady(2, 2, 4, 5, user_error(5)),
    )  # fmt: skip
    assert only(End, actions).reason.startswith("Every rank raised ValueError: no in step 5")


def test_newcomers_alone_cannot_go_on():
    state, _ = play(in_training((0, 1)), SpareReady(), SpareReady(), died(0), died(1))
    assert state.phase == "regrouping", "the process that took slot 0 lives"
    _, actions = play(state, RankFenced(0), RankFenced(1), RankReady(0, 3, -1), RankReady(1, 3, -1))
    assert only(End, actions).reason.startswith("All ranks that held the state of the training are lost")


# --- resizing ----------------------------------------------------------------------------------------------


def test_growing_and_shrinking():
    world = World(2, 10**6)
    world.until(lambda: world.state.committed >= 2)
    world.resize(4)
    world.settle()
    assert world.state.members == (0, 1, 2, 3)
    world.resize(1)
    world.settle()
    assert world.state.members == (0,)
    assert [a.ranks for a in world.all_of(Release)] == [(1, 2, 3)]
    assert "recovered" not in world.kinds() and "rank_failed" not in world.kinds()


def test_ranks_leave_at_a_step_boundary():
    state, actions = play(in_training(), Resized(2))
    hold = only(SendHold, actions)
    state, actions = play(state, *[RankHeld(rank, 1, hold.after_step) for rank in (0, 1, 2)])
    assert only(SendDrop, actions).ranks == only(Release, actions).ranks == (2,)
    assert only(SendRegroup, actions).ranks == (0, 1)


def test_while_paused_who_leaves_or_joins_does_so_at_once():
    state, actions = play(in_training(), HoldWanted("pause", 0))
    after = only(SendHold, actions).after_step
    state, _ = play(state, *[RankHeld(rank, 1, after) for rank in (0, 1, 2)])
    state, actions = play(state, Resized(2))
    assert only(Release, actions).ranks == (2,)
    assert only(SendRegroup, actions).ranks == (0, 1)
    state, actions = play(state, *[RankReady(rank, 2, after) for rank in (0, 1)])
    assert only(SendGo, actions).hold_after == after, "they stay where they are"
    state, actions = play(state, *[RankFormed(rank, 2, 1.0, 1.0) for rank in (0, 1)])
    state, actions = play(state, *[RankHeld(rank, 2, after) for rank in (0, 1)])
    assert state.paused and actions == [], "nothing new to tell"
    state, actions = play(state, Unpause())
    assert only(SendRelease, actions).ranks == (0, 1)


def test_an_unpause_while_somebody_is_to_join_heeds_the_answers_to_the_hold():
    state, actions = play(in_training((0, 1)), HoldWanted("pause", 0))
    hold = only(SendHold, actions)
    state, _ = play(state, Resized(3), SpareReady(2), Unpause(), HoldAnswered(0, hold.hold_id, True, 2))
    _, actions = play(state, HoldAnswered(1, hold.hold_id, False, hold.after_step + 1))
    assert only(SendHold, actions).after_step > hold.after_step + 1


def test_the_last_rank_with_the_state_leaves_when_a_newcomer_has_got_it():
    state, _ = play(in_training((0, 1, 2)), died(0), RankFenced(0))
    state, _ = formed_again(state, 2, 4, step=5)
    state, actions = play(state, Resized(1))
    hold = only(SendHold, actions)
    state, actions = play(state, RankHeld(1, 2, hold.after_step), RankHeld(2, 2, hold.after_step))
    assert only(Release, actions).ranks == (2,), "one has to stay"
    state, actions = formed_again(state, 3, hold.after_step)
    assert not any(isinstance(action, SendHold) for action in actions)
    state, actions = play(state, SpareReady(0))
    hold = only(SendHold, actions)
    state, _ = play(state, RankHeld(1, 3, hold.after_step))
    state, actions = formed_again(state, 4, hold.after_step, newcomers=(0,))
    assert state.members == (0, 1)
    hold = only(SendHold, actions)
    _, actions = play(state, *[RankHeld(rank, 4, hold.after_step) for rank in (0, 1)])
    assert only(Release, actions).ranks == (1,)


def test_a_slot_that_is_resized_away_is_not_filled_and_who_was_to_take_it_goes():
    state, _ = play(in_training(), Resized(5), SpareReady(4))
    state, actions = play(state, Resized(3))
    assert only(Release, actions).ranks == (4,) and not state.vacant and not state.joiners
    assert play(state, SpareReady(3))[1] == []


# --- a new supervisor --------------------------------------------------------------------------------------


def test_a_training_that_goes_on_is_left_alone():
    before, _ = play(in_training(), StepCommitted(0, 1, 3, 49.0))
    state, actions = play(before, Adopted(standing(before)))
    assert (state.generation, state.phase, state.committed) == (1, "training", 3)
    # Should the supervisor before have died between an unpause and telling the ranks.
    assert actions == [SendRelease((0, 1, 2))]
    _, actions = play(before, Adopted(standing(before, r1="finished")))
    assert kinds(actions) == []


@pytest.mark.parametrize("stage", ["waiting", "ready", "held"])
def test_whoever_does_not_train_may_have_said_why_to_the_dead_supervisor(stage):
    before = in_training()
    _, actions = play(before, Adopted(standing(before, r1=stage)))
    assert only(SendRegroup, actions) == SendRegroup(2, (0, 1, 2)) and kinds(actions) == ["regroup_started"]


def test_a_pause_lasts():
    state, actions = play(in_training(), HoldWanted("pause", 0))
    after = only(SendHold, actions).after_step
    state, _ = play(state, *[RankHeld(rank, 1, after) for rank in (0, 1, 2)])
    state, actions = play(state, Adopted(standing(state, "held")))
    assert actions == [] and state.paused


@pytest.mark.parametrize("events", [(died(1),), (died(1), RankFenced(1), RankReady(0, 2, 4), RankReady(2, 2, 4))])
def test_a_generation_that_had_not_begun_is_begun_anew(events):
    before, _ = play(in_training(refill=False), *events)
    _, actions = play(before, Adopted(standing(before, "ready")))
    assert only(SendRegroup, actions) == SendRegroup(3, (0, 2))


def test_a_generation_whose_first_steps_nobody_heard_of_stands():
    """It has lines in the books, so the events name it. A commit proves that all of it were there."""
    before, _ = play(in_training(), SpareReady(), died(1), RankFenced(1), *[RankReady(r, 2, 4) for r in (0, 2)])
    before, _ = play(before, RankReady(1, 2, -1), RankFormed(2, 2, 52.0, 52.0), StepCommitted(2, 2, 5, 53.0))
    assert before.phase == "forming" and before.first_step == 5
    there = {0: Standing(2, "training", 7), 1: Standing(2, "finished", 8), 2: Standing(2, "training", 7)}
    state, actions = play(before, Adopted(there))
    assert kinds(actions) == ["regrouped", "rank_joined"] and only(SendRelease, actions).ranks == (0, 1, 2)
    assert (state.phase, state.generation, state.newcomers) == ("training", 2, frozenset())
    assert kinds(play(state, StepCommitted(0, 2, 6, 54.0))[1]) == ["recovered"]
    _, actions = play(before, Adopted({**there, 2: Standing(2, "waiting", 6)}))
    assert kinds(actions) == ["regrouped", "rank_joined", "regroup_started"]
    assert only(SendRegroup, actions) == SendRegroup(3, (0, 1, 2))


def test_the_spares_are_counted_anew():
    state, _ = play(in_training(), SpareReady(), SpareReady())
    state, _ = play(state, Adopted(standing(state)), SpareReady())
    assert state.spares == 1


def test_a_slot_that_nobody_took_before_the_supervisor_died_is_vacant_again():
    state, _ = play(in_training(refill=False), Resized(4), SpareReady(3))
    there = {rank: Standing(1, "training", 0) for rank in (0, 1, 2)}
    state, actions = play(state, Adopted(there))
    assert state.vacant == {3} and 3 not in only(SendRegroup, actions).ranks
    assert only(Kill, actions).rank == 3, "should somebody have taken it and be gone"
    _, actions = play(state, SpareReady(3))
    assert only(TakeSpare, actions) == TakeSpare(3)


def test_a_rank_that_was_to_be_killed_is_not_taken_for_the_one_that_was_to_take_its_place():
    state, _ = play(in_training(), SpareReady(), StepFailed(1, 1, user_error(1)))
    state, _ = play(state, Tick(), now=51.0)
    state, _ = play(state, RankReady(0, 2, 0), RankReady(1, 2, 0, 1, user_error(1)), RankReady(2, 2, 0))
    state, _ = play(state, RankFormed(0, 2, 52.0, 52.0), RankFormed(2, 2, 52.0, 52.0))
    state, actions = play(state, StepCommitted(0, 2, 1, 53.0))
    assert only(Kill, actions).rank == 1 and only(TakeSpare, actions) == TakeSpare(1)
    there = {0: Standing(2, "training", 1), 1: Standing(2, "waiting", 0), 2: Standing(2, "training", 1)}
    state, actions = play(state, Adopted(there))  # neither of the two was carried out
    assert only(Kill, actions).rank == 1 and only(SendRegroup, actions).ranks == (0, 2)
    assert state.vacant == {1} and not state.joiners


def test_a_run_whose_end_was_decided_is_ended():
    state, _ = play(in_training((0, 1)), HoldWanted("stop", 0), now=50.0)
    state, decided = play(state, Tick(), now=50.0 + planner.STOP_PATIENCE_S)
    assert only(End, decided).state == "stopped"
    state = planner.from_json(planner.to_json(state))
    again, actions = play(state, Adopted(standing(state)))
    assert actions == decided and again is state
    assert only(CloseGeneration, actions).last_committed == 0
    assert play(state, Tick()) == (state, [])


# --- anything at any moment --------------------------------------------------------------------------------

LONG_RUN = 10**6


def story(seed: int) -> World:
    """A run with any trouble at any moment; afterwards all is well again, or the run has a good reason to end.

    A `calm` story never loses the last rank that is well: its run goes on at the size that is wanted. All other
    stories must only end somehow. Every promise is asserted in `World` meanwhile.
    """
    dice = random.Random(seed)
    calm, endless = dice.random() < 0.6, dice.random() < 0.6
    world = World(
        dice.randint(1, 5), LONG_RUN if endless else dice.randint(1, 30), notices_peers=dice.random() < 0.7,
        has_buffers=dice.random() < 0.5, reports_first=dice.random() < 0.7, refill=dice.random() < 0.7,
        num_spares=dice.choice((0, 0, 1, 2)), seed=seed, restart=dice.random() < 0.35,
        on_nan=dice.choice(("stop", "rollback", "rollback")), check_replicas=dice.choice((None, 1, 2, 3, 5)),
    )  # fmt: skip
    may_raise = may_be_nan = may_flip = True
    kinds = [
        "die", "die", "pooled", "supervisor", "supervisor", "resize", "pause", "unpause", "raise", "break", "repeat",
        "hang", "hang", "resume", "condemn", "flip", "flip", "nan", "stand still",
    ]  # fmt: skip
    kinds = dice.sample(kinds, dice.randint(1, len(kinds)))
    if calm and world.on_nan == "stop":
        kinds = [kind for kind in kinds if kind != "nan"] or ["die"]
    if calm and ("resize" in kinds or not world.refill):  # or the only ranks that are well might be those that leave
        kinds = [kind for kind in kinds if kind != "raise"] or ["die"]
    for _ in range(dice.randint(1, 12)):
        world.go_on(dice.choice((5, 20, 60, 200, 500)), dice.randrange(2**32))
        if world.end is not None:
            break
        kind = dice.choice(kinds)
        numbers = [rank.number for rank in world.ranks]
        if kind == "die":
            for number in dice.sample(numbers, dice.randint(1, min(2, len(numbers)))):
                if not calm:
                    world.die(number, dice.choice(("kill", "kill", "exit", "crash")))
                elif world.can_spare(number):
                    world.die(number)
        elif kind == "pooled":
            world.lose_pooled(dice.randrange(8))
        elif kind == "supervisor":
            world.kill_supervisor(dice.choice((None, 0, 1, 2, 3)))
        elif kind == "resize" and not (calm and world.unheard_deaths):
            world.resize(dice.randint(1, 6))
        elif kind in ("pause", "unpause"):
            getattr(world, kind)()
        elif kind == "raise":
            number = dice.choice(numbers)
            if not calm or (may_raise and world.can_spare(number)):
                may_raise = False
                world.raise_in(number, dice.choice(("share", "forward", "update", "evaluate")))
        elif kind == "break":
            world.break_connection(dice.choice(numbers))
            world.tick(dice.choice((0.1, 1.0)))
        elif kind == "repeat":
            world.repeat_all()
        elif kind in ("hang", "condemn"):
            number = dice.choice(numbers)
            if not calm or world.can_spare(number):
                getattr(world, kind)(number)
        elif kind == "resume":
            world.resume(dice.choice(numbers))
        elif kind == "flip" and may_flip:
            may_flip = not calm  # two between the same two checks look like a mistake in the cell
            world.flip(dice.choice(numbers))
        elif kind == "nan" and may_be_nan:
            may_be_nan = not calm  # the same for two in the same step
            world.raise_in(dice.choice(numbers), "nan")
        elif kind == "stand still":
            world.no_progress(waiting=calm or dice.random() < 0.9)
            if not calm and dice.random() < 0.2:
                world.nan_step = world.state.committed + dice.randint(1, 4)
            elif not calm and world.restart and dice.random() < 0.2:
                world.nobody_comes = "the notebook is gone"
    if endless and calm and "could not form" not in str(world.end):
        world.keeps = True
        if not world.refill and world.end is None:
            world.until(lambda: not world.down and not world.unheard_deaths)
            world.resize(world.state.wanted)
        world.settle()
        assert len(world.state.members) == world.state.wanted
    if endless and world.end is None:
        world.until(lambda: not world.down)
        world.stop()
    end = world.drain()
    if calm and "could not form" not in end.reason:
        assert end.state == ("stopped" if endless else "finished"), end
    return world


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_any_story(first):
    for seed in range(first, first + 50):
        try:
            story(seed)
        except AssertionError as error:
            error.add_note(f"story({seed})")
            raise


@pytest.mark.long
def test_many_stories():
    for seed in range(10_000, 16_000):
        story(seed)
