"""How suspicious a silence is: phi over the arrival times of heartbeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core.detector import MIN_STD_S, WINDOW, Heartbeats


def punctual(interval_s=0.1, beats=200, start=1000.0):
    """Heartbeats that came like a clock, and the time of the last of them."""
    heartbeats = Heartbeats(interval_s)
    for number in range(beats):
        heartbeats.beat(start + number * interval_s)
    return heartbeats, start + (beats - 1) * interval_s


def test_before_the_first_heartbeat_nothing_is_known():
    heartbeats = Heartbeats(0.1)
    assert heartbeats.age_s(5.0) is None
    assert heartbeats.phi(5.0) is None


def test_age_counts_from_the_last_heartbeat_and_is_never_negative():
    heartbeats = Heartbeats(0.1)
    heartbeats.beat(10.0)
    heartbeats.beat(12.0)
    assert heartbeats.age_s(12.5) == 0.5
    assert heartbeats.age_s(11.0) == 0.0


def test_phi_is_the_number_of_nines():
    """For a gap one, two, ... standard deviations beyond the mean: the tail of the normal distribution."""
    heartbeats, last = punctual()
    mean = 0.1
    for deviations, tail in [(0, 0.5), (1, 0.15866), (2, 0.02275), (3, 0.00135), (5, 2.8665e-7)]:
        phi = heartbeats.phi(last + mean + deviations * MIN_STD_S)
        assert 10**-phi == pytest.approx(tail, rel=1e-3)


def test_a_punctual_rank_is_not_suspected_for_a_small_delay():
    heartbeats, last = punctual()
    assert heartbeats.phi(last + 0.1) < 1
    assert heartbeats.phi(last + 0.2) < 3
    assert heartbeats.phi(last + 1.0) > 8


def test_a_long_silence_has_a_bounded_phi():
    heartbeats, last = punctual()
    assert heartbeats.phi(last + 1e6) == 99.0


def test_an_unsteady_sender_is_given_more_time():
    steady, last = punctual()
    unsteady, now, rng = Heartbeats(0.1), last - 20.0, random.Random(1)
    for _ in range(200):
        now += rng.uniform(0.02, 0.6)
        unsteady.beat(now)
    assert unsteady.phi(now + 0.5) < 3 < steady.phi(last + 0.5)


def test_old_gaps_are_forgotten():
    heartbeats = Heartbeats(0.1)
    now = 0.0
    for _ in range(WINDOW):
        now += 5.0
        heartbeats.beat(now)
    assert heartbeats.phi(now + 2.0) < 1
    for _ in range(WINDOW + 1):
        now += 0.1
        heartbeats.beat(now)
    assert heartbeats.phi(now + 2.0) > 8


gaps = st.lists(st.floats(0.001, 10.0), max_size=150)


@given(gaps, st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_phi_only_grows_while_the_rank_is_silent(intervals, one, other):
    heartbeats, now = Heartbeats(0.1), 0.0
    heartbeats.beat(now)
    for interval in intervals:
        now += interval
        heartbeats.beat(now)
    early, late = sorted((one, other))
    assert 0.0 <= heartbeats.phi(now + early) <= heartbeats.phi(now + late) <= 99.0
