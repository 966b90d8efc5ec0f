"""Steps that take long, for all ranks or for one: nobody is stuck, and nobody is out of step."""

from __future__ import annotations

from cluster_tools import DEADLINE_S, GLOBAL_BATCH, cell_with_trouble

import ftnb


def begin(session: ftnb.Session, step_s: float, steps: int, **options: object) -> ftnb.Run:
    cell = cell_with_trouble(f"__import__('time').sleep({step_s})")
    return session.train(cell, steps=steps, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None, **options)


def check_nobody_was_suspected(run: ftnb.Run) -> None:
    run.wait(timeout_s=DEADLINE_S)
    assert run.state == "finished", run.info()["reason"]
    assert not [event for event in run.events() if event["kind"] in ("rank_suspected", "rank_failed", "regroup_started")]


def test_every_step_takes_longer_than_the_limit_for_a_rank_that_does_not_move(session: ftnb.Session) -> None:
    """From the second one on: how long a step takes is known from the first."""
    check_nobody_was_suspected(begin(session, 1.6, 4, hang_timeout_s=1.0))


def test_a_rank_that_becomes_slow_in_long_steps_is_in_step_with_the_others(session: ftnb.Session) -> None:
    run = begin(session, 0.4, 12)
    run.inject("slow", rank=2, at_step=4, factor=6, duration_s=5)
    check_nobody_was_suspected(run)
    assert [event["rank"] for event in run.events() if event["kind"] == "fault_injected"] == [2]
