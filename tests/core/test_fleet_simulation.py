"""A thousand simulated ranks over bad networks: who fails is found soon, and nobody else is ever accused."""

from __future__ import annotations

import pytest
from simulated_fleet import FAULTS, FOUND_TO_BE, LIMITS, Fleet, Plan

# Without and with loss and delay. Where messages are late by seconds, so are the pings of an I/O thread: nothing can be
# known of the connections, and a held interpreter lock cannot be told from a lost rank.
NETWORKS = {
    "good": (Plan(), 1.0),
    "bad": (Plan(loss=0.01, longest_delay_s=2.0, links_known=False, busy_every_s=0.0), 3.0),
}


def check(fleet, known_within_s):
    """What must hold after every story that has ended with some quiet."""
    assert fleet.false == []
    faults = [rank.fault for rank in fleet.ranks if rank.fault]
    assert sorted(fault for fault, _, _ in fleet.found) == sorted(faults)
    assert all(found == FOUND_TO_BE[fault] for fault, found, _ in fleet.found)
    assert max((seconds for _, _, seconds in fleet.found), default=0.0) <= known_within_s
    assert [event.kind for event in fleet.events].count("rank_failed") == len(faults)
    assert fleet.end is None and fleet.trains
    assert set(fleet.state.members) == fleet.survivors


def story(network, seed, **changes):
    plan, known_within_s = NETWORKS[network]
    return Plan(**{**plan.__dict__, **changes}), known_within_s


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("network", NETWORKS)
def test_a_minute_of_two_hundred_ranks(network, seed):
    plan, known_within_s = story(network, seed, fault_every_s=8.0, evaluate_every_s=40.0)
    fleet = Fleet(200, seed, plan)
    fleet.run(60.0)
    check(fleet, known_within_s)
    assert fleet.found and fleet.committed > 10


@pytest.mark.parametrize("network", NETWORKS)
def test_twenty_seconds_of_a_thousand_ranks(network):
    plan, known_within_s = story(network, 0, fault_every_s=4.0, pause_every_s=0.0, evaluate_every_s=0.0)
    fleet = Fleet(1000, 3, plan)
    fleet.run(20.0)
    check(fleet, known_within_s)
    assert fleet.committed > 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("network", NETWORKS)
def test_ten_minutes_of_a_thousand_ranks(network, seed):
    plan, known_within_s = NETWORKS[network]
    fleet = Fleet(1000, seed, plan)
    fleet.run(600.0)
    check(fleet, known_within_s)
    assert len(fleet.found) > 10 and fleet.committed > 100
    latest = max(seconds for _, _, seconds in fleet.found)
    print(
        f"\n{network}, seed {seed}: {fleet.num_beats} heartbeats, {len(fleet.found)} faults found after {latest:.1f} s at "
        f"most, {fleet.num_pauses} pauses of everything, {fleet.num_busy} held locks, {fleet.num_evaluations} "
        f"evaluations, {fleet.committed} steps, {fleet.state.generation} generations"
    )


def quiet(num_ranks, network="good", seed=0):
    plan, known_within_s = story(
        network, seed, fault_every_s=0.0, busy_every_s=0.0, pause_every_s=0.0, evaluate_every_s=0.0
    )
    fleet = Fleet(num_ranks, seed, plan)
    fleet.go_to(10.0)
    assert fleet.trains
    return fleet, known_within_s


@pytest.mark.parametrize("network", NETWORKS)
def test_half_of_the_ranks_are_cut_off_at_once(network):
    """A switch has failed. Those that are left go on, in one generation."""
    fleet, known_within_s = quiet(100, network)
    for number in range(0, 100, 2):
        fleet.break_rank(fleet.numbered[number], "partition")
    fleet.go_to(25.0)
    check(fleet, known_within_s)
    assert fleet.survivors == set(range(1, 100, 2))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_another_is_lost_during_the_recovery_from_the_first(network, fault):
    fleet, known_within_s = quiet(20, network)
    fleet.break_rank(fleet.numbered[3], fault)
    fleet.go_to(fleet.now + known_within_s * 0.8)
    fleet.break_rank(fleet.numbered[4], fault)
    fleet.go_to(30.0)
    check(fleet, known_within_s)


def test_a_lock_that_is_never_given_back():
    fleet, _ = quiet(20)
    fleet.break_rank(fleet.numbered[3], "gil")
    fleet.go_to(10.0 + LIMITS.hang_timeout_s + 5.0)
    check(fleet, LIMITS.hang_timeout_s + 0.5)
    assert fleet.found[0][2] >= LIMITS.hang_timeout_s


def test_pauses_of_everything_one_after_the_other():
    fleet, known_within_s = quiet(50)
    for _ in range(20):
        fleet.pause()
        fleet.go_to(fleet.now + 1.5)
    fleet.go_to(fleet.now + 2.0)
    check(fleet, known_within_s)


def test_the_same_seed_tells_the_same_story():
    def told(seed):
        fleet = Fleet(20, seed, story("bad", seed, fault_every_s=5.0)[0])
        fleet.run(30.0)
        return fleet.events, fleet.found, fleet.num_beats

    assert told(5) == told(5) != told(6)
