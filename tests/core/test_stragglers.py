"""Who is slower than the others, by own times: told once, after two windows, and not for noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftnb.core.stragglers import Straggler, Stragglers


def train(stragglers, own_s, steps, start=1, noise=0.0, rng=None):
    """Steps in which each rank takes its time; what was found, with the step after which."""
    rng = rng or random.Random(0)
    found = []
    for step in range(start, start + steps):
        for rank, seconds in own_s.items():
            stragglers.step(step, rank, seconds * (1 + rng.uniform(-noise, noise)))
        found += [(step, straggler) for straggler in stragglers.look()]
    return found


def test_a_rank_twice_as_slow_is_found_after_two_windows_and_told_once():
    found = train(Stragglers(20), {0: 0.1, 1: 0.1, 2: 0.2, 3: 0.1}, 200)
    assert found == [(40, Straggler(2, 2.0))]


def test_two_ranks_have_no_spread_and_still_compare():
    assert train(Stragglers(20), {0: 0.1, 1: 0.3}, 100) == [(40, Straggler(1, 3.0))]


def test_one_rank_alone_is_never_slow():
    assert train(Stragglers(5), {0: 3.0}, 50) == []


def test_just_below_the_factor_is_normal():
    assert train(Stragglers(20), {0: 0.1, 1: 0.1, 2: 0.149, 3: 0.1}, 200) == []
    assert train(Stragglers(20), {0: 0.1, 1: 0.1, 2: 0.151, 3: 0.1}, 40) == [(40, Straggler(2, 1.51))]


def test_where_all_differ_nobody_is_a_straggler():
    """The slowest is 1.6 times as slow as what is typical, but the others differ by as much."""
    assert train(Stragglers(20), {0: 0.06, 1: 0.1, 2: 0.14, 3: 0.16}, 200) == []


def test_fractions_of_a_millisecond_are_noise():
    assert train(Stragglers(20), {0: 0.0002, 1: 0.0002, 2: 0.0005, 3: 0.0002}, 200) == []


def test_a_few_slow_steps_do_not_count():
    stragglers, found = Stragglers(20), []
    for step in range(1, 401):
        for rank in range(4):
            stragglers.step(step, rank, 5.0 if rank == 2 and step % 20 in (3, 4, 9) else 0.1)
        found += stragglers.look()
    assert found == []


def test_slow_for_one_window_only_is_not_told():
    stragglers = Stragglers(20)
    normal, slow = {0: 0.1, 1: 0.1, 2: 0.1}, {0: 0.1, 1: 0.1, 2: 0.5}
    found = []
    for number in range(6):
        found += train(stragglers, slow if number % 2 else normal, 20, start=1 + 20 * number)
    assert found == []


def test_told_again_after_it_was_normal_for_a_window():
    stragglers = Stragglers(20)
    slow, normal = {0: 0.1, 1: 0.1, 2: 0.5}, {0: 0.1, 1: 0.1, 2: 0.1}
    assert train(stragglers, slow, 100) == [(40, Straggler(2, 5.0))]
    assert train(stragglers, normal, 20, start=101) == []
    assert train(stragglers, slow, 60, start=121) == [(160, Straggler(2, 5.0))]


def test_two_of_six_are_both_found():
    found = train(Stragglers(10), {0: 0.1, 1: 0.4, 2: 0.1, 3: 0.1, 4: 0.3, 5: 0.1}, 20)
    assert found == [(20, Straggler(1, 4.0)), (20, Straggler(4, 3.0))]


def test_a_new_generation_is_compared_by_new_steps_only():
    stragglers = Stragglers(20)
    train(stragglers, {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1}, 30)
    stragglers.changed((0, 1, 2))
    assert stragglers.typical() == {0: 0.1, 1: 0.1, 2: 0.1}
    # Each has more work now; a comparison with old steps in it would come at the tenth.
    found = train(stragglers, {0: 0.13, 1: 0.13, 2: 0.4}, 60, start=31)
    assert found == [(70, Straggler(2, 3.08))]


def test_what_is_known_of_a_slot_does_not_pass_to_its_next_process():
    stragglers = Stragglers(20)
    slow = {0: 0.1, 1: 0.1, 2: 0.5}
    assert train(stragglers, slow, 40) == [(40, Straggler(2, 5.0))]
    stragglers.changed((0, 1, 2), newcomers=(2,))
    assert stragglers.typical() == {0: 0.1, 1: 0.1}
    assert train(stragglers, slow, 60, start=41) == [(80, Straggler(2, 5.0))]


def test_who_stays_is_not_told_twice():
    stragglers = Stragglers(20)
    slow = {0: 0.1, 1: 0.1, 2: 0.5}
    assert train(stragglers, slow, 40) == [(40, Straggler(2, 5.0))]
    stragglers.changed((0, 1, 2))
    assert train(stragglers, slow, 60, start=41) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_thirty_percent_for_long_finds_nobody(seed):
    rng = random.Random(seed)
    own_s = {rank: 0.05 * rng.uniform(0.9, 1.1) for rank in range(8)}
    assert train(Stragglers(20), own_s, 2000, noise=0.3, rng=rng) == []


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9), st.randoms())
def test_names_of_ranks_do_not_matter(times, rng):
    """The same times under other numbers: the same factors."""
    names = list(range(100, 100 + len(times)))
    rng.shuffle(names)
    plain, named = Stragglers(3), Stragglers(3)
    one = train(plain, dict(enumerate(times)), 6)
    other = train(named, dict(zip(names, times)), 6)
    factors = sorted((names[s.rank], s.factor) for _, s in one)
    assert factors == sorted((s.rank, s.factor) for _, s in other)
    assert len(one) < len(times) / 2 + 1  # never most of them
