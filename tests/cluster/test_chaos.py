"""Random faults in a real run: all survived, all told, and the supervisor's own death changes nothing about them."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from cluster_tools import DEADLINE_S, SAME_F64, Reference, assert_same, check_books, losses_of, wait_until
from comings import Gate, count, finish, start
from shared_cluster import SharedCluster

import ftnb
from ftnb.core import chaos
from ftnb.errors import RunError
from ftnb.wire import proc

KINDS = ["kill", "exit", "exception"]
MTBF_S = 0.7


def strokes(run: ftnb.Run) -> list[dict[str, Any]]:
    """The events of chaos: what was done, and what was left out."""
    return [event for event in run.events() if "chaos" in event]


def check_strokes(run: ftnb.Run, seed: int, kinds: list[str]) -> None:
    """Each fault of the plan is told, once and in order; every one that was done is a failure that was survived."""
    told = strokes(run)
    assert [event["chaos"] for event in told] == list(range(1, len(told) + 1))
    plan = islice(chaos.plan(seed, MTBF_S, kinds), len(told))
    assert [event["fault"] for event in told] == [stroke.kind for stroke in plan]
    done = [event for event in told if event["kind"] == "fault_injected"]
    spared = [event for event in told if event["kind"] == "fault_not_fired"]
    assert all("spared: " in event["reason"] for event in spared), spared
    lost = Counter((event["rank"], event["failure"]) for event in run.events() if event["kind"] == "rank_failed")
    assert lost == Counter((event["rank"], event["fault"]) for event in done)


def test_random_faults_are_survived(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    began = run.chaos(mtbf_s=MTBF_S, kinds=KINDS, seed=3)
    assert "one fault in 0.7 s on average, kill or exit or exception, seed 3" in began["reason"]
    with pytest.raises(RunError, match="%ft_chaos stop"):
        run.chaos(mtbf_s=1)
    wait_until(lambda: count(run, "fault_injected") >= 4, "four faults", 2 * DEADLINE_S)
    assert run.info()["chaos"]["injected"] >= 4
    told = run.chaos_stop()
    assert run.info()["chaos"] is None and told["injected"] + told["spared"] == len(strokes(run))
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    check_strokes(run, 3, KINDS)
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    with pytest.raises(RunError, match="is over"):
        run.chaos(mtbf_s=1)


def test_it_goes_on_under_the_next_supervisor(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    run = start(session, gate.cell)
    run.chaos(mtbf_s=MTBF_S, kinds=["kill"], seed=5)
    wait_until(lambda: count(run, "fault_injected") >= 2, "two faults", 2 * DEADLINE_S)
    lost = proc.identify(session.status()["supervisor_pid"])
    assert lost is not None
    lost.signal(9)
    wait_until(lambda: session.status()["supervisor_pid"] != lost.pid, "a successor")
    before = count(run, "fault_injected")
    wait_until(lambda: count(run, "fault_injected") >= before + 2, "two more faults", 2 * DEADLINE_S)
    run.chaos_stop()
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    told = strokes(run)
    assert [event["chaos"] for event in told] == list(range(1, len(told) + 1)), "each once, none twice"
    assert_same(losses_of(run), reference.losses, SAME_F64)
    cluster.stop()  # its supervisor is not the one that the other tests know


def test_by_chance_once(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell, recovery="shrink")
    answer = run.inject("kill", rank=1, probability=0.2, seed=1)
    assert "In each step with probability 0.2, and only once, rank 1 will be killed" in answer["reason"]
    wait_until(lambda: count(run, "recovered") == 1, "it has happened")
    (event,) = [event for event in run.events() if event["kind"] == "fault_injected"]
    assert event["probability"] == 0.2 and event["step"] > 3
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    assert_same(losses_of(run), reference.losses, SAME_F64)
