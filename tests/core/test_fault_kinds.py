"""The table of faults: what each takes, the words about it, and a step that is drawn once for all."""

from __future__ import annotations

import random

import pytest

from ftnb.core import faults
from ftnb.errors import UsageError

ALL = ("kill", "exit", "exception", "hang", "stall", "deadlock", "gil", "slow", "nan", "bitflip", "oom", "partition")


def test_every_kind_of_the_design_is_there_and_told_in_full():
    assert tuple(sorted(faults.KINDS)) == tuple(sorted(ALL))
    for name, kind in faults.KINDS.items():
        assert kind.name == name
        assert all((kind.what, kind.found, kind.will, kind.event))
        assert len(f"{kind.what} → {kind.found}") < 125, "a line"
    assert not set(faults.KINDS) & set(faults.LATER_KINDS)


@pytest.mark.parametrize(
    "kind, given, words",
    [
        ("kill", {"factor": 2.0}, r"'kill' takes no factor \(--factor\). It takes: rank, at_step, after_s, probability\."),
        ("kill", {"duration_s": 2.0}, r"no duration_s \(--duration\)"),
        ("deadlock", {"duration_s": 2.0}, "takes no duration_s"),
        ("hang", {"factor": 2.0}, "It takes: rank, at_step, after_s, probability, duration_s"),
        ("kill", {"seed": 3}, r"only together with probability"),
        ("kill", {"at_step": 3, "after_s": 1.0}, "not several"),
        ("kill", {"at_step": 3, "probability": 0.1}, "not several"),
        ("disk-full", {}, "not available yet"),
        ("hng", {}, "Did you mean hang"),
        (None, {}, "no fault None"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(kind, given, words):
    with pytest.raises(UsageError, match=words):
        faults.check_options(kind, given)


@pytest.mark.parametrize(
    "kind, given",
    [
        ("kill", {"rank": 2, "at_step": 4, "factor": None}), ("hang", {"duration_s": 0.2, "after_s": 1.0}),
        ("slow", {"duration_s": 5.0, "factor": 2.0}), ("bitflip", {"seed": 7, "at_step": 5}),
        ("kill", {"probability": 0.1, "seed": 7}), ("partition", {"duration_s": 1.0}),
    ],
)  # fmt: skip
def test_what_makes_sense_is_taken(kind, given):
    faults.check_options(kind, given)


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.9])
def test_one_draw_is_as_good_as_a_die_in_every_step(probability):
    generator = random.Random(5)
    drawn = [faults.steps_until(probability, generator.random()) for _ in range(20_000)]
    assert min(drawn) >= 1
    assert sum(drawn) / len(drawn) == pytest.approx(1 / probability, rel=0.03)
    for step in (1, 2, 5):
        still_there = [n for n in drawn if n >= step]
        now = sum(n == step for n in still_there)
        if len(still_there) > 1000:
            assert now / len(still_there) == pytest.approx(probability, rel=0.2)


def test_certain_and_nearly_impossible():
    assert faults.steps_until(1.0, 0.999999) == faults.steps_until(0.5, 0.0) == 1
    assert faults.steps_until(1e-12, 0.5) > 10**11


def test_replies_say_when_what_and_what_to_expect():
    shrink, replace = {"recovery": "shrink"}, {"recovery": "replace"}
    for kind in ALL:
        text = faults.reply({"kind": kind, "rank": 2}, replace)
        assert text.count("ank 2 ") == 1 and text.endswith("."), text
        assert ("now" in text) == (kind in ("kill", "hang", "partition")), text
    assert faults.reply({"kind": "kill", "rank": 1}, shrink) == (
        "Rank 1 is killed now (SIGKILL). Expect the others to go on without it."
    )
    hang = faults.reply({"kind": "hang", "rank": 1, "at_step": 40, "duration_s": 0.2}, replace)
    assert hang.startswith("Inside step 40, rank 1 will be stopped (SIGSTOP) for 0.2 s.") and "too short" in hang
    long = faults.reply({"kind": "hang", "rank": 1, "at_step": 40, "duration_s": 20.0}, replace)
    assert "within a second" in long and "another process" in long
    stall = {"kind": "stall", "rank": 1, "after_s": 2.0, "duration_s": 3.0}
    assert "no failure" in faults.reply(stall, replace) and faults.reply(stall, replace).startswith("In 2 s, rank 1")
    assert "2 s (--hang-timeout)" in faults.reply(stall, {**replace, "hang_timeout_s": 2.0})
    slow = {"kind": "slow", "rank": 1, "factor": 3.0, "duration_s": 5.0, "probability": 0.01}
    assert faults.reply(slow, replace).startswith(
        "In each step with probability 0.01, and only once, rank 1 will be slow by a factor of 3 for 5 s."
    )
    for on_nan, words in (("stop", "stop before that update"), ("skip", "skipped"), ("rollback", "go back")):
        assert words in faults.reply({"kind": "nan", "rank": 0}, {"on_nan": on_nan})
    assert "Nothing in this run will find it" in faults.reply({"kind": "bitflip", "rank": 0}, replace)
    assert "--check-replicas 5" in faults.reply({"kind": "bitflip", "rank": 0}, {"check_replicas": 5})


def test_events_and_what_did_not_happen():
    assert faults.event_words({"kind": "kill", "rank": 1}) == "SIGKILL to rank 1."
    assert faults.event_words({"kind": "slow", "rank": 1, "factor": 3.0, "duration_s": 2.0}) == (
        "Rank 1 becomes slow by a factor of 3 for 2 s."
    )
    chaos = {"kind": "hang", "rank": 1, "chaos": 4}
    assert faults.event_words(chaos) == "SIGSTOP to rank 1 (chaos)."
    assert faults.not_fired_words({"kind": "kill", "rank": 1, "at_step": 9}) == (
        "The kill of rank 1 at step 9 did not happen."
    )
    by_chance = {"kind": "kill", "rank": 1, "probability": 0.5, "at_step": 9}
    assert "in each step with probability 0.5" in faults.not_fired_words(by_chance), "which step it would be is not told"
    assert faults.not_fired_words(chaos, "It does not answer.") == (
        "The hang of rank 1 (chaos) did not happen: It does not answer."
    )
    assert faults.spared_words(chaos, "a recovery is going on") == (
        "The hang of rank 1 (chaos) is spared: a recovery is going on."
    )
