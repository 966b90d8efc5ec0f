"""The keeper: which processes are started when, and when it is enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftnb.core import keeper
from ftnb.core.keeper import GiveUp, Need, Pooled, Start, State, decide, failed, forgive, succeeded

REASON = "It ended with exit status 1."


def need(vacant=(), num_spares=0, pool=()):
    return Need(frozenset(vacant), num_spares, tuple(pool))


def starting(intended=None, key="a"):
    return Pooled(key, intended, ready=False)


def ready(intended=None, key="a"):
    return Pooled(key, intended, ready=True)


def decided(state, wanted, now_s=100.0):
    return decide(now_s, state, wanted)[1]


def failed_times(number, intended=2, last_s=100.0):
    state = State()
    for _ in range(number):
        state = failed(last_s, state, intended, REASON)
    return state


def test_nothing_is_started_when_nothing_is_missing():
    assert decided(State(), need()) == []
    assert decided(State(), need(num_spares=1, pool=[ready()])) == []
    assert decided(State(), need(vacant={2}, pool=[starting(2)])) == []


def test_a_vacant_slot_gets_a_process_of_its_own():
    assert decided(State(), need(vacant={2})) == [Start(2)]
    assert decided(State(), need(vacant={2, 1}, pool=[starting(1)])) == [Start(2)]


def test_a_spare_that_is_there_takes_the_slot_and_is_replaced():
    assert decided(State(), need(vacant={2}, num_spares=1, pool=[ready()])) == [Start(None)]


def test_a_replacement_that_came_too_late_takes_another_slot():
    assert decided(State(), need(vacant={2}, pool=[starting(1)])) == []


def test_it_is_not_taken_for_two_slots():
    assert decided(State(), need(vacant={1, 2}, pool=[ready(), ready(3)])) == []
    assert decided(State(), need(vacant={0, 1, 2}, pool=[ready(), ready(3)])) == [Start(2)]


def test_a_second_replacement_for_the_same_slot_is_a_spare():
    pool = [starting(1, "a"), starting(1, "b")]
    assert decided(State(), need(vacant={1}, num_spares=1, pool=pool)) == []


def test_slots_come_before_spares_and_not_all_at_once():
    assert decided(State(), need(vacant={1, 3}, num_spares=5)) == [Start(1), Start(3), Start(None), Start(None)]
    pool = [starting(key=str(number)) for number in range(3)]
    assert decided(State(), need(num_spares=9, pool=pool)) == [Start(None)]


def test_the_wait_doubles_with_each_failure():
    for number, wait_s in ((1, 1.0), (2, 2.0)):
        state = failed_times(number)
        assert decided(state, need(vacant={2}), 100.0 + wait_s - 0.01) == []
        assert decided(state, need(vacant={2}), 100.0 + wait_s) == [Start(2)]
        assert decided(state, need(vacant={2, 1}), 100.0) == [Start(1)], "the others do not wait"


def test_a_slot_is_given_up_once_with_the_last_reason():
    state = failed(101.0, failed_times(2), 2, "The last one.")
    state, decisions = decide(500.0, state, need(vacant={2, 3}))
    assert decisions == [GiveUp(2, "The last one."), Start(3)]
    state, decisions = decide(501.0, failed(501.0, state, 2, "Once more."), need(vacant={2}))
    assert decisions == []
    assert decided(forgive(state), need(vacant={2}), 501.0) == [Start(2)]


def test_spares_are_given_up_as_well():
    state = failed_times(3, intended=None)
    state, decisions = decide(500.0, state, need(vacant={2}, num_spares=1))
    assert decisions == [Start(2), GiveUp(None, REASON)]
    assert decided(state, need(vacant={2}, num_spares=1), 500.0) == [Start(2)]


def test_no_spare_is_started_that_would_only_be_one_more_try_for_a_blocked_slot():
    for state in (failed_times(1), decide(100.0, failed_times(3), need(vacant={2}))[0]):
        assert decided(state, need(vacant={2}, num_spares=1), 100.5) == []
    assert decided(failed_times(1), need(vacant={2}, num_spares=1), 101.0) == [Start(2), Start(None)]


def test_a_success_clears_the_slot():
    state = succeeded(failed_times(2), 2)
    assert decided(failed(100.0, state, 2, REASON), need(vacant={2}), 101.0) == [Start(2)]
    state, _ = decide(200.0, failed_times(3), need(vacant={2}))
    assert decided(succeeded(state, 2), need(vacant={2}), 200.0) == [Start(2)], "a spare took it, and works"


def test_a_slot_that_was_given_up_and_cleared_can_be_given_up_again():
    state, _ = decide(200.0, failed_times(3), need(vacant={2}))
    state = succeeded(state, 2)
    for _ in range(3):
        state = failed(300.0, state, 2, REASON)
    assert decided(state, need(vacant={2}), 400.0) == [GiveUp(2, REASON)]


def test_thirty_kills_of_healthy_ranks_in_a_row_slow_nothing_down():
    state, now_s = State(), 100.0
    for number in range(30):
        slot = number % 2
        state, decisions = decide(now_s, state, need(vacant={slot}))
        assert decisions == [Start(slot)]
        state = succeeded(state, slot)
        now_s += 0.2


def test_a_storm_of_starts_waits_until_the_first_of_them_is_a_minute_ago():
    state, started_at = State(), []
    for tenth in range(650):
        now_s = 100.0 + tenth / 10
        state, decisions = decide(now_s, state, need(vacant={tenth}))
        started_at += [now_s] * len(decisions)
    assert len(started_at) == keeper.MAX_STARTS + 40 and started_at[40] >= 100.0 + keeper.STORM_WINDOW_S
    assert forgive(state).starts_s == state.starts_s, "no reason to start more than the machine can take"


def test_a_clock_that_is_set_back_stops_nothing_for_long():
    state = failed(5000.0, State(), 2, REASON)
    for _ in range(keeper.MAX_STARTS // 4):
        state, _ = decide(5000.0, state, need(num_spares=4))
    state, decisions = decide(100.0, state, need(vacant={2}))
    assert decisions == []
    assert decided(state, need(vacant={2}), 100.0 + keeper.STORM_WINDOW_S) == [Start(2)]


# --- any history -------------------------------------------------------------------------------------------

SLOTS = st.integers(0, 3)
WHAT = st.one_of(
    st.tuples(st.just("vacate"), SLOTS),
    st.tuples(st.just("want"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["ready", "take", "lose", "fail", "succeed"]), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 4, 30])),
    st.tuples(st.just("forgive"), st.just(0)),
)


class Shell:
    """Does what the keeper says, keeps its own count of what happened, and checks every decision against that."""

    def __init__(self):
        self.now_s, self.state = 1000.0, State()
        self.vacant, self.num_spares = frozenset(), 0
        self.pool, self.all_starts, self.number = [], [], 0
        self.failures, self.said = {}, set()

    def do(self, what, which):
        if what == "vacate":
            self.vacant |= {which}
        elif what == "want":
            self.num_spares = which
        elif what == "wait":
            self.now_s += which
        elif what == "forgive":
            self.state, self.failures, self.said = forgive(self.state), {}, set()
        elif what == "succeed":
            slot = (None, 0, 1, 2, 3)[which % 5]
            self.state = succeeded(self.state, slot)
            self.failures.pop(slot, None)
            self.said.discard(slot)
        elif self.pool:
            process = self.pool.pop(which % len(self.pool))
            if what == "ready":
                self.pool.append(Pooled(process.key, process.intended, True))
            elif what == "fail":
                self.state = failed(self.now_s, self.state, process.intended, REASON)
                number, _ = self.failures.get(process.intended, (0, 0))
                self.failures[process.intended] = (number + 1, self.now_s)
            elif what == "take" and process.ready and self.vacant:
                own = process.intended in self.vacant
                self.vacant -= {process.intended if own else min(self.vacant)}
        self.decide()

    def decide(self):
        wanted = Need(self.vacant, self.num_spares, tuple(self.pool))
        self.state, decisions = decide(self.now_s, self.state, wanted)
        given_up = [d.intended for d in decisions if isinstance(d, GiveUp)]
        for slot in given_up:
            assert self.failures[slot][0] >= 3 and slot not in self.said
            self.said.add(slot)
        starts = [d.intended for d in decisions if isinstance(d, Start)]
        for slot in starts:
            assert slot is None or slot in self.vacant
            number, last_s = self.failures.get(slot, (0, 0.0))
            assert number < 3 and (not number or self.now_s - last_s >= 2 ** (number - 1))
        for intended in starts:
            self.number += 1
            self.pool.append(Pooled(str(self.number), intended, False))
        self.all_starts += [self.now_s] * len(starts)
        assert sum(then_s > self.now_s - 60.0 for then_s in self.all_starts) <= 40
        if starts:
            assert sum(not process.ready for process in self.pool) <= 4
            assert len(self.pool) <= len(self.vacant) + self.num_spares, "more than anybody wants"
        repeated = decide(self.now_s, self.state, Need(self.vacant, self.num_spares, tuple(self.pool)))
        assert repeated == (self.state, []), "asked again at once, there is nothing more to do"


@given(st.lists(WHAT, max_size=60))
def test_any_history_keeps_the_rules_and_all_is_well_once_the_trouble_is_over(history):
    shell = Shell()
    for what, which in history:
        shell.do(what, which)
    shell.do("forgive", 0)
    for _ in range(40):
        shell.do("wait", 30)
        shell.do("ready", 0)
    pool = {process.intended for process in shell.pool}
    assert len(shell.pool) >= len(shell.vacant) + shell.num_spares
    assert all(process.ready for process in shell.pool) and len(pool) <= 5
