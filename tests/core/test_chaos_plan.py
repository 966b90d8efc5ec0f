"""Random faults: a Poisson process that a seed repeats, and what is left out because a run could not survive it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftnb.core import chaos, faults

RUNNING = chaos.Moment("running", healthy=4, options={"on_nan": "stop"})


def first(number, *arguments):
    return list(islice(chaos.plan(*arguments), number))


@given(seed=st.integers(0, 2**40), mtbf_s=st.floats(0.01, 1e4))
@settings(max_examples=50)
def test_the_same_seed_gives_the_same_plan(seed, mtbf_s):
    plan = first(50, seed, mtbf_s, chaos.DEFAULT_KINDS)
    assert plan == first(50, seed, mtbf_s, chaos.DEFAULT_KINDS)
    assert [stroke.number for stroke in plan] == list(range(1, 51))
    assert all(0.0 <= stroke.pick < 1.0 for stroke in plan)
    times = [stroke.at_s for stroke in plan]
    assert times == sorted(times) and times[0] > 0
    # Whatever kinds are asked for, and however often: nothing but the kinds and the scale of time changes.
    other = first(50, seed, 2 * mtbf_s, ["kill", "slow"])
    assert [stroke.pick for stroke in other] == [stroke.pick for stroke in plan]
    assert [stroke.at_s for stroke in other] == pytest.approx([2 * at for at in times])
    assert plan != first(50, seed + 1, mtbf_s, chaos.DEFAULT_KINDS)


def test_the_rate_is_that_of_a_poisson_process():
    """Mean and variance of the number of faults in a window are both its length / mtbf; kinds and picks are even."""
    plan = list(takewhile(lambda stroke: stroke.at_s < 60_000, chaos.plan(3, 10.0, chaos.DEFAULT_KINDS)))
    assert len(plan) == pytest.approx(6000, rel=0.05)
    windows = Counter(int(stroke.at_s // 100) for stroke in plan)
    counts = [windows[number] for number in range(600)]
    mean = sum(counts) / 600
    variance = sum((count - mean) ** 2 for count in counts) / 599
    assert mean == pytest.approx(10, rel=0.05) and variance == pytest.approx(10, rel=0.2)
    kinds = Counter(stroke.kind for stroke in plan)
    assert set(kinds) == set(chaos.DEFAULT_KINDS)
    assert all(number == pytest.approx(len(plan) / 5, rel=0.15) for number in kinds.values())
    ranks = Counter(chaos.choose(stroke.pick, range(4)) for stroke in plan)
    assert all(number == pytest.approx(len(plan) / 4, rel=0.15) for number in ranks.values())


def test_only_what_ends_by_itself_gets_a_duration():
    plan = first(500, 1, 10.0, list(faults.KINDS))
    assert {stroke.kind for stroke in plan} == set(faults.KINDS)
    assert {stroke.kind for stroke in plan if stroke.duration_s is not None} == {"slow"}
    assert all("duration_s" in faults.KINDS[s.kind].takes for s in plan if s.duration_s is not None)


@given(pick=st.floats(0, 1, exclude_max=True), living=st.sets(st.integers(0, 2000), min_size=1))
def test_a_living_rank_is_chosen(pick, living):
    assert chaos.choose(pick, living) in living
    assert chaos.choose(0.0, living) == min(living)


def test_default_kinds_are_known():
    assert set(chaos.DEFAULT_KINDS) <= set(faults.KINDS)
    assert chaos.spare("kill", RUNNING) is None


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("kill", {"state": "recovering"}, "a recovery is going on"),
        ("kill", {"state": "paused"}, "the run is paused"),
        ("kill", {"state": "starting"}, "the run is starting"),
        ("kill", {"healthy": 0}, "the next generation"),
        ("hang", {"healthy": 1}, "only one rank"),
        ("hang", {"outstanding": "the hang of rank 2 is not over yet"}, "hang of rank 2"),
        ("nan", {}, "--on-nan stop"),
        ("bitflip", {}, "--check-replicas"),
    ],
)
def test_what_the_run_could_not_survive_is_spared(kind, change, words):
    assert words in chaos.spare(kind, replace(RUNNING, **change))


def test_what_is_found_and_undone_is_not_spared():
    assert chaos.spare("nan", replace(RUNNING, options={"on_nan": "skip"})) is None
    assert chaos.spare("bitflip", replace(RUNNING, options={"check_replicas": 5})) is None
    assert chaos.spare("kill", replace(RUNNING, healthy=2)) is None
