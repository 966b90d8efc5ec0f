"""How suspicious a silence is: phi over heartbeats that come late, in another order, or never."""

from __future__ import annotations

import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core.detector import LOST, PHI_MAX, TOLERANCE_S, WINDOW, Heartbeats

INTERVAL_S = 0.1


def punctual(beats=400, start=1000.0, origin=-500.0):
    """Heartbeats that came like a clock, and the time of the last of them; `origin`: the sender's clock at `start`."""
    heartbeats = Heartbeats(INTERVAL_S)
    for number in range(beats):
        heartbeats.beat(start + number * INTERVAL_S, number + 1, origin + number * INTERVAL_S)
    return heartbeats, start + (beats - 1) * INTERVAL_S


def arrivals(rng, beats, longest_s, lost=0.01, origin=7e5, drift=0.0):
    """(arrival, number, sent) in order of arrival, for delays that are equally likely up to `longest_s`."""
    messages = []
    for number in range(1, beats + 1):
        at = number * INTERVAL_S
        if rng.random() >= lost:
            messages.append((at + rng.uniform(0.0, longest_s), number, origin + at * (1 + drift)))
    return sorted(messages)


def watch(messages, until_s):
    """The real thing, looked at ten times a second: (time, phi) of every look, and the heartbeats."""
    heartbeats, looks, at = Heartbeats(INTERVAL_S), [], 0
    for number in range(1, round(until_s / INTERVAL_S)):
        now = number * INTERVAL_S
        while at < len(messages) and messages[at][0] <= now:
            heartbeats.beat(*messages[at])
            at += 1
        looks.append((now, heartbeats.phi(now)))
    return looks, heartbeats


# --- what it says


def test_before_the_first_heartbeat_nothing_is_known():
    heartbeats = Heartbeats(INTERVAL_S)
    heartbeats.excuse(1.0, 3.0)
    assert heartbeats.age_s(5.0) is None
    assert heartbeats.phi(5.0) is None


def test_age_counts_from_the_last_heartbeat_and_is_never_negative():
    heartbeats = Heartbeats(INTERVAL_S)
    heartbeats.beat(10.0)
    heartbeats.beat(12.0)
    assert heartbeats.last == 12.0
    assert heartbeats.age_s(12.5) == 0.5
    assert heartbeats.age_s(11.0) == 0.0


def test_age_counts_from_sending_whatever_the_sender_s_clock_says():
    """News that was on its way for a second is a second old."""
    heartbeats, last = punctual()
    heartbeats.beat(last + 1.1, 401, -500.0 + 400 * INTERVAL_S)
    assert heartbeats.last == last + 1.1
    assert heartbeats.age_s(last + 1.1) == pytest.approx(1.0)


def test_each_heartbeat_that_is_missing_adds_two():
    heartbeats, last = punctual()
    assert heartbeats.phi(last + INTERVAL_S) == 0.0
    for missing in range(1, 10):
        now = last + missing * INTERVAL_S + TOLERANCE_S + 0.01
        assert heartbeats.phi(now) == pytest.approx(-missing * math.log10(LOST))
    assert heartbeats.phi(last + 1e9) == PHI_MAX


def test_eight_is_reached_within_half_a_second():
    """What the time to detect a stopped rank rests on."""
    heartbeats, last = punctual()
    assert heartbeats.phi(last + 0.4) < 8 <= heartbeats.phi(last + 0.5)


def test_a_small_delay_is_no_suspicion():
    heartbeats, last = punctual()
    assert heartbeats.phi(last + INTERVAL_S + TOLERANCE_S - 0.01) == 0.0
    assert heartbeats.phi(last + 2 * INTERVAL_S) < 3


def test_without_number_and_time_gaps_count_as_before():
    """Gaps between arrivals stand for delays."""
    steady, unsteady, now, rng = Heartbeats(INTERVAL_S), Heartbeats(INTERVAL_S), 0.0, random.Random(1)
    for number in range(400):
        steady.beat(number * INTERVAL_S)
        now += rng.uniform(0.02, 0.6)
        unsteady.beat(now)
    assert unsteady.phi(now + 0.5) < 3 < 8 <= steady.phi(399 * INTERVAL_S + 0.5)


def test_what_has_just_come_is_given_more_time():
    """From three heartbeats nobody knows how long the way can take."""
    heartbeats, last = punctual(beats=3)
    assert heartbeats.phi(last + 0.6) < 3
    assert heartbeats.phi(last + 2.5) > 8


def test_one_long_pause_hardly_delays_the_next_verdict():
    """Python sorted for 5 s: one heartbeat late, not fifty."""
    heartbeats, last = punctual()
    sent = -500.0 + 399 * INTERVAL_S
    for number in range(1, 60):
        heartbeats.beat(last + 5.0 + number * INTERVAL_S, 400 + number, sent + 5.0 + number * INTERVAL_S)
    now = last + 5.0 + 59 * INTERVAL_S
    assert heartbeats.phi(now + 0.05) == 0.0
    assert heartbeats.phi(now + 0.55) >= 8


def test_delays_of_long_ago_are_forgotten():
    heartbeats, number = Heartbeats(INTERVAL_S), 0
    for number in range(1, WINDOW + 1):
        heartbeats.beat(number * INTERVAL_S + (number % 20) * INTERVAL_S, number, number * INTERVAL_S)
    slow = heartbeats.phi(WINDOW * INTERVAL_S + 2.0)
    for number in range(WINDOW + 1, 2 * WINDOW + 40):
        heartbeats.beat(number * INTERVAL_S, number, number * INTERVAL_S)
    assert slow < 8 <= heartbeats.phi(number * INTERVAL_S + 0.5)


# --- loss, delay, another order


@pytest.mark.parametrize("longest_s", [0.0, 0.1, 0.5, 2.0])
def test_phi_means_what_it_says(longest_s):
    """φ >= 1 at no more than about one look in ten, φ >= 2 at one in a hundred, and so on."""
    looks = []
    for seed in range(3):
        # The first seconds rest on an assumption, and are looked at in the test after the next.
        watched, _ = watch(arrivals(random.Random(seed), 6000, longest_s), 600.0)
        looks += [phi for now, phi in watched if now > 30]
    for nines in (1, 2, 3):
        assert sum(phi >= nines for phi in looks) <= 1.5 * len(looks) * 10**-nines
    assert max(looks) < 8


def test_a_death_is_certain_soon_after_the_last_message_can_have_come():
    for seed in range(20):
        rng = random.Random(seed)
        death = 60 + rng.uniform(0, 1)
        messages = [m for m in arrivals(rng, 700, 2.0) if m[1] * INTERVAL_S <= death]
        looks, _ = watch(messages, 70.0)
        assert next(now for now, phi in looks if phi is not None and phi >= 12) - death < 3.0


def test_the_first_seconds_are_no_reason_to_suspect_anybody():
    """Of delays up to 2 s the short ones come first: the sample is wrong, and must not be trusted yet."""
    for seed in range(300):
        looks, _ = watch(arrivals(random.Random(seed), 80, 2.0), 8.0)
        assert max(phi for _, phi in looks if phi is not None) < 8


def test_clocks_that_drift_apart_do_not_matter():
    """A thousandth, which no clock is wrong by: in ten minutes 0.6 s, six heartbeats."""
    for drift in (-1e-3, 1e-3):
        looks, heartbeats = watch(arrivals(random.Random(3), 6000, 0.01, drift=drift), 599.0)
        assert max(phi for _, phi in looks if phi is not None) < 8
        assert heartbeats.age_s(599.0) < 0.3


def test_one_that_follows_a_lost_one_is_not_late():
    heartbeats = Heartbeats(INTERVAL_S)
    for number in range(1, 400):
        if number % 3:
            heartbeats.beat(number * INTERVAL_S, number, number * INTERVAL_S)
    assert heartbeats.phi(398 * INTERVAL_S + 0.5) >= 8


def test_a_message_that_was_overtaken_does_not_make_the_newest_older():
    heartbeats, last = punctual()
    heartbeats.beat(last + 0.3, 403, -500.0 + 402 * INTERVAL_S)
    heartbeats.beat(last + 0.35, 401, -500.0 + 400 * INTERVAL_S)
    assert heartbeats.age_s(last + 0.4) == pytest.approx(0.1)
    assert heartbeats.phi(last + 0.4) == 0.0


def test_the_same_message_twice_changes_nothing_that_matters():
    one, last = punctual()
    two, _ = punctual()
    two.beat(last, 400, -500.0 + 399 * INTERVAL_S)
    for silence in (0.0, 0.2, 0.5):
        assert one.phi(last + silence) == pytest.approx(two.phi(last + silence), abs=0.01)


def test_a_sender_that_begins_to_count_anew_is_heard():
    heartbeats, last = punctual()
    heartbeats.beat(last + 0.5, 1, -500.0 + 399 * INTERVAL_S + 0.5)
    assert heartbeats.phi(last + 0.55) == 0.0
    assert heartbeats.age_s(last + 0.55) == pytest.approx(0.05)


# --- the watcher's own pauses


def test_silence_while_the_watcher_was_stopped_counts_for_nobody():
    heartbeats, last = punctual()
    assert heartbeats.phi(last + 5.1) == PHI_MAX
    heartbeats.excuse(5.0, last + 5.1)
    assert heartbeats.phi(last + 5.1) == 0.0
    assert heartbeats.phi(last + 5.1 + 0.5) >= 8  # a rank that does not come back is found as soon as any other


def test_nor_where_they_are_read_in_another_order():
    heartbeats, last = punctual()
    now, sent = last + 5.0, -500.0 + 399 * INTERVAL_S
    heartbeats.excuse(5.0, now)
    for number in range(50, 0, -1):
        heartbeats.beat(now, 400 + number, sent + number * INTERVAL_S)
    assert heartbeats.phi(now + 0.5) >= 8


def test_silence_from_before_the_pause_still_counts():
    heartbeats, last = punctual()
    heartbeats.excuse(5.0, last + 5.3)
    assert heartbeats.phi(last + 5.3) == pytest.approx(heartbeats.phi(last + 0.3 + 5.0))
    assert 2 <= heartbeats.phi(last + 5.3) < 8


def test_delays_that_the_watcher_caused_are_not_remembered():
    """While it was stopped, fifty messages waited for it."""
    heartbeats, last = punctual()
    now, sent = last + 5.0, -500.0 + 399 * INTERVAL_S
    heartbeats.excuse(5.0, now)
    for number in range(1, 51):
        heartbeats.beat(now, 400 + number, sent + number * INTERVAL_S)
    assert heartbeats.phi(now + 0.5) >= 8


def test_a_message_from_before_the_pause_that_comes_after_it_is_no_reason_for_suspicion():
    """It makes the newest news newer, yet still older than the pause."""
    heartbeats, last = punctual()
    heartbeats.excuse(5.0, last + 5.0)
    heartbeats.beat(last + 5.0, 401, -500.0 + 400 * INTERVAL_S)
    heartbeats.beat(last + 5.0, 402, -500.0 + 401 * INTERVAL_S)
    assert heartbeats.phi(last + 5.1) == 0.0
    assert heartbeats.phi(last + 5.5) >= 8


def test_a_pause_before_the_last_message_excuses_nothing_in_advance():
    heartbeats, last = punctual()
    heartbeats.excuse(60.0, last)
    assert heartbeats.phi(last + 0.5) >= 8


# --- properties


# (delay, lost); whole milliseconds, so that looks in between are not decided by the last digits of a clock
delays = st.lists(st.tuples(st.integers(0, 3000).map(lambda ms: ms / 1000), st.booleans()), max_size=150)


@given(delays, st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.floats(-1e6, 1e6))
def test_phi_only_grows_while_the_rank_is_silent(sent, one, other, origin):
    messages = [(n * INTERVAL_S + delay, n + 1, origin + n * INTERVAL_S) for n, (delay, lost) in enumerate(sent) if not lost]
    heartbeats = Heartbeats(INTERVAL_S)
    heartbeats.beat(0.0, 0, origin - INTERVAL_S)
    for message in sorted(messages):
        heartbeats.beat(*message)
    early, late = sorted((one, other))
    last = heartbeats.last
    assert 0.0 <= heartbeats.phi(last + early) <= heartbeats.phi(last + late) <= PHI_MAX
    assert heartbeats.age_s(last + early) <= heartbeats.age_s(last + late)


@given(delays, st.integers(-10**6, 10**6), st.integers(0, 5000))
def test_the_origin_of_the_sender_s_clock_does_not_matter(sent, origin, silence):
    def heard(origin):
        heartbeats = Heartbeats(INTERVAL_S)
        for now, number in sorted((n * INTERVAL_S + delay, n + 1) for n, (delay, lost) in enumerate(sent) if not lost):
            heartbeats.beat(now, number, origin + (number - 1) * INTERVAL_S)
        return heartbeats

    here, there = heard(0), heard(origin)
    if here.last is not None:
        now = here.last + silence / 1000 + 0.0005
        assert there.age_s(now) == pytest.approx(here.age_s(now), abs=1e-6)
        assert there.phi(now) == pytest.approx(here.phi(now), abs=1e-6)


def test_a_rank_takes_little_memory():
    heartbeats, last = punctual(beats=3 * WINDOW)
    heartbeats.phi(last + 3.0)
    held = sum(sys.getsizeof(getattr(heartbeats, name)) for name in Heartbeats.__slots__)
    assert held < 8192
