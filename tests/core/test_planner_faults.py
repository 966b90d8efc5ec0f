"""The planner when ranks live and are no use: condemned, in the way, with other weights than the others, NaN, restarts.

Random stories with all of it are in test_planner_changes.py.
"""

from __future__ import annotations

import json

import pytest
from simulated_ranks import World

from ftnb.core import planner
from ftnb.core.protocol import (
    Adopted,
    CloseGeneration,
    Emit,
    End,
    Failure,
    HoldWanted,
    Kill,
    NobodyComes,
    NoProgress,
    OpenGeneration,
    RankCondemned,
    RankDied,
    RankFenced,
    RankFormed,
    RankHeld,
    RankReady,
    Resized,
    SendDrop,
    SendGo,
    SendHold,
    SendRegroup,
    SpareReady,
    Standing,
    Started,
    StepCommitted,
    StepFailed,
    TakeSpare,
    Tick,
    Unpause,
)


def play(state, *events, now=50.0):
    """The state after `events` (each time also written down and read again), and what the last of them led to."""
    actions = []
    for event in events:
        state, actions = planner.step(now, state, event)
        assert planner.from_json(planner.to_json(state)) == state
    return state, actions


def in_training(members=(0, 1, 2), committed=0, **options):
    """The planner's state in generation 1, all formed."""
    state, _ = play(planner.new(200, **options), Started(members), *[RankReady(r, 1, 0, anchor=0) for r in members])
    state, _ = play(state, *[RankFormed(rank, 1, 10.0, 10.0) for rank in members])
    return play(state, StepCommitted(members[0], 1, committed, 49.0))[0] if committed else state


def died(rank, failure="kill"):
    return RankDied(rank, failure, "it was killed (SIGKILL)", 50.0)


def condemned(rank, failure="hang", **fields):
    return RankCondemned(rank, failure, "has been stopped for 0.5 s (SIGSTOP)", 49.5, fields)


def user_error(step):
    return Failure("user", step, 50.0, {"etype": "ValueError", "evalue": "bad sample"})


def differs(step, digests, time=50.0):
    return Failure("divergence", step, time, {"digests": {str(rank): text for rank, text in digests.items()}})


def not_finite(step, source=False, where="", time=50.0):
    return Failure("nan", step, time, {"source": source, "where": where})


def broken(step):
    return Failure("collective", step, 50.0)


def answers(state, committed, anchor=0, in_flight=None, newcomers=(), **other):
    """Every living rank answers; newcomers hold nothing but the initial state."""
    events = []
    for rank in sorted(state.alive):
        if rank in newcomers:
            events.append(RankReady(rank, state.generation, -1, anchor=0))
        else:
            kept = other.get(f"anchor{rank}", anchor)
            events.append(RankReady(rank, state.generation, committed, in_flight, other.get(f"failure{rank}"), kept))
    return events


def all_formed(state):
    return [RankFormed(rank, state.generation, 51.0, 51.2) for rank in state.members]


def only(kind, actions):
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def event(kind, actions):
    found = [action for action in actions if isinstance(action, Emit) and action.kind == kind]
    assert len(found) == 1, actions
    return found[0]


def kinds(actions):
    return [action.kind for action in actions if isinstance(action, Emit)]


# --- condemned ranks ---------------------------------------------------------------------------------------


def test_a_condemned_rank_is_suspected_failed_killed_and_the_others_regroup():
    state, actions = play(in_training(committed=4), condemned(1, phi=8.2, stands=[{"ranks": [1]}]))
    assert kinds(actions) == ["rank_suspected", "rank_failed", "regroup_started"]
    suspected, failed = event("rank_suspected", actions), event("rank_failed", actions)
    assert suspected.reason == failed.reason == "Rank 1 has been stopped for 0.5 s (SIGSTOP)."
    assert suspected.fields == {"failure": "hang", "phi": 8.2, "stands": [{"ranks": [1]}]}
    assert failed.fields == {"failure": "hang", "phi": 8.2} and failed.step == 5
    assert only(Kill, actions).rank == 1
    assert only(SendRegroup, actions).ranks == (0, 2)
    state, actions = play(state, *answers(state, 4, in_flight=5))
    assert actions == [], "it may still do harm"
    state, actions = play(state, RankFenced(1))
    assert only(SendGo, actions).members == (0, 2) and only(SendGo, actions).restore is None
    state, _ = play(state, *all_formed(state))
    recovered = event("recovered", play(state, StepCommitted(0, 2, 5, 52.0))[1])
    assert recovered.fields["ranks"] == [1] and recovered.fields["detect_s"] == pytest.approx(0.5)
    assert "rolled_back_to" not in recovered.fields


def test_the_death_of_a_condemned_rank_and_what_it_still_says_are_no_news():
    state, _ = play(in_training(), condemned(1))
    late = died(1), condemned(1), RankReady(1, 2, 0), StepFailed(1, 1, user_error(1)), StepCommitted(1, 1, 1, 49.0)
    for news in late:
        assert planner.step(50.0, state, news) == (state, [])


def test_a_condemned_rank_that_never_answers_holds_nobody_up():
    state, _ = play(in_training((0, 1, 2, 3)), died(3), RankFenced(3), RankReady(0, 2, 0), RankReady(2, 2, 0))
    state, actions = play(state, condemned(1, "stall"))
    assert only(SendRegroup, actions).ranks == (0, 2)
    state, actions = play(state, RankFenced(1), *answers(state, 0))
    assert only(SendGo, actions).members == (0, 2)
    assert state.incident.ranks == (1, 3)


def test_a_rank_can_be_condemned_while_the_group_forms():
    state, _ = play(in_training(), died(2), RankFenced(2), RankReady(0, 2, 0), RankReady(1, 2, 0), RankFormed(0, 2, 1, 1))
    assert state.phase == "forming"
    _, actions = play(state, condemned(1, "partition"))
    assert only(SendRegroup, actions).ranks == (0,)


def test_a_spare_takes_the_place_of_a_condemned_rank_at_once():
    _, actions = play(in_training(refill=True), SpareReady(), condemned(1))
    acts = [type(action) for action in actions if not isinstance(action, Emit)]
    assert acts == [Kill, TakeSpare, SendRegroup]
    assert only(SendRegroup, actions).ranks == (0, 1, 2)


def test_hung_ranks_are_no_reason_to_blame_the_step():
    """The same step twice: for crashes and exceptions that ends the run."""
    state, _ = play(in_training((0, 1, 2, 3), committed=4), condemned(3), RankFenced(3))
    state, _ = play(state, *answers(state, 4))
    state, actions = play(state, condemned(2))
    assert only(SendRegroup, actions).ranks == (0, 1)


def test_when_the_last_rank_is_condemned_the_run_ends():
    _, actions = play(in_training((0,), committed=4), condemned(0, "stall"))
    assert only(End, actions) == End(
        "failed", "All ranks are lost; the last one was rank 0, which has been stopped for 0.5 s (SIGSTOP)."
    )
    assert only(Kill, actions).rank == 0


def test_a_joiner_that_is_condemned_before_it_entered_breaks_nothing():
    state, _ = play(in_training(), Resized(4), SpareReady(3))
    state, actions = play(state, condemned(3))
    assert kinds(actions) == ["spare_lost"] and only(Kill, actions).rank == 3 and state.vacant == {3}
    assert state.incident is None and state.generation == 1


def test_a_rank_that_was_left_out_and_hangs_is_killed_without_a_word():
    state, _ = play(in_training(), StepFailed(1, 1, user_error(1)))
    state, _ = play(state, Tick(), now=51.0)
    state, _ = play(state, RankReady(0, 2, 0), RankReady(1, 2, 0, 1, user_error(1)), RankReady(2, 2, 0))
    state, actions = play(state, condemned(1))
    assert kinds(actions) == [] and only(Kill, actions).rank == 1 and not state.left_out


def test_a_condemned_rank_that_lives_is_not_taken_for_the_one_that_was_to_take_its_place():
    """The supervisor died before it could kill the one and start the other."""
    before, _ = play(in_training(refill=True, committed=4), SpareReady(), condemned(1))
    assert before.newcomers == {1}
    there = {0: Standing(1, "waiting", 4), 1: Standing(1, "training", 4), 2: Standing(1, "waiting", 4)}
    state, actions = play(before, Adopted(there))
    assert only(Kill, actions).rank == 1 and only(SendRegroup, actions).ranks == (0, 2)
    assert state.vacant == {1} and not state.newcomers
    there[1] = Standing(0, "waiting", 0)
    assert only(Kill, play(before, Adopted(there))[1]).rank == 1, "it had not even begun"
    there[1] = Standing(0, "waiting", -1)
    state, actions = play(before, Adopted(there))
    assert only(SendRegroup, actions).ranks == (0, 1, 2), "the right one has taken it"


@pytest.mark.parametrize("restart", [False, True])
def test_nor_is_one_that_was_stopped_while_the_new_supervisor_asked(restart):
    before, _ = play(in_training(refill=True, restart=restart, committed=4), SpareReady(), condemned(1))
    there = {0: Standing(1, "waiting", 4), 2: Standing(1, "waiting", 4)}
    state, actions = play(before, Adopted(there), RankFenced(1), RankReady(0, 3, 4, anchor=0), RankReady(1, 3, 4, anchor=0))
    assert only(Kill, actions).rank == 1 and state.vacant == {1} and state.alive == {0, 2}
    state, actions = play(state, RankFenced(1))
    assert actions == [], "it was told as fenced before"
    state, actions = play(state, RankReady(2, 3, 4, anchor=0))
    assert bool(actions) != restart, "the others go on, or wait"
    state, actions = play(before, Adopted(there), SpareReady(), RankReady(1, 3, 4, anchor=0))
    assert only(TakeSpare, actions).rank == 1 and only(SendRegroup, actions).ranks == (0, 1, 2)


def test_ranks_that_hang_in_a_world():
    world = World(4, total_steps=12)
    world.until(lambda: world.state.committed >= 2)
    world.hang(2)
    assert world.drain().state == "finished"
    assert world.kinds() == ["rank_suspected", "rank_failed", "regroup_started", "rank_fenced", "regrouped", "recovered"]
    assert world.all_of(SendGo)[-1].members == (0, 1, 3)


# --- no progress -------------------------------------------------------------------------------------------


def test_ranks_that_all_wait_connect_again():
    standstill = NoProgress(True, "all ranks wait in the all-reduce of step 5", {"stands": []})
    state, actions = play(in_training(committed=4), standstill)
    started = event("regroup_started", actions)
    assert started.reason == "All ranks wait in the all-reduce of step 5." and started.fields == {"stands": []}
    assert only(SendRegroup, actions).ranks == (0, 1, 2)
    assert planner.step(50.0, state, standstill) == (state, [])
    for _ in range(planner.MAX_FRUITLESS_REGROUPS):
        state, _ = play(state, *answers(state, 4))
        state, actions = play(state, *all_formed(state), standstill)
    assert "could not form a working group" in only(End, actions).reason


def test_ranks_that_are_all_stuck_in_their_own_code_end_the_run_and_nobody_is_killed():
    stands = {"stands": [{"ranks": [0, 1, 2], "place": "forward", "step": 5, "stack": ["a line"]}]}
    _, actions = play(in_training(), NoProgress(False, "every rank has been in its forward pass for 30 s", stands))
    end = only(End, actions)
    assert end.fields == stands
    assert end.state == "failed" and end.reason.startswith("Every rank has been in its forward pass for 30 s. No rank")
    assert "--hang-timeout" in end.reason and only(SendDrop, actions).ranks == (0, 1, 2)
    assert not any(isinstance(action, Kill) for action in actions)


# --- replicas that differ ----------------------------------------------------------------------------------

ODD = {0: "a", 1: "b", 2: "a"}


def diverged(step=40, digests=ODD, **options):
    """All members have found in `step` that their replicas differ."""
    state = in_training(tuple(digests), committed=step, **options)
    return play(state, *[StepFailed(rank, 1, differs(step, digests)) for rank in digests])


def test_the_odd_one_is_named_and_killed_and_all_others_go_back():
    state, actions = diverged()
    assert kinds(actions) == ["divergence_detected", "rank_suspected", "rank_failed", "regroup_started"]
    detected = event("divergence_detected", actions)
    assert detected.reason == "After step 40, rank 1 differs from ranks 0 and 2." and detected.step == 40
    assert detected.fields == {"digests": {"0": "a", "1": "b", "2": "a"}, "ranks": [1]}
    assert event("rank_failed", actions).fields == {"failure": "bitflip"}
    assert only(Kill, actions).rank == 1 and only(SendRegroup, actions).ranks == (0, 2)
    state, actions = play(state, *answers(state, 40, anchor=30), RankFenced(1))
    back = event("rolled_back", actions)
    assert back.fields == {"first_step": 31, "last_step": 40} and back.step == 31
    assert back.reason == (
        "All ranks go back to the state after step 30; steps 31 to 40 are done again, because the replicas differed after "
        "step 40."
    )
    assert only(CloseGeneration, actions) == CloseGeneration(1, 40)
    assert only(OpenGeneration, actions) == OpenGeneration(2, (0, 2), 31)
    assert only(SendGo, actions) == SendGo(2, (0, 2), 31, None, (), None, 30)
    state, actions = play(state, *all_formed(state))
    assert state.going_back is None
    _, actions = play(state, StepCommitted(0, 2, 31, 53.0))
    fields = event("recovered", actions).fields
    assert (fields["lost_steps"], fields["rolled_back_to"], fields["ranks"]) == (10, 30, [1])


@pytest.mark.parametrize("digests", [{0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "a", 2: "b", 3: "b"}])
def test_without_a_majority_all_go_back_and_nobody_is_killed(digests):
    state, actions = diverged(digests=digests)
    assert kinds(actions) == ["divergence_detected", "regroup_started"]
    assert event("divergence_detected", actions).reason.endswith("differ, and no majority says which of them is right.")
    state, actions = play(state, *answers(state, 40, anchor=30))
    assert only(SendGo, actions).restore == 30 and state.members == tuple(digests)
    state, _ = play(state, *all_formed(state))
    recovered = event("recovered", play(state, StepCommitted(0, 2, 31, 53.0))[1])
    assert recovered.reason.endswith("after it was noticed that the replicas differed after step 40.")


def test_who_lacks_the_newest_anchor_gets_its_state_from_one_that_has_it():
    state, _ = diverged(digests={0: "a", 1: "b"})
    _, actions = play(state, *answers(state, 40, anchor0=20, anchor1=30))
    go = only(SendGo, actions)
    assert (go.restore, go.first_step, go.source, go.behind) == (30, 31, 1, (0,))


def test_a_verdict_of_one_rank_is_enough_when_the_others_were_cut_off():
    state = in_training(committed=40)
    state, actions = play(state, StepFailed(2, 1, broken(40)), StepFailed(0, 1, differs(40, ODD)))
    assert actions == [], "the others get a moment"
    _, actions = play(state, Tick(), now=50.01 + planner.RAISE_GRACE_S)
    assert only(Kill, actions).rank == 1 and only(SendRegroup, actions).ranks == (0, 2)


@pytest.mark.parametrize("how", ["before", "after", "in the answer"])
def test_a_verdict_is_not_forgotten_when_somebody_dies_around_it(how):
    state = in_training((0, 1, 2, 3), committed=40)
    found = differs(40, {**ODD, 3: "a"})
    verdict = [] if how == "in the answer" else [StepFailed(0, 1, found)]
    events = [*verdict, died(3)] if how == "before" else [died(3), *verdict]
    state, _ = play(state, *events, RankFenced(3))
    told = {"failure0": found} if how == "in the answer" else {}
    state, actions = play(state, *answers(state, 40, anchor=30, **told))
    assert kinds(actions) == ["divergence_detected", "rank_suspected", "rank_failed", "regroup_started"]
    state, actions = play(state, *answers(state, 40, anchor=30, failure0=found), RankFenced(1))
    assert kinds(actions) == ["rank_fenced", "rolled_back"], "it is told again, and no news"
    assert only(SendGo, actions).members == (0, 2) and only(SendGo, actions).restore == 30


def test_a_rank_that_has_taken_the_slot_of_the_odd_one_is_not_blamed():
    state = in_training(committed=40, refill=True)
    state, _ = play(state, SpareReady(), StepFailed(0, 1, differs(40, ODD)), died(1), RankFenced(1))
    state, actions = play(state, *answers(state, 40, anchor=30, newcomers=(1,)))
    assert not any(isinstance(action, Kill) for action in actions)
    go = only(SendGo, actions)
    assert (go.members, go.restore, go.behind, go.source) == ((0, 1, 2), 30, (1,), 0)


def test_the_odd_one_goes_on_when_all_others_are_lost():
    state, _ = play(in_training(committed=40), StepFailed(1, 1, differs(40, ODD)), died(0), died(2))
    state, actions = play(state, RankFenced(0), RankFenced(2), *answers(state, 40, anchor=30))
    assert only(SendGo, actions).members == (1,) and only(SendGo, actions).restore == 30


def test_a_going_back_that_is_broken_off_is_begun_again():
    """Nobody knows who has gone back already: all do it once more, and the books are not closed with steps of before."""
    state, _ = diverged(digests={0: "a", 1: "b", 2: "c"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    state, _ = play(state, RankFormed(0, 2, 51.0, 51.0), died(2), RankFenced(2))
    again = RankReady(0, 3, 30, anchor=30), RankReady(1, 3, 40, failure=differs(40, ODD), anchor=30)
    state, actions = play(state, *again)
    assert kinds(actions) == [] and only(CloseGeneration, actions) == CloseGeneration(2, 30)
    assert only(SendGo, actions).restore == 30 and state.incident.lost_steps == 10
    state, _ = play(state, *all_formed(state), died(1), RankFenced(1))
    _, actions = play(state, RankReady(0, 4, 33, in_flight=34, anchor=30))
    assert only(SendGo, actions).restore is None and only(SendGo, actions).first_step == 34


def test_a_first_step_proves_that_all_have_gone_back():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    state, _ = play(state, RankFormed(0, 2, 51.0, 51.0), StepCommitted(0, 2, 31, 52.0), died(1), RankFenced(1))
    _, actions = play(state, RankReady(0, 3, 31, in_flight=32, anchor=30))
    assert only(SendGo, actions).restore is None and only(SendGo, actions).first_step == 32


def test_a_verdict_proves_it_as_well_and_a_loss_since_is_not_forgotten():
    state, _ = play(in_training(restart=True, committed=40), SpareReady(), died(1), RankFenced(1))
    state, _ = play(state, *answers(state, 40, anchor=30, newcomers=(1,)))
    assert state.going_back.sent == 2
    state, _ = play(state, died(2), RankFenced(2), StepFailed(0, 2, differs(40, {0: "a", 1: "b", 2: "a"})))
    state, actions = play(state, *answers(state, 40, anchor=30))
    assert kinds(actions) == ["divergence_detected"] and state.awaited == {2}
    state, _ = play(state, SpareReady())
    state, actions = play(state, *answers(state, 40, anchor=30, newcomers=(2,)))
    assert only(CloseGeneration, actions).last_committed == 40 and only(SendGo, actions).restore == 30


def test_a_verdict_proves_that_its_step_was_committed():
    """Nobody has heard of the commits, and all who have made them are gone."""
    state, _ = play(in_training((0, 1), restart=True, committed=3), StepFailed(0, 1, differs(5, {0: "a", 1: "b"})))
    state, _ = play(state, died(0), died(1), RankFenced(0), RankFenced(1), SpareReady(), SpareReady())
    _, actions = play(state, *answers(state, -1, newcomers=(0, 1)))
    assert event("rolled_back", actions).fields == {"first_step": 1, "last_step": 5}


def test_a_verdict_that_overtakes_the_last_formed_proves_that_the_generation_stands():
    state, _ = play(in_training(refill=True), SpareReady(), died(1), RankFenced(1))
    state, _ = play(state, *answers(state, 0, newcomers=(1,)))
    state, actions = play(state, *[StepFailed(rank, 2, differs(5, ODD)) for rank in (0, 1, 2)])
    assert kinds(actions)[:3] == ["regrouped", "rank_joined", "divergence_detected"]
    assert only(Kill, actions).rank == 1, "it has joined, so it can be the odd one"


def test_a_copy_proves_that_its_step_was_committed():
    """Where nobody else tells: the supervisor that knew is gone, and the rank was about to go back."""
    state = in_training((0, 1), committed=20)
    state, _ = play(state, StepFailed(0, 1, differs(20, {0: "a", 1: "b"})), died(1), RankFenced(1))
    _, actions = play(state, RankReady(0, 2, -1, failure=differs(20, {0: "a", 1: "b"}), anchor=30))
    assert only(CloseGeneration, actions).last_committed == 30 and only(OpenGeneration, actions).first_step == 31


def test_a_first_step_that_only_a_lost_rank_told_of_is_said_to_be_done_again():
    state, _ = play(in_training((0,), restart=True), died(0), RankFenced(0), SpareReady())
    state, _ = play(state, *answers(state, -1, newcomers=(0,)), StepCommitted(0, 3, 1, 52.0))
    state, _ = play(state, condemned(0), RankFenced(0), SpareReady())
    _, actions = play(state, *answers(state, -1, newcomers=(0,)))
    assert event("rolled_back", actions).fields == {"first_step": 1, "last_step": 1}


def test_who_raised_is_killed_when_its_own_step_has_worked_without_it():
    state = in_training(committed=40)
    state, _ = play(state, StepFailed(0, 1, differs(40, {0: "a", 1: "b", 2: "c"})), StepFailed(2, 1, user_error(40)))
    state, _ = play(state, Tick(), now=51.0)
    state, actions = play(state, *answers(state, 40, anchor=30))
    assert state.left_out == {2} and only(SendGo, actions).restore == 30
    state, actions = play(state, *all_formed(state), *[StepCommitted(0, 2, step, 52.0) for step in range(31, 40)])
    assert state.left_out == {2} and actions == []
    assert only(Kill, play(state, StepCommitted(0, 2, 40, 53.0))[1]).rank == 2


def test_a_new_supervisor_does_not_take_steps_of_before_for_steps_since():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    there = {0: Standing(2, "waiting", 40), 1: Standing(2, "ready", 40)}
    again, actions = play(state, Adopted(there))
    assert "regrouped" not in kinds(actions) and again.going_back is not None
    _, actions = play(state, Adopted({**there, 0: Standing(2, "training", 32)}))
    assert "regrouped" in kinds(actions), "a step needs all, and it is beyond the copy"


def test_replicas_that_differ_at_the_same_step_again_end_the_run():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    state, _ = play(state, *all_formed(state), StepCommitted(0, 2, 40, 53.0))
    state, _ = play(state, *[StepFailed(rank, 2, differs(40, {0: "a", 1: "b"})) for rank in (0, 1)])
    _, actions = play(state, *answers(state, 40, anchor=30))
    end = only(End, actions)
    assert end.state == "failed"
    assert end.reason.startswith("The replicas differ again after step 40, although all had gone back to the state after")
    assert only(CloseGeneration, actions).last_committed == 40


def test_replicas_that_have_agreed_in_between_may_differ_again():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    state, _ = play(state, *all_formed(state), *[StepCommitted(0, 2, step, 53.0) for step in range(31, 51)])
    assert state.last_verdict is None
    state, _ = play(state, *[StepFailed(rank, 2, differs(50, {0: "a", 1: "b"})) for rank in (0, 1)])
    _, actions = play(state, *answers(state, 50, anchor=40))
    assert only(SendGo, actions).restore == 40


def test_with_an_agreement_in_between_the_same_step_may_differ_again():
    """The newest copy was lost, so they had gone further back, and have agreed at its step since."""
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=20))
    state, _ = play(state, *all_formed(state), StepCommitted(0, 2, 40, 53.0))
    state, _ = play(state, *[StepFailed(rank, 2, differs(40, {0: "a", 1: "b"})) for rank in (0, 1)])
    _, actions = play(state, *answers(state, 40, anchor=30))
    assert only(SendGo, actions).restore == 30


def test_a_run_that_ends_while_all_go_back_has_the_steps_up_to_there():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, *answers(state, 40, anchor=30))
    state, _ = play(state, *[StepFailed(rank, 2, user_error(31)) for rank in (0, 1)])
    _, actions = play(state, *answers(state, 40, anchor=30))
    assert only(End, actions).reason.startswith("Every rank raised")
    assert only(CloseGeneration, actions).last_committed == 30, "the books have been opened anew after step 30"


def test_without_a_copy_of_an_earlier_state_there_is_no_way_back():
    state, _ = diverged(digests={0: "a", 1: "b"})
    _, actions = play(state, *answers(state, 40, anchor=None))
    assert "none of them has kept one" in only(End, actions).reason


def test_newcomers_alone_do_not_begin_anew_unless_that_was_asked_for():
    state = in_training((0, 1), committed=40, refill=True)
    state, _ = play(state, SpareReady(), SpareReady(), StepFailed(0, 1, differs(40, {0: "a", 1: "b"})), died(0), died(1))
    _, actions = play(state, RankFenced(0), RankFenced(1), *answers(state, -1, newcomers=(0, 1)))
    assert only(End, actions).reason.startswith("All ranks that held the state of the training are lost")


def test_a_pause_holds_at_the_state_all_have_gone_back_to():
    state, _ = diverged(digests={0: "a", 1: "b"})
    state, _ = play(state, HoldWanted("pause", 40))
    state, actions = play(state, *answers(state, 40, anchor=30))
    assert only(SendGo, actions).hold_after == 30
    state, actions = play(state, *all_formed(state), RankHeld(0, 2, 30), RankHeld(1, 2, 30))
    assert event("paused", actions).step == 30 and "recovered" in kinds(actions)


def test_flips_in_a_world():
    world = World(4, total_steps=30, check_replicas=5)
    world.until(lambda: world.state.committed >= 6)
    world.flip(2)
    assert world.drain().state == "finished"
    assert [kill.rank for kill in world.all_of(Kill)] == [2]
    assert world.emitted("recovered")[0].fields["rolled_back_to"] == 5
    assert not any(rank.flipped for rank in world.ranks if not rank.dead)


# --- gradients that are not finite -------------------------------------------------------------------------


def nan_in(step, sources, members=(0, 1, 2), **options):
    state = in_training(members, committed=step - 1, **options)
    return play(state, *[StepFailed(r, 1, not_finite(step, r in sources, sources.get(r, ""))) for r in members])


def test_a_gradient_that_is_not_finite_stops_the_run_and_says_who_brought_it_in():
    _, actions = nan_in(12, {1: "gradient of fc.weight"})
    detected = event("nan_detected", actions)
    assert detected.reason == (
        "The gradient of step 12 is not finite (NaN or infinite): rank 1 has brought it in (gradient of fc.weight)."
    )
    assert detected.fields == {"ranks": [1], "where": {"1": "gradient of fc.weight"}} and detected.step == 12
    end = only(End, actions)
    assert end.state == "stopped" and end.reason.startswith(detected.reason)
    assert "The update of step 12 was not made; the weights are those after step 11." in end.reason
    assert "--clip-norm" in end.reason and "--on-nan" in end.reason
    assert only(CloseGeneration, actions).last_committed == 11 and not any(isinstance(a, Kill) for a in actions)


def test_what_all_ranks_bring_in_is_the_loss_itself():
    _, actions = nan_in(1, {0: "loss", 1: "loss", 2: "loss"})
    assert event("nan_detected", actions).reason.endswith("on every rank (loss), so it is the loss itself.")
    assert "the weights are those from the start" in only(End, actions).reason


def test_what_no_rank_brings_in_came_about_in_the_sum():
    state = in_training(committed=11)
    _, actions = play(state, *[StepFailed(r, 1, not_finite(12, False, "the sum over all ranks")) for r in (0, 1, 2)])
    assert "finite on every rank by itself: the sum over all ranks." in event("nan_detected", actions).reason


def test_with_rollback_all_go_back_once_and_the_same_numbers_again_stop_the_run():
    state, actions = nan_in(12, {1: "loss"}, on_nan="rollback")
    assert kinds(actions) == ["nan_detected", "regroup_started"] and only(SendRegroup, actions).ranks == (0, 1, 2)
    state, actions = play(state, *answers(state, 11, anchor=0, in_flight=12))
    assert event("rolled_back", actions).fields == {"first_step": 1, "last_step": 11}
    assert only(SendGo, actions).restore == 0 and only(CloseGeneration, actions).last_committed == 11
    assert state.incident.lost_steps == 12, "with the step in flight"
    state, _ = play(state, *all_formed(state), *[StepCommitted(0, 2, step, 53.0) for step in range(1, 12)])
    _, actions = play(state, *[StepFailed(rank, 2, not_finite(12, True, "loss")) for rank in (0, 1, 2)])
    end = only(End, actions)
    assert end.state == "stopped" and "All had gone back once, and the same numbers came again." in end.reason


def test_a_step_whose_gradient_is_finite_the_second_time_is_forgiven():
    state, _ = nan_in(12, {1: "loss"}, on_nan="rollback")
    state, _ = play(state, *answers(state, 11, anchor=10, in_flight=12))
    state, _ = play(state, *all_formed(state), StepCommitted(0, 2, 12, 53.0))
    assert state.last_verdict is None


def test_going_back_where_nothing_has_been_trained_since_is_only_the_step_again():
    state, _ = nan_in(11, {1: "loss"}, on_nan="rollback")
    state, actions = play(state, *answers(state, 10, anchor=10, in_flight=11))
    assert kinds(actions) == [] and only(SendGo, actions).restore == 10
    assert state.incident.lost_steps == 1 and state.incident.rolled_back_to == 10


# --- restart -----------------------------------------------------------------------------------------------


def test_with_restart_all_go_back_to_the_start_and_wait_for_the_full_world():
    state, actions = play(in_training(restart=True, committed=7), died(1))
    assert state.vacant == {1} and state.awaited == {1}
    assert event("regroup_started", actions).reason == "Generation 2: the run waits until rank 1 is there again; then all go back."
    state, actions = play(state, RankFenced(1), *answers(state, 7, in_flight=8))
    assert actions == [], "nobody trains without rank 1"
    state, actions = play(state, SpareReady(1))
    assert only(TakeSpare, actions).rank == 1 and only(SendRegroup, actions) == SendRegroup(3, (0, 1, 2))
    assert event("regroup_started", actions).reason == "Generation 3: rank 1 has come, so all are there."
    state, actions = play(state, *answers(state, 7, in_flight=8, newcomers=(1,)))
    assert only(SendGo, actions) == SendGo(3, (0, 1, 2), 1, None, (), None, 0)
    assert event("rolled_back", actions).reason == (
        "All ranks go back to the initial state; steps 1 to 7 are done again, because rank 1 was lost."
    )
    assert only(CloseGeneration, actions) == CloseGeneration(2, 7)
    state, _ = play(state, *all_formed(state))
    recovered = event("recovered", play(state, StepCommitted(0, 3, 1, 60.0))[1])
    assert (recovered.fields["lost_steps"], recovered.fields["rolled_back_to"]) == (8, 0)
    assert recovered.fields["regroup_s"] >= 1.0, "the waiting is part of it"


def test_with_restart_a_spare_enters_with_the_first_regroup():
    state, actions = play(in_training(restart=True, committed=7), SpareReady(), condemned(1))
    assert only(SendRegroup, actions).ranks == (0, 1, 2) and not state.awaited
    state, actions = play(state, RankFenced(1), *answers(state, 7, newcomers=(1,)))
    assert only(SendGo, actions).generation == 2 and only(SendGo, actions).restore == 0


def test_with_restart_a_run_survives_the_loss_of_all_its_ranks():
    state, actions = play(in_training((0, 1), restart=True, committed=7), died(0), died(1))
    assert state.phase == "regrouping" and only(SendRegroup, actions).ranks == ()
    state, actions = play(state, RankFenced(0), RankFenced(1), SpareReady())
    assert only(TakeSpare, actions).rank == 0 and not any(isinstance(a, SendRegroup) for a in actions)
    state, actions = play(state, SpareReady())
    assert only(SendRegroup, actions).ranks == (0, 1)
    state, actions = play(state, *answers(state, -1, newcomers=(0, 1)))
    assert only(SendGo, actions).restore == 0 and event("rolled_back", actions).fields["last_step"] == 7


def test_with_restart_and_checks_all_go_back_to_the_last_check():
    state, _ = play(in_training(restart=True, committed=47), SpareReady(), died(1))
    state, actions = play(state, RankFenced(1), *answers(state, 47, anchor=40, newcomers=(1,)))
    go = only(SendGo, actions)
    assert (go.restore, go.source, go.behind) == (40, 0, (1,))


def test_with_restart_a_rank_that_raised_is_replaced_at_once():
    state, _ = play(in_training(restart=True, committed=4), StepFailed(1, 1, user_error(5)))
    state, _ = play(state, Tick(), now=51.0)
    state, actions = play(state, *answers(state, 4, in_flight=5, failure1=user_error(5)))
    assert kinds(actions) == ["rank_failed", "regroup_started"] and only(Kill, actions).rank == 1
    assert not state.left_out and state.awaited == {1} and state.phase == "regrouping"
    state, _ = play(state, RankFenced(1), SpareReady(1))
    state, actions = play(state, *answers(state, 4, newcomers=(1,)))
    assert only(SendGo, actions).restore == 0
    # The step fails once more: that is the code's fault.
    state, _ = play(state, *all_formed(state), *[StepCommitted(0, 3, step, 52.0) for step in range(1, 5)])
    state, _ = play(state, StepFailed(2, 3, user_error(5)))
    state, _ = play(state, Tick(), now=53.0)
    _, actions = play(state, *answers(state, 4, in_flight=5, failure2=user_error(5)))
    assert only(End, actions).reason.startswith("Step 5 failed twice: first rank 1 raised ValueError")


def test_with_restart_the_loss_of_another_while_it_waits_prolongs_the_wait():
    state, _ = play(in_training(restart=True, committed=7), died(1), RankFenced(1))
    state, actions = play(state, died(2), RankFenced(2), SpareReady(1))
    assert state.awaited == {2} and not any(isinstance(action, SendRegroup) for action in actions)
    state, actions = play(state, died(1))
    assert kinds(actions) == ["spare_lost"] and state.awaited == {1, 2}
    state, actions = play(state, RankFenced(1), SpareReady(), SpareReady())
    assert only(SendRegroup, actions).ranks == (0, 1, 2)


def test_with_restart_a_stop_ends_at_once_whether_it_comes_before_or_after_the_loss():
    waiting, _ = play(in_training(restart=True, committed=7), died(1))
    _, actions = play(waiting, HoldWanted("stop", 7))
    assert only(End, actions) == End("stopped", "Stopped on request while it waited for rank 1.")
    _, actions = play(in_training(restart=True, committed=7), HoldWanted("stop", 7), died(1))
    assert only(End, actions).state == "stopped" and kinds(actions)[0] == "rank_failed"
    state, _ = play(in_training(restart=True, committed=7), HoldWanted("stop", 7), StepFailed(1, 1, user_error(8)))
    state, _ = play(state, Tick(), now=51.0)
    _, actions = play(state, *answers(state, 7))
    assert only(End, actions).state == "stopped" and kinds(actions)[0] == "rank_failed"


def test_with_restart_a_pause_that_comes_while_it_waits_holds_at_the_start():
    state, _ = play(in_training(restart=True, committed=7), died(1), HoldWanted("pause", 7), RankFenced(1), SpareReady())
    state, actions = play(state, *answers(state, 7, newcomers=(1,)))
    assert only(SendGo, actions).hold_after == 0
    state, actions = play(state, *all_formed(state), *[RankHeld(rank, 3, 0) for rank in (0, 1, 2)])
    assert event("paused", actions).step == 0
    state, _ = play(state, Unpause())
    assert not state.paused


def test_with_restart_a_smaller_world_is_full_earlier():
    state, _ = play(in_training(restart=True, committed=7), died(2), RankFenced(2), *[RankReady(0, 2, 7, anchor=0)])
    state, _ = play(state, RankReady(1, 2, 7, anchor=0))
    state, actions = play(state, Resized(2))
    assert only(SendGo, actions).members == (0, 1) and only(SendGo, actions).restore == 0
    state, _ = play(in_training(restart=True, committed=7), died(2), Resized(4), SpareReady())
    assert state.awaited == {3}, "a larger one later"


def test_with_restart_it_ends_when_nobody_comes():
    state, _ = play(in_training(restart=True, committed=7), died(1), RankFenced(1))
    _, actions = play(state, NobodyComes("the cell failed on three new processes in a row"))
    end = only(End, actions)
    assert end.state == "failed"
    assert end.reason.startswith("Rank 1 cannot be replaced: The cell failed on three new processes in a row.")
    training = in_training(restart=True)
    assert planner.step(50.0, training, NobodyComes("why ever")) == (training, [])


def test_with_restart_a_broken_connection_and_a_planned_change_cost_nothing():
    state, _ = play(in_training(restart=True, committed=7), StepFailed(0, 1, broken(8)))
    state, _ = play(state, Tick(), now=52.0)
    state, actions = play(state, *answers(state, 7, in_flight=8))
    assert only(SendGo, actions).restore is None and only(SendGo, actions).first_step == 8
    state, actions = play(state, *all_formed(state), Resized(2))
    after = only(SendHold, actions).after_step
    state, _ = play(state, *[RankHeld(rank, 2, after) for rank in (0, 1, 2)])
    _, actions = play(state, *answers(state, after))
    assert only(SendGo, actions).restore is None and only(SendGo, actions).members == (0, 1)


def test_with_restart_a_new_supervisor_goes_on_waiting():
    state, _ = play(in_training((0, 1), restart=True, committed=7), died(0), died(1), RankFenced(0), RankFenced(1))
    state, actions = play(state, Adopted({}))
    assert actions == [] and state.awaited == {0, 1}
    state, _ = play(state, SpareReady(), SpareReady())
    _, actions = play(state, *answers(state, -1, newcomers=(0, 1)))
    assert only(SendGo, actions).restore == 0


def test_restart_in_a_world():
    world = World(3, total_steps=12, restart=True)
    world.until(lambda: world.state.committed >= 4)
    for number in (0, 1, 2):
        world.die(number)
    assert world.drain().state == "finished"
    assert world.all_of(SendGo)[-1].members == (0, 1, 2) and world.all_of(SendGo)[-1].restore == 0
    recovered = world.emitted("recovered")
    assert len(recovered) == 1 and recovered[0].fields["ranks"] == [0, 1, 2]
    json.dumps(recovered[0].fields)
