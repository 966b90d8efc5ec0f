"""Who is to blame when nothing moves: the verdicts, and above all those that are not given."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core import watch
from ftnb.core.detector import Heartbeats
from ftnb.core.watch import Limits, Lost, Sign, Stuck

LOOK_S = 0.1
LIMITS = Limits(hang_timeout_s=2.0)


@dataclass
class Played:
    """One rank as a test tells it: what it says by heartbeat, and whether it answers at all."""

    rank: int
    place: str | None = "collective"
    step: int | None = 41
    since: float = 0.0
    first: bool = False
    heartbeats: bool = True
    linked: bool | None = True
    stopped: bool | None = False
    link_lost: float | None = None
    said: tuple = ()


class Play:
    """Time that goes on in steps of a look; ranks are real to `look` through real `Heartbeats`."""

    def __init__(self, num_ranks=4, limits=LIMITS, **told):
        self.now, self.limits = 1000.0, limits
        self.ranks = [Played(rank, since=self.now, **told) for rank in range(num_ranks)]
        self.heard = [Heartbeats(LOOK_S) for _ in self.ranks]
        self.state = watch.new(self.now)
        self.verdicts: list = []  # (seconds since the start of the story, verdict)
        self.go(10.0)  # the detector knows them
        self.verdicts.clear()
        self.start = self.now
        for rank in self.ranks:
            rank.since = self.now

    def put(self, rank, place, step=41):
        self.ranks[rank].place, self.ranks[rank].step, self.ranks[rank].since = place, step, self.now

    def fall_silent(self, rank, link_after_s=None, stopped=False):
        """No heartbeats any more; the connection is seen as down so much later (None: it answers)."""
        played = self.ranks[rank]
        played.heartbeats, played.stopped = False, stopped
        played.link_lost = None if link_after_s is None else self.now + link_after_s

    def come_back(self, rank):
        played = self.ranks[rank]
        played.heartbeats, played.stopped, played.link_lost = True, False, None
        played.linked = True if played.linked is not None else None

    def signs(self):
        signs = []
        for played, heard in zip(self.ranks, self.heard):
            if played.heartbeats:
                heard.beat(self.now)
                played.said = (played.place, played.step, self.now - played.since, self.now)
            if played.link_lost is not None and self.now >= played.link_lost and played.linked is not None:
                played.linked = False
            place, step, place_s, at = played.said
            down_s = self.now - played.link_lost if played.linked is False else 0.0
            signs.append(
                Sign(played.rank, heard.phi(self.now), heard.age_s(self.now), played.linked, down_s,
                     played.stopped, place, step, place_s + self.now - at, played.first)
            )  # fmt: skip
        return signs

    def look(self, seconds=LOOK_S):
        self.now += seconds
        gap = watch.gap_s(self.now, self.state)
        if gap:
            for heard in self.heard:
                heard.excuse(gap, self.now)
        self.state, found = watch.look(self.now, self.state, self.limits, self.signs())
        if found and hasattr(self, "start"):
            self.verdicts += [(round(self.now - self.start, 1), verdict) for verdict in found]
        return found

    def go(self, seconds, move=None):
        """Look ten times a second; `move(now since the start)` is called before each look. The verdicts so far."""
        for _ in range(round(seconds / LOOK_S)):
            if move:
                move(self.now + LOOK_S - self.start)
            self.look()
        return self.verdicts

    def train(self, seconds, step_s=0.5, first_step=41, idle=()):
        """Everybody does steps, half of the time in forward and half in the all-reduce."""

        def move(elapsed):
            step = first_step + int(elapsed / step_s)
            place = "forward" if elapsed % step_s < step_s / 2 else "collective"
            for played in self.ranks:
                if played.rank not in idle and (played.place, played.step) != (place, step):
                    self.put(played.rank, place, step)

        return self.go(seconds, move)


# --- stopped, cut off, busy


def test_a_stopped_rank_is_lost_when_its_connection_has_been_down_for_a_moment():
    play = Play()
    play.fall_silent(2, link_after_s=0.5, stopped=True)
    (at, lost), = play.go(20.0)
    assert 0.7 <= at <= 0.8
    assert lost.rank == 2 and lost.failure == "hang" and lost.phi >= 8 and lost.since_s == pytest.approx(at)
    assert lost.reason == (
        f"has been stopped (SIGSTOP): no heartbeat for {at} s, its connection does not answer, φ {lost.phi:.0f}"
    )


def test_a_rank_that_is_cut_off_is_no_hang():
    play = Play()
    play.fall_silent(1, link_after_s=0.5)
    (_, lost), = play.go(20.0)
    assert (lost.rank, lost.failure) == (1, "partition")
    assert lost.reason.startswith("is cut off: no heartbeat for 0.")


def test_the_victims_of_a_rank_that_hangs_are_not_blamed_however_long_it_takes():
    """2 is silent, its link is not known to be down: the others wait in the all-reduce, and nobody blames them."""
    play = Play(limits=Limits(hang_timeout_s=1.0))
    play.put(2, "forward")
    play.fall_silent(2)
    play.ranks[2].first = True  # may be silent for 300 s
    assert play.go(60.0) == []


def test_a_link_that_breaks_for_a_moment_is_nobody_s_failure():
    play = Play()
    play.ranks[2].link_lost = play.now
    assert play.train(5.0) == []  # heartbeats come all the time
    play.fall_silent(2, link_after_s=0.4)
    play.go(0.5)
    play.come_back(2)
    assert play.train(30.0) == []


def test_two_lost_at_once_are_both_named():
    play = Play()
    play.fall_silent(3, link_after_s=0.5)
    play.fall_silent(1, link_after_s=0.5, stopped=True)
    assert [(lost.rank, lost.failure) for _, lost in play.go(5.0)] == [(1, "hang"), (3, "partition")]


def test_where_the_link_cannot_be_known_phi_must_be_higher():
    play = Play()
    for played in play.ranks:
        played.linked = None
    play.fall_silent(2)
    (at, lost), = play.go(5.0)
    assert 0.6 <= at <= 0.9 and lost.failure == "partition" and lost.phi >= 12
    assert "whether its connection answers cannot be known" in lost.reason


def test_told_once_and_again_only_after_a_sign_of_life():
    play = Play()
    play.fall_silent(2, link_after_s=0.5)
    assert len(play.go(10.0)) == 1
    play.come_back(2)
    play.train(2.0)
    play.fall_silent(2, link_after_s=0.5)
    assert [lost.rank for _, lost in play.go(10.0)] == [2, 2]


def test_a_link_that_comes_and_goes_is_no_sign_of_life():
    play = Play(limits=Limits(hang_timeout_s=30.0))
    play.fall_silent(2, link_after_s=0.5)
    play.go(1.5)
    for linked in (True, False) * 3:
        play.ranks[2].linked, play.ranks[2].link_lost = linked, None if linked else play.now
        play.go(0.5)
    assert len(play.verdicts) == 1


def test_one_that_comes_back_while_another_is_silent_is_told_again():
    play = Play(limits=Limits(hang_timeout_s=100.0))
    play.fall_silent(3)
    play.fall_silent(2, link_after_s=0.5)
    play.go(2.0)
    play.come_back(2)
    play.go(2.0)
    play.fall_silent(2, link_after_s=0.5)
    assert [lost.rank for _, lost in play.go(2.0)] == [2, 2]


@pytest.mark.parametrize(
    ("linked", "phi", "lost"), [(False, 7.9, False), (False, 8.0, True), (None, 11.9, False), (None, 12.0, True), (True, 99.0, False)]
)
def test_how_much_suspicion_condemns(linked, phi, lost):
    sign = Sign(2, phi, 1.5, linked, 0.0 if linked is None else 1.0, None, "forward", 41, 1.6, False)
    _, found = watch.look(0.1, watch.new(0.0), LIMITS, [sign])
    assert [verdict.failure for verdict in found] == ["partition"] * lost


def test_a_held_interpreter_lock_is_found_at_the_limit_and_not_before():
    play = Play()
    play.put(2, "forward")
    play.fall_silent(2)
    (at, lost), = play.go(20.0)
    assert at == pytest.approx(2.0, abs=0.11)
    assert (lost.rank, lost.failure) == (2, "gil")
    assert lost.reason == (
        "holds Python's interpreter lock: its connection answers, but no heartbeat for "
        f"{lost.since_s:.1f} s (limit 2 s, --hang-timeout)"
    )


@pytest.mark.parametrize(("place", "first", "seconds"), [("forward", False, 5.0), ("collective", False, 25.0), ("forward", True, 290.0)])
def test_sorting_millions_of_strings_is_no_failure(place, first, seconds):
    """Python is silent for seconds, its connection answers: busy."""
    play = Play(limits=Limits(hang_timeout_s=30.0))
    for played in play.ranks:
        played.first = first
    play.put(2, place)
    play.fall_silent(2)
    play.go(seconds)
    play.come_back(2)
    assert play.train(10.0) == []


def test_leaving_a_group_may_take_longer_than_a_short_limit():
    """Whatever Gloo has in hand may be waited for, which is nobody's fault."""
    play = Play(limits=Limits(hang_timeout_s=1.0))
    for rank in (0, 1, 3):
        play.put(rank, "wait")
    play.put(2, "leave")
    assert play.go(9.5) == []
    (at, stuck), = play.go(1.0)
    assert at == pytest.approx(10.0, abs=0.11)
    assert stuck.ranks == (2,) and stuck.reason == (
        "has stood in leaving the group for 10.0 s while ranks 0, 1 and 3 wait for it (limit 10 s, for leaving a group)"
    )


@pytest.mark.parametrize("place", ["evaluate", "save", "held", "finished"])
def test_where_there_is_no_limit_silence_is_no_failure_while_the_link_answers(place):
    play = Play()
    for rank in range(4):
        play.put(rank, place if rank == 0 or place in watch.AT_REST else "collective")
    play.look()  # it could say so
    play.fall_silent(0)
    assert play.go(400.0) == []


@pytest.mark.parametrize("place", ["held", "finished"])
def test_who_was_at_rest_has_the_limit_from_when_others_wait_for_it(place):
    """Its last heartbeat was of a pause, or of the end, and it holds its interpreter lock ever since."""
    play = Play()
    for rank in range(4):
        play.put(rank, place)
    play.look()
    play.fall_silent(2)
    assert play.go(100.0) == [], "as long as one likes"
    for rank in (0, 1, 3):
        play.put(rank, "collective" if place == "held" else "wait", 42)
    assert play.go(1.9) == []
    ((_, verdict),) = play.go(1.0)
    assert (verdict.rank, verdict.failure) == (2, "gil")
    assert "no heartbeat for 10" in verdict.reason


# --- stuck


def test_a_stalled_rank_is_blamed_at_the_limit_not_those_that_wait_for_it():
    play = Play()
    play.put(2, "forward")
    (at, stuck), = play.go(20.0)
    assert at == pytest.approx(2.0, abs=0.11)
    assert stuck == Stuck(
        "stall", (2,), False,
        "has stood in forward of step 41 for 2.0 s while ranks 0, 1 and 3 wait for it (limit 2 s, --hang-timeout)",
        stuck.since_s,
    )  # fmt: skip
    assert stuck.since_s == pytest.approx(2.0, abs=0.11)


@pytest.mark.parametrize("place", ["fetch", "forward", "backward", "update", "finish"])
def test_every_place_of_its_own_work_has_the_limit(place):
    play = Play()
    play.put(2, place)
    assert [(verdict.failure, verdict.ranks) for _, verdict in play.go(3.0)] == [("stall", (2,))]


def test_after_progress_it_is_told_again():
    play = Play()
    play.put(2, "forward")
    play.go(4.0)
    play.train(3.0, first_step=42)
    play.put(2, "forward", 60)
    for rank in (0, 1, 3):
        play.put(rank, "collective", 60)
    assert [verdict.ranks for _, verdict in play.go(4.0)] == [(2,), (2,)]


def test_only_what_its_heartbeat_has_said_counts():
    """It may have moved on since."""

    def stalled(silent_s):
        others = [Sign(rank, 0.0, 0.05, True, 0.0, False, "collective", 41, 2.3, False) for rank in (0, 1, 3)]
        sign = Sign(2, 0.0, silent_s, True, 0.0, False, "forward", 41, 2.3, False)
        return watch.look(0.1, watch.new(0.0), LIMITS, [*others, sign])[1]

    assert stalled(0.4) == []
    assert [verdict.ranks for verdict in stalled(0.2)] == [(2,)]


def test_while_one_does_not_answer_no_other_is_judged():
    """What looks stuck in its own code may wait for it there, in a collective of the user's own."""
    play = Play(limits=Limits(hang_timeout_s=30.0))
    play.put(1, "forward")
    play.put(2, "forward")
    play.go(29.0)
    play.fall_silent(2)
    assert play.go(20.0) == []


def test_what_was_told_is_not_told_again_after_another_was_silent_for_a_while():
    play = Play()
    play.put(2, "forward")
    play.go(3.0)
    play.fall_silent(3)
    play.go(1.0)
    play.come_back(3)
    assert [verdict.ranks for _, verdict in play.go(5.0)] == [(2,)]


def test_several_that_are_stuck_are_all_blamed():
    play = Play()
    play.put(1, "forward")
    play.put(3, "forward")
    (_, stuck), = play.go(10.0)
    assert stuck.ranks == (1, 3) and "while ranks 0 and 2 wait for it" in stuck.reason
    play = Play()
    play.put(1, "forward")
    play.put(3, "fetch")
    assert [verdict.ranks for _, verdict in play.go(10.0)] == [(1,), (3,)]


def test_nobody_is_blamed_while_nobody_waits():
    """The step is just long: the others are at work as well."""
    play = Play()
    for rank in range(4):
        play.put(rank, "forward")
    play.go(1.0)
    play.put(3, "backward")
    assert play.go(1.9) == []


def test_when_all_are_stuck_in_their_own_code_nobody_is_more_to_blame():
    play = Play()
    for rank in range(4):
        play.put(rank, "forward" if rank else "backward")
    (_, stuck), = play.go(20.0)
    assert (stuck.failure, stuck.ranks, stuck.waiting) == ("stall", (), False)
    assert stuck.reason == (
        "no rank has moved for 2.0 s, and each is stuck in its own code: rank 0 in backward of step 41, "
        "ranks 1, 2 and 3 in forward of step 41 (limit 2 s, --hang-timeout)"
    )


def test_when_all_wait_in_the_same_all_reduce_nobody_is_blamed():
    """Circular blame: each waits for its neighbour, and would name it."""
    play = Play()
    (at, stuck), = play.go(20.0)
    assert at == pytest.approx(2.0, abs=0.11)
    assert (stuck.failure, stuck.ranks, stuck.waiting) == ("deadlock", (), True)
    assert stuck.reason == (
        "no rank has moved for 2.0 s, and each waits for the others: ranks 0, 1, 2 and 3 in the all-reduce of step 41 "
        "(limit 2 s, --hang-timeout)"
    )


@pytest.mark.parametrize(("place", "limit_s"), [("form", 2.0), ("share", 300.0)])
def test_forming_and_sharing_that_never_end(place, limit_s):
    play = Play()
    for rank in range(4):
        play.put(rank, place, None)
    assert play.go(limit_s - 0.2) == []
    assert [(verdict.ranks, verdict.waiting) for _, verdict in play.go(5.0)] == [((), True)]


def test_waiting_begins_with_the_last_that_came():
    play = Play()
    play.put(2, "forward")
    play.go(1.8)
    play.put(2, "collective")
    assert play.go(1.8) == []
    assert [verdict.ranks for _, verdict in play.go(1.0)] == [()]


def test_who_waited_for_one_that_was_taken_out_is_given_time_to_leave():
    """The others have waited in the all-reduce for as long as the rank that stalled has stalled."""
    play = Play()
    play.put(2, "forward")
    play.go(2.5)
    assert [verdict.ranks for _, verdict in play.verdicts] == [(2,)]
    del play.ranks[2], play.heard[2]
    assert len(play.go(1.5)) == 1
    play.put(0, "wait", None)  # one by one they leave it for the next generation
    assert len(play.go(1.0)) == 1
    # 1 and 3 never do: the regroup is long ago now.
    assert [(verdict.failure, verdict.ranks) for _, verdict in play.go(3.0)[1:]] == [("stall", (1, 3))]
    assert "the all-reduce of step 41" in play.verdicts[1][1].reason


def test_a_replacement_in_the_same_slot_does_not_inherit_the_wait_of_the_others():
    play = Play()
    play.put(2, "forward")
    play.go(2.5)
    play.put(2, "wait", None)  # another process by now
    assert len(play.go(1.5)) == 1


def test_idle_ranks_are_not_judged():
    play = Play(place="wait", step=None)
    assert play.go(400.0) == []


def test_before_training_there_are_300_seconds():
    play = Play(place="wait", step=None)
    play.put(2, None, None)
    assert play.go(299.0) == []
    assert [verdict.ranks for _, verdict in play.go(2.0)] == [(2,)]


def test_a_first_step_that_is_compiled_for_25_seconds():
    play = Play()
    for played in play.ranks:
        played.first = True
    play.put(2, "forward", 1)
    for rank in (0, 1, 3):
        play.put(rank, "collective", 1)
    play.go(25.0)
    for played in play.ranks:
        played.first = False
    assert play.train(10.0, first_step=2) == []


def test_a_first_step_has_an_end_too():
    play = Play()
    for played in play.ranks:
        played.first = True
    play.put(2, "forward", 1)
    for rank in (0, 1, 3):
        play.put(rank, "collective", 1)
    assert play.go(299.0) == []
    (_, stuck), = play.go(2.0)
    assert stuck.ranks == (2,) and stuck.reason.endswith("(limit 300 s, for a first step)")


@pytest.mark.parametrize("place", ["evaluate", "save"])
def test_rank_0_evaluates_for_forty_seconds(place):
    play = Play()
    play.put(0, place, 40)
    play.go(40.0)
    assert play.train(10.0) == []


def test_long_steps_make_the_limit_longer():
    play = Play(limits=Limits(hang_timeout_s=2.0, median_step_s=3.0))
    play.put(2, "forward")
    assert play.go(29.0) == []
    (_, stuck), = play.go(2.0)
    assert stuck.ranks == (2,) and stuck.reason.endswith("(limit 30 s, 10 typical steps)")


def test_a_paused_run_is_paused_for_as_long_as_one_likes():
    play = Play(place="held", step=40)
    assert play.go(400.0) == []


def test_a_finished_run_is_finished():
    play = Play(place="finished", step=100)
    assert play.go(400.0) == []


# --- in different steps


def test_a_rank_that_skipped_a_collective_is_found_at_once():
    play = Play(limits=Limits(hang_timeout_s=30.0))
    play.put(2, "forward", 42)
    (at, stuck), = play.go(60.0)
    assert 0.5 <= at <= 0.7
    assert stuck == Stuck(
        "deadlock", (2,), False, "is in forward of step 42 while ranks 0, 1 and 3 wait in the all-reduce of step 41",
        stuck.since_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "blamed"),
    [
        ([("collective", 41), ("collective", 41), ("collective", 42)], (2,)),
        ([("collective", 42), ("collective", 42), ("collective", 41)], (2,)),  # behind: the others wait in vain
        ([("collective", 42), ("collective", 42), ("forward", 41)], (2,)),
        ([("collective", 41), ("collective", 42)], (1,)),  # as many: who is ahead has left something out
        ([("collective", 42), ("forward", 41)], (0,)),
        ([("collective", 41), ("finished", 41), ("collective", 41)], (1,)),
        ([("collective", 41), ("forward", 41), ("collective", 42), ("collective", 41)], (2,)),
        ([("collective", 41), ("collective", 41), ("collective", 41), ("fetch", 44), ("update", 39)], (3, 4)),
        ([("collective", 41), ("update", 41), ("collective", 41), ("collective", 42)], (3,)),
    ],
)
def test_the_smaller_group_is_blamed(places, blamed):
    play = Play(len(places), limits=Limits(hang_timeout_s=30.0))
    for rank, (place, step) in enumerate(places):
        play.put(rank, place, step)
    verdicts = [verdict for _, verdict in play.go(10.0)]
    assert {verdict.failure for verdict in verdicts} == {"deadlock"}
    assert tuple(sorted(rank for verdict in verdicts for rank in verdict.ranks)) == blamed


@pytest.mark.parametrize(
    "places",
    [
        [("collective", 41), ("forward", 41), ("fetch", 41), ("backward", 41)],
        [("collective", 42), ("update", 41), ("collective", 42), ("collective", 42)],  # slow to come out of step 41
        [("collective", 41), ("update", 41), ("collective", 41), ("collective", 41)],  # the others want the last bytes
        [("collective", 42), ("evaluate", 41), ("collective", 42), ("collective", 42)],
        [("collective", 42), ("evaluate", 41), ("collective", 41), ("forward", 42)],
        [("collective", 41), ("forward", 42), ("forward", 42), ("forward", 42)],  # late out, and nobody waits yet
        [("collective", 42), ("wait", None), ("form", None), ("collective", 42)],  # a generation begins
        [("collective", 42), ("share", 39), ("collective", 42), ("collective", 42)],
        [("held", 41), ("collective", 42), ("held", 41), ("held", 41)],
    ],
)
def test_places_that_fit_together_are_no_mismatch(places):
    play = Play(len(places), limits=Limits(hang_timeout_s=30.0))
    for rank, (place, step) in enumerate(places):
        play.put(rank, place, step)
    assert play.go(25.0) == []


def test_a_mismatch_must_last():
    """Starved of processor time between the sum and what follows: it is there a moment later."""
    play = Play(limits=Limits(hang_timeout_s=30.0))
    for number in range(50):
        slow = number % 4
        for rank in range(4):
            play.put(rank, "collective" if rank == slow else "forward", 41 + number if rank == slow else 42 + number)
        play.go(0.1)
        for rank in range(4):
            if rank != slow:
                play.put(rank, "collective", 42 + number)
        play.go(0.3)  # in all it is 0.4 s late
    assert play.verdicts == []


def test_long_steps_make_a_mismatch_last_longer():
    play = Play(limits=Limits(hang_timeout_s=30.0, median_step_s=4.0))
    play.put(2, "forward", 42)
    (at, _), = play.go(10.0)
    assert at == pytest.approx(4.1, abs=0.15)


def test_old_news_is_no_mismatch():
    """All move; what is known of one is a second old, and says that it is in the step before."""
    play = Play(limits=Limits(hang_timeout_s=30.0))
    held_back = 2

    def move(elapsed):
        for played in play.ranks:
            if played.rank != held_back or int(elapsed) % 3 != 1:
                play.put(played.rank, "collective", 41 + int(elapsed * 5))
                played.heartbeats = True
            else:
                played.heartbeats = False  # its connection answers

    assert play.go(60.0, move) == []


# --- the watcher's own pauses


@pytest.mark.parametrize("late_s", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("linked", [True, None])
def test_a_pause_of_everything_is_nobody_s_failure(late_s, linked):
    """A laptop that slept, or all processes stopped: the supervisor may go on half a second before the ranks do."""
    play = Play()
    for played in play.ranks:
        played.linked = linked
    play.train(5.0)
    for _ in range(5):
        for rank in range(4):
            play.fall_silent(rank, link_after_s=0.4 if linked else None, stopped=True)
        play.look(5.0)
        play.go(late_s)
        for rank in range(4):
            play.come_back(rank)
        play.train(3.0)
    assert play.verdicts == []


def test_a_pause_does_not_count_for_the_limits():
    play = Play()
    play.put(2, "forward")
    play.go(1.5)
    play.look(60.0)
    play.go(0.9)
    assert play.verdicts == []
    (at, stuck), = play.go(1.0)
    assert stuck.ranks == (2,) and at == pytest.approx(1.5 + 60.0 + 1.0, abs=0.2)
    assert stuck.reason.startswith("has stood in forward of step 41 for 2.")
    assert stuck.since_s == pytest.approx(at, abs=0.11)


def test_a_rank_that_does_not_come_back_from_the_pause_is_found_after_it():
    play = Play()
    for rank in range(4):
        play.fall_silent(rank, link_after_s=0.4, stopped=True)
    play.look(5.0)
    for rank in (0, 1, 3):
        play.come_back(rank)
    (at, lost), = play.go(5.0)
    assert lost.rank == 2 and lost.failure == "hang" and at <= 5.0 + 1.5


def test_pauses_that_follow_each_other_count_once():
    play = Play()
    play.put(2, "forward")
    for _ in range(200):
        play.look(0.7)
    assert play.verdicts == [] and len(play.state.pauses) == 1
    play.go(4.0)
    assert [verdict.ranks for _, verdict in play.verdicts] == [(2,)]


def test_a_late_look_is_no_pause():
    play = Play()
    play.fall_silent(2, link_after_s=0.5)
    for _ in range(3):
        play.look(0.45)
    assert len(play.verdicts) == 1


# --- many ranks


def test_a_reason_names_only_so_many():
    play = Play(30)
    play.put(2, "forward")
    (_, stuck), = play.go(3.0)
    assert "while ranks 0, 1, 3, 4, 5, 6, 7, 8 and 21 more wait for it" in stuck.reason


# --- properties

PLACES = ["wait", "form", "share", "fetch", "forward", "backward", "collective", "update", "evaluate", "save",
          "held", "finish", "finished", None]  # fmt: skip
seconds = st.one_of(st.floats(0.0, 1.0), st.floats(0.0, 400.0))
anything = st.builds(
    Sign, rank=st.integers(0, 5), phi=st.one_of(st.none(), st.floats(0, 99)), silent_s=seconds,
    linked=st.sampled_from([True, False, None]), link_down_s=seconds, stopped=st.sampled_from([True, False, None]),
    place=st.sampled_from(PLACES), step=st.one_of(st.none(), st.integers(40, 43)), place_s=seconds, first=st.booleans(),
)  # fmt: skip
fleets = st.lists(anything, max_size=6, unique_by=lambda sign: sign.rank).map(
    lambda signs: [replace(sign, place_s=sign.place_s + sign.silent_s) for sign in signs]
)
limits = st.builds(Limits, st.floats(1.0, 60.0), st.one_of(st.none(), st.floats(0.001, 10.0)))


def blamed(verdicts):
    return {rank for v in verdicts for rank in (v.ranks if isinstance(v, Stuck) else (v.rank,))}


@given(fleets, limits, st.randoms())
def test_the_order_of_the_signs_does_not_matter(signs, limits, rng):
    mixed = rng.sample(signs, len(signs))
    now = 1000.0
    one, other = watch.new(now), watch.new(now)
    for _ in range(3):
        now += LOOK_S
        one, found = watch.look(now, one, limits, signs)
        other, found_too = watch.look(now, other, limits, mixed)
        assert found == found_too and one == other


@given(fleets, limits)
def test_no_verdict_is_given_twice(signs, limits):
    state, _ = watch.look(0.1, watch.new(0.0), limits, signs)
    assert watch.look(0.2, state, limits, signs)[1] == []


@given(fleets, limits, st.integers(0, 5))
def test_who_answers_and_moves_is_never_blamed(signs, limits, rank):
    """Whatever the others do. (It entered its place a moment ago, so it moves.)"""
    well = Sign(rank, 0.0, 0.05, True, 0.0, False, "forward", 41, 0.4, False)
    signs = [sign for sign in signs if sign.rank != rank] + [well]
    state = watch.new(0.0)
    for look in range(1, 4):
        state, found = watch.look(look * LOOK_S, state, limits, signs)
        assert rank not in blamed(found)


@given(fleets, limits)
def test_victims_are_not_blamed_while_somebody_does_not_answer(signs, limits):
    silent = Sign(9, 50.0, 5.0, False, 4.0, None, "forward", 41, 7.0, False)
    _, found = watch.look(0.1, watch.new(0.0), limits, [*signs, silent])
    assert all(isinstance(verdict, Lost) for verdict in found)
    answering = {s.rank for s in signs if s.silent_s <= 0.5}
    assert not blamed(found) & answering and 9 in blamed(found)


@given(fleets, limits, st.floats(0.6, 1000.0))
def test_after_a_pause_of_the_watcher_nobody_is_judged_for_a_second(signs, limits, gap):
    state = watch.new(0.0)
    state, _ = watch.look(0.1, state, limits, [])
    now = 0.1 + gap
    for _ in range(10):
        state, found = watch.look(now, state, limits, signs)
        assert found == []
        now += LOOK_S


@given(fleets, limits, st.floats(0.6, 1000.0))
def test_time_in_a_pause_counts_for_nobody(signs, limits, gap):
    """All answer, and were in their places for 0.3 s before a pause: when they are judged again, none is over a limit."""
    signs = [replace(sign, phi=0.0, silent_s=0.05, linked=True, link_down_s=0.0) for sign in signs]
    state, _ = watch.look(gap, watch.new(0.0), limits, [replace(sign, place_s=0.3 + gap) for sign in signs])
    for number in range(1, 12):
        later = number * LOOK_S
        aged = [replace(sign, place_s=0.3 + gap + later) for sign in signs]
        state, found = watch.look(gap + later, state, limits, aged)
        assert [verdict for verdict in found if verdict.failure != "deadlock"] == []
        assert found == [] or number >= 10


def test_random_faults_are_found_and_only_those():
    """Long stories of training with breaks of all kinds: each is named as what it is."""
    for seed in range(6):
        rng = random.Random(seed)
        play = Play(rng.choice((2, 3, 4, 8)))
        expected = []
        step = 100
        for _ in range(12):
            play.train(rng.uniform(1.0, 3.0), step_s=rng.choice((0.3, 0.5, 1.0)), first_step=step)
            step += 100
            rank = rng.randrange(len(play.ranks))
            kind = rng.choice(("hang", "partition", "gil", "stall", "deadlock", "busy"))
            expected += [] if kind == "busy" else [(kind, rank)]
            for other in range(len(play.ranks)):
                play.put(other, "collective", step)
            play.put(rank, "forward", step)
            if kind in ("hang", "partition"):
                play.fall_silent(rank, link_after_s=0.5, stopped=kind == "hang")
            elif kind in ("gil", "busy"):
                play.fall_silent(rank)
            elif kind == "deadlock":
                play.put(rank, rng.choice(("forward", "collective")), step + 1)
            play.go(1.5 if kind == "busy" else 1.8 if kind == "deadlock" else 3.0)
            play.come_back(rank)
            step += 100
        named = [(v.failure, v.rank if isinstance(v, Lost) else v.ranks[0]) for _, v in play.verdicts]
        assert named == expected
