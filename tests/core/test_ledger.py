from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftnb.core.ledger import StepAssembler
from ftnb.core.sampler import batch_at, digest, digest_hex, permutation, split

DATASET_LEN, GLOBAL_BATCH = 22, 8  # three steps an epoch, the last one short


def fetch(assembler, generation, step, rank, members, *, loss=1.0, scalars=None, weight=None):
    """Report what a correct rank would: its share of the step."""
    batch = batch_at(step, DATASET_LEN, GLOBAL_BATCH)
    start, stop = split(batch.start, batch.stop, len(members))[list(members).index(rank)]
    indices = permutation(DATASET_LEN, 0, batch.epoch)[start:stop]
    weight = len(indices) if weight is None else weight
    return assembler.fetched(
        generation, step, rank, len(indices), digest(indices), loss, weight, scalars or {}
    )


def commit(assembler, generation, step, rank, *, time=None, step_s=0.1, lr=0.5, grad_norm=2.0):
    return assembler.committed(generation, step, rank, time or 100.0 + step, lr, grad_norm, step_s)


def whole_step(assembler, generation, step, members, **report):
    lines = []
    for rank in members:
        lines += fetch(assembler, generation, step, rank, members, **report)
    for rank in members:
        lines += commit(assembler, generation, step, rank)
    return lines


def opened(members=(0, 1, 2, 3), **options):
    assembler = StepAssembler(DATASET_LEN, GLOBAL_BATCH, **options)
    assert assembler.open_generation(1, members, 1) == []
    return assembler


def steps_of(lines):
    assert all(line.metrics["step"] == line.ledger["step"] for line in lines)
    return [line.ledger["step"] for line in lines]


def true_digest(step):
    batch = batch_at(step, DATASET_LEN, GLOBAL_BATCH)
    return digest_hex(digest(permutation(DATASET_LEN, 0, batch.epoch)[batch.start : batch.stop]))


def test_the_lines_of_an_undisturbed_step():
    assembler = opened((0, 1))
    fetch(assembler, 1, 1, 0, (0, 1), loss=1.0, weight=3, scalars={"acc": 0.0})
    fetch(assembler, 1, 1, 1, (0, 1), loss=5.0, weight=1, scalars={"acc": 1.0})
    assert commit(assembler, 1, 1, 1, time=11.0, step_s=0.2) == []
    (line,) = commit(assembler, 1, 1, 0, time=10.0, step_s=0.1)
    assert line.metrics == {
        "time": 10.0,
        "step": 1,
        "epoch": 1,
        "loss": 2.0,
        "loss_shares": "2/2",
        "lr": 0.5,
        "grad_norm": 2.0,
        "world_size": 2,
        "generation": 1,
        "step_s": 0.2,
        "acc": 0.25,
    }
    assert line.ledger == {
        "step": 1,
        "epoch": 1,
        "generation": 1,
        "start": 0,
        "stop": 8,
        "shares": {"0": 4, "1": 4},
        "digest": true_digest(1),
        "shares_reported": "2/2",
    }


def test_steps_come_in_order_even_if_a_later_one_is_ready_first():
    assembler = opened((0, 1))
    assert whole_step(assembler, 1, 2, (0, 1)) == []
    assert steps_of(whole_step(assembler, 1, 1, (0, 1))) == [1, 2]
    assert assembler.next_step == 3


def test_the_fetch_report_may_come_after_the_commit():
    assembler = opened((0,))
    assert commit(assembler, 1, 1, 0) == []
    assert steps_of(fetch(assembler, 1, 1, 0, (0,))) == [1]


def test_a_rank_lost_before_its_commit_report_is_not_waited_for():
    assembler = opened((0, 1))
    fetch(assembler, 1, 1, 0, (0, 1))
    fetch(assembler, 1, 1, 1, (0, 1))
    assert commit(assembler, 1, 1, 0) == []
    (line,) = assembler.lost(1)
    assert line.metrics["loss_shares"] == line.ledger["shares_reported"] == "2/2"  # its loss had arrived
    assert line.ledger["digest"] == true_digest(1)


def test_a_rank_lost_before_any_report_leaves_its_planned_share():
    members = (0, 1, 2, 3)
    assembler = opened(members)
    for rank in (0, 1, 3):
        fetch(assembler, 1, 3, rank, members, loss=float(rank))  # the short batch: 6 samples, shares 2 2 1 1
        commit(assembler, 1, 3, rank)
    whole_step(assembler, 1, 1, members)
    whole_step(assembler, 1, 2, members)
    (line,) = assembler.lost(2)
    assert line.ledger["shares"] == {"0": 2, "1": 2, "2": 1, "3": 1}
    assert line.ledger["shares_reported"] == line.metrics["loss_shares"] == "3/4"
    assert line.ledger["unreported"] == [2]
    assert line.metrics["loss"] == (2 * 0 + 2 * 1 + 1 * 3) / 5


def test_lost_ranks_that_are_no_members_change_nothing():
    assembler = opened((0, 1))
    assert assembler.lost(7) == []
    assert steps_of(whole_step(assembler, 1, 1, (0, 1))) == [1]


def test_when_all_are_lost_nothing_is_settled_before_the_closing():
    assembler = opened((0, 1))
    for rank in (0, 1):
        fetch(assembler, 1, 1, rank, (0, 1))
    assembler.lost(0)
    assembler.lost(1)
    assert commit(assembler, 1, 1, 1) == []
    assert steps_of(assembler.close_generation(1)) == [1]


def test_closing_completes_what_is_committed_and_forgets_the_rest():
    members = (0, 1)
    assembler = opened(members)
    fetch(assembler, 1, 1, 0, members)
    commit(assembler, 1, 1, 0)
    fetch(assembler, 1, 2, 0, members, loss=99.0)
    fetch(assembler, 1, 2, 1, members, loss=99.0)
    (line,) = assembler.close_generation(1)
    assert (line.ledger["shares_reported"], line.metrics["world_size"]) == ("1/2", 2)
    assert assembler.close_generation(1) == []

    assert fetch(assembler, 1, 2, 1, members) == []  # between generations nothing is taken
    assembler.open_generation(2, (0,), 2)
    assert fetch(assembler, 1, 2, 0, (0, 1), loss=99.0) == commit(assembler, 1, 2, 0) == []
    (line,) = whole_step(assembler, 2, 2, (0,), loss=3.0)
    assert (line.metrics["loss"], line.ledger["generation"], line.ledger["shares"]) == (3.0, 2, {"0": 8})


def test_a_committed_step_without_any_report_still_has_its_lines():
    assembler = opened((4, 2))
    (line,) = assembler.close_generation(1)
    assert line.ledger["shares"] == {"4": 4, "2": 4}
    assert (line.ledger["shares_reported"], line.ledger["digest"]) == ("0/2", "0" * 16)
    assert line.metrics["loss"] is line.metrics["time"] is line.metrics["step_s"] is None


def test_a_rollback_writes_the_steps_again():
    assembler = opened((0,))
    for step in (1, 2, 3):
        whole_step(assembler, 1, step, (0,))
    assembler.close_generation(3)
    assembler.open_generation(2, (1,), 2)
    (line,) = whole_step(assembler, 2, 2, (1,))
    assert (line.ledger["step"], line.ledger["generation"]) == (2, 2)


def test_duplicates_strangers_and_finished_steps_are_ignored():
    members = (0, 1)
    assembler = opened(members)
    fetch(assembler, 1, 1, 0, members, loss=1.0)
    fetch(assembler, 1, 1, 0, members, loss=50.0)
    fetch(assembler, 1, 1, 1, members, loss=1.0)
    assert assembler.fetched(1, 1, 9, 8, 0, 50.0, 8.0, {}) == []
    assert commit(assembler, 1, 1, 9) == commit(assembler, 2, 1, 0) == commit(assembler, 1, 0, 0) == []
    assert commit(assembler, 1, 1, 0) == commit(assembler, 1, 1, 0, time=5.0) == []
    (line,) = commit(assembler, 1, 1, 1)
    assert (line.metrics["loss"], line.metrics["time"]) == (1.0, 101.0)
    assert commit(assembler, 1, 1, 1) == []
    assert not assembler._open_steps  # reports of finished steps do not pile up


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_become_null(bad):
    assembler = opened((0,), evaluate_every=1)
    fetch(assembler, 1, 1, 0, (0,), loss=bad, scalars={"acc": bad})
    commit(assembler, 1, 1, 0, grad_norm=bad, lr=bad)
    (line,) = assembler.evaluated(1, {"score": bad})
    values = [line.metrics[name] for name in ("loss", "acc", "grad_norm", "lr", "score")]
    assert values == [None] * 5
    json.dumps(line.metrics, allow_nan=False)


@pytest.mark.parametrize("no_loss", [None, math.nan])  # the mean over no samples is NaN
def test_an_empty_share_has_no_loss_and_takes_nothing_from_the_mean(no_loss):
    members = (0, 1)
    assembler = StepAssembler(1, 1)
    assembler.open_generation(1, members, 1)
    assembler.fetched(1, 1, 0, 1, 5, 4.0, 1.0, {})
    assembler.fetched(1, 1, 1, 0, 0, no_loss, 0.0, {})
    commit(assembler, 1, 1, 0)
    (line,) = commit(assembler, 1, 1, 1)
    assert (line.metrics["loss"], line.metrics["loss_shares"]) == (4.0, "2/2")
    assert line.ledger["shares"] == {"0": 1, "1": 0}


def test_a_share_without_its_loss_is_counted_as_missing():
    assembler = opened((0, 1))
    fetch(assembler, 1, 1, 0, (0, 1), loss=None)
    fetch(assembler, 1, 1, 1, (0, 1), loss=2.0)
    commit(assembler, 1, 1, 0)
    (line,) = commit(assembler, 1, 1, 1)
    assert (line.metrics["loss"], line.metrics["loss_shares"]) == (2.0, "1/2")
    assert line.ledger["shares_reported"] == "2/2"


def test_the_line_waits_for_the_evaluation():
    members = (3, 0)  # torch rank 0 evaluates: here slot 3
    assembler = opened(members, evaluate_every=2)
    assert steps_of(whole_step(assembler, 1, 1, members)) == [1]
    assert whole_step(assembler, 1, 2, members) == whole_step(assembler, 1, 3, members) == []
    lines = assembler.evaluated(2, {"accuracy": 0.9, "loss": 7.0})
    assert steps_of(lines) == [2, 3]
    assert lines[0].metrics["accuracy"] == 0.9
    assert (lines[0].metrics["loss"], lines[0].metrics["evaluate_loss"]) == (1.0, 7.0)
    assert "accuracy" not in lines[1].metrics
    assert assembler.evaluated(2, {"accuracy": 0.1}) == []


def test_an_evaluation_may_come_first_and_dies_with_its_rank():
    assembler = opened((0, 1), evaluate_every=1)
    assert assembler.evaluated(1, {"accuracy": 0.5}, generation=1) == []
    assert whole_step(assembler, 1, 1, (0, 1))[0].metrics["accuracy"] == 0.5
    assert assembler.evaluated(2, {"accuracy": 0.5}, generation=0) == []
    assert whole_step(assembler, 1, 2, (0, 1)) == []
    assert "accuracy" not in assembler.lost(0)[0].metrics


def test_scalars_named_like_a_column_get_a_prefix():
    assembler = opened((0,))
    (line,) = whole_step(assembler, 1, 1, (0,), scalars={"lr": 9.0, "acc": 0.5})
    assert (line.metrics["lr"], line.metrics["training_lr"], line.metrics["acc"]) == (0.5, 9.0, 0.5)


@pytest.mark.parametrize(
    ("close", "generation", "members", "first_step", "message"),
    [
        (False, 2, (0,), 1, "generation 1 is still open"),
        (True, 1, (0,), 1, "generations only grow"),
        (True, 2, (), 1, "at least one"),
        (True, 2, (1, 1), 1, "named once"),
        (True, 2, (0,), 0, "step 1 is the next one due"),
        (True, 2, (0,), 2, "starts at step 2, but step 1 is the next one due"),
    ],
)
def test_a_generation_that_cannot_follow_is_refused(close, generation, members, first_step, message):
    assembler = opened((0, 1))
    if close:
        assembler.close_generation(0)
    with pytest.raises(ValueError, match=message):
        assembler.open_generation(generation, members, first_step)


@st.composite
def histories(draw):
    """Generations as (number, members, dead, last committed step); somebody survives all but the last."""
    generations = []
    number, step = 0, 0
    members = list(range(draw(st.integers(1, 5))))
    while members:
        number += draw(st.integers(1, 3))
        dead = draw(st.sets(st.sampled_from(members)))
        step += draw(st.integers(0, 4))
        generations.append((number, draw(st.permutations(members)), dead, step))
        members = [rank for rank in members if rank not in dead]
        if not dead:
            break
    return generations


@settings(max_examples=300, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_any_history_yields_every_step_once_and_in_order(generations, rng):
    assembler = StepAssembler(DATASET_LEN, GLOBAL_BATCH, evaluate_every=rng.choice([None, 2]))
    lines, expected_generation, complete, reported = [], {}, set(), {}
    stale = []  # messages of generations that are over, sent again later
    done = 0
    for number, members, dead, last in generations:
        lines += assembler.open_generation(number, members, done + 1)
        calls = [("lost", rank) for rank in dead]
        for step in range(done + 1, last + 2):
            happened = step <= last  # the step after was under way and is given up
            if happened:
                expected_generation[step] = number
                complete.add(step)
            if rng.random() < 0.8:
                calls.append(("evaluated", step))
            for rank in members:
                if rank not in dead or rng.random() < 0.5:
                    if happened or rng.random() < 0.7:
                        calls.append(("fetched", number, step, rank, members))
                elif happened:
                    complete.discard(step)
                    reported[step] = reported.get(step, len(members)) - 1
                # A dying rank may even commit a step that nobody else reaches.
                if (happened and rank not in dead) or (rank in dead and dead != set(members)):
                    calls.append(("committed", number, step, rank))
        duplicates = rng.sample(calls, len(calls) // 3)
        late = rng.sample(stale, min(len(stale), 10))
        mixed = calls + [call for call in duplicates if call[0] != "lost"] + late
        rng.shuffle(mixed)
        # A dead rank's reports come before the word that it is lost, or a little after: both are in the mix.
        for call in mixed:
            if call[0] == "lost":
                lines += assembler.lost(call[1])
            elif call[0] == "evaluated":
                lines += assembler.evaluated(call[1], {"score": 1.0})
            elif call[0] == "fetched":
                lines += fetch(assembler, *call[1:], loss=float(call[2]))
            else:
                lines += commit(assembler, *call[1:])
        stale += [call for call in calls if call[0] in ("fetched", "committed")]
        lines += assembler.close_generation(last)
        done = last

    assert steps_of(lines) == list(range(1, done + 1))
    for line in lines:
        step = line.ledger["step"]
        batch = batch_at(step, DATASET_LEN, GLOBAL_BATCH)
        assert line.ledger["generation"] == line.metrics["generation"] == expected_generation[step]
        assert sum(line.ledger["shares"].values()) == batch.stop - batch.start
        assert line.metrics["loss"] in (None, pytest.approx(step))
        arrived, world_size = map(int, line.ledger["shares_reported"].split("/"))
        assert world_size == line.metrics["world_size"] == len(line.ledger["shares"])
        # Reports of lost ranks may come too late; those of the living are all in.
        assert arrived <= reported.get(step, world_size)
        assert arrived + len(line.ledger.get("unreported", ())) == world_size
        if arrived == world_size:
            assert step in complete
            assert line.ledger["digest"] == true_digest(step)
