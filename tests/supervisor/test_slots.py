"""What is known of one process: the newest of its heartbeats, reports and answers counts."""

from __future__ import annotations

import pytest

from ftnb.supervisor.ranks import Slot


def slot_in(place: str, step: int, place_s: float, now: float) -> Slot:
    slot = Slot("engine1", rank=0, state="training")
    slot.beat(now, {"phase": "training", "step": step, "place": place, "place_step": step, "place_s": place_s, "n": 1,
                    "at": now})  # fmt: skip
    return slot


def test_a_commit_ends_a_long_step_before_the_next_heartbeat_does() -> None:
    """A first step may take minutes. Once it is committed its limit is a short one, and all that is known of where the
    rank stands is still a heartbeat from within that step."""
    slot = slot_in("forward", 1, place_s=25.0, now=100.0)
    assert slot.stood_s(100.05) == pytest.approx(25.05)
    slot.moved = 100.02
    assert slot.stood_s(100.05) == pytest.approx(0.03)
    slot.beat(100.1, {"phase": "training", "step": 2, "place": "forward", "place_step": 2, "place_s": 0.01})
    assert slot.stood_s(100.1) == pytest.approx(0.01)


def test_who_was_told_to_go_on_is_not_held_any_more() -> None:
    slot = slot_in("held", 9, place_s=60.0, now=100.0)
    slot.went_on(100.05, "fetch", 10)
    assert (slot.place, slot.place_step) == ("fetch", 10)
    assert slot.stood_s(102.05) == pytest.approx(2.0)


def test_an_answer_is_newer_than_a_heartbeat() -> None:
    slot = slot_in("forward", 9, place_s=2.0, now=100.0)
    assert not slot.is_elsewhere(None), "who does not answer may still be there"
    assert not slot.is_elsewhere({"place": "forward", "step": 9, "stack": []})
    assert slot.is_elsewhere({"place": "wait", "step": None, "stack": []})
    assert slot.is_elsewhere({"place": "forward", "step": 10, "stack": []})
