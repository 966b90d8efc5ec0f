from __future__ import annotations

import json

import pytest

from ftnb.core.events import KINDS, make_event


def test_an_event_holds_what_was_given_in_a_stable_order():
    event = make_event("rank_failed", 12, 2, rank=0, step=7, reason="killed by SIGKILL", failure="kill")
    assert event == {
        "time": 12.0,
        "kind": "rank_failed",
        "generation": 2,
        "rank": 0,
        "step": 7,
        "reason": "killed by SIGKILL",
        "failure": "kill",
    }
    assert list(event)[:3] == ["time", "kind", "generation"]
    assert isinstance(event["time"], float)


def test_fields_that_do_not_apply_are_left_out_but_zero_stays():
    event = make_event("supervisor_started", 1.5, None, rank=None, pid=0, note="", host=None)
    assert event == {"time": 1.5, "kind": "supervisor_started", "pid": 0, "note": ""}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_makes_a_line_of_json(kind):
    event = make_event(kind, 1.0, 1, step=3)
    assert json.loads(json.dumps(event)) == event


def test_an_unknown_kind_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="unknown event kind 'rank_fail'; did you mean 'rank_failed'"):
        make_event("rank_fail", 1.0, 1)
    with pytest.raises(ValueError, match=r"known kinds: .*run_finished"):
        make_event("xyz", 1.0, 1)
