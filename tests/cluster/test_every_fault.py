"""Every fault that can be injected: it happens for real, is found to be what it is, and the training is none the worse."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_tools import DEADLINE_S, SAME_F64, Reference, assert_same, check_books, losses_of, says, wait_until
from comings import (
    JOIN_LIMIT_S,
    Gate,
    check_changes,
    check_end,
    count,
    finish,
    kill,
    paced,
    process_of,
    start,
    wait_joined,
)

import ftnb
from ftnb.errors import UsageError

HANG_S = 2.0  # the limit for ranks that do not move, in these tests

# What is injected -> what it is found to be.
LOSSES = {
    "kill": "kill", "exit": "exit", "exception": "exception", "hang": "hang", "stall": "stall", "deadlock": "deadlock",
    "gil": "gil", "oom": "kill", "partition": "partition",
}  # fmt: skip


def events_of(run: ftnb.Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == kind]


@pytest.mark.parametrize("fault", LOSSES)
@pytest.mark.parametrize("when", ["now", "in a step"])
def test_a_rank_is_lost_and_replaced(
    session: ftnb.Session, reference: Reference, gate: Gate, fault: str, when: str
) -> None:
    # On a busy machine memory may take its time to grow, and a rank that does nothing else stands still.
    run = start(session, gate.cell, hang_timeout_s=30 if fault == "oom" else HANG_S)
    wait_until(lambda: run.step >= 10, "every size of a share has been there: the first one may take long")
    rank = 2 if when == "now" else 0
    run.inject(fault, rank=rank, at_step=None if when == "now" else run.step + 3)
    wait_joined(session, run, 1)
    engines = sorted(entry["engine"] for entry in session.status()["ranks"])
    wait_until(lambda: sorted(session.client.ids) == engines, "ipyparallel knows the new engine, too")
    report = finish(run, gate)
    found = LOSSES[fault]
    check_end(report, [rank], kinds=[found])
    check_changes(run, [rank])
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    (injected,) = events_of(run, "fault_injected")
    assert (injected["fault"], injected["rank"]) == (fault, rank)
    (failed,) = events_of(run, "rank_failed")
    assert injected["time"] <= failed["time"]
    blamed = {event["rank"] for event in run.events() if event["kind"] in ("rank_suspected", "rank_failed")}
    assert blamed == {rank}, "the others only waited for it"
    assert report.failures[0].injected == fault
    if found in ("stall", "deadlock"):
        suspected = events_of(run, "rank_suspected")[-1]
        stands = {tuple(group["ranks"]): group for group in suspected["stands"]}
        assert sorted(r for ranks in stands for r in ranks) == [0, 1, 2, 3]
        own = stands[(rank,)]
        assert own["stack"], "where the rank stands"
        others = next(group for ranks, group in stands.items() if rank not in ranks)
        assert others["place"] == "collective"
    if found in ("hang", "partition"):
        assert events_of(run, "rank_suspected")[-1]["phi"] >= 8


@pytest.mark.parametrize("fault", ["hang", "partition", "stall", "gil"])
def test_what_is_over_soon_costs_nobody_their_place(
    session: ftnb.Session, reference: Reference, gate: Gate, fault: str
) -> None:
    """A pause that is shorter than any limit: the others wait, and nobody is even suspected."""
    run = start(session, gate.cell, hang_timeout_s=30)
    duration_s = 0.2 if fault in ("hang", "partition") else 4.0
    run.inject(fault, rank=1, duration_s=duration_s)
    wait_until(lambda: count(run, "fault_injected") == 1, "it has happened")
    after = run.step
    wait_until(lambda: run.step > after + 5, "the training goes on")
    report = finish(run, gate)
    check_end(report, [])
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    assert count(run, "rank_suspected") == count(run, "rank_failed") == count(run, "regrouped") == 0
    assert report.faults[0].outcome == "the run went on as if nothing had happened"


def test_two_faults_at_once_are_told_apart(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    run.inject("hang", rank=1)
    run.inject("kill", rank=3)
    wait_joined(session, run, 2)
    report = finish(run, gate)
    check_end(report, [1, 3], kinds=["hang", "kill"])
    assert {failure.rank: failure.kind for failure in report.failures} == {1: "hang", 3: "kill"}
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_flipped_bit_is_found_at_the_next_check_and_undone(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    run = start(session, gate.cell, check_replicas=5)
    at_step = run.step + 7
    check = -(-at_step // 5) * 5
    run.inject("bitflip", rank=1, at_step=at_step)
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [1], kinds=["bitflip"])
    (found,) = events_of(run, "divergence_detected")
    assert (found["step"], found["ranks"]) == (check, [1])
    (back,) = events_of(run, "rolled_back")
    assert (back["first_step"], back["last_step"]) == (check - 4, check)
    assert report.failures[0].injected == "bitflip" and report.lost_steps >= 5
    # The last history of each step is the undisturbed one: not a trace of the flipped bit.
    assert_same(final_losses(run), reference.losses, SAME_F64)


def final_losses(run: ftnb.Run) -> list[float]:
    """Of each step the line that was written last."""
    return [loss for _, loss in sorted({line["step"]: line["loss"] for line in run.metrics()}.items())]


@pytest.fixture(scope="module")
def pair(shared) -> ftnb.Session:
    """A second cluster, of two ranks."""
    with ftnb.Session.start(2, name="pair", show=lambda _: None) as session:
        yield session


def test_of_two_ranks_that_differ_neither_is_to_blame(pair: ftnb.Session, cluster, reference: Reference, gate: Gate) -> None:
    run = start(pair, gate.cell, check_replicas=5)
    run.inject("bitflip", rank=1, at_step=run.step + 7)
    wait_until(lambda: count(run, "recovered") == 1, "both have gone back")
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    assert [(failure.kind, failure.rank) for failure in report.failures] == [("bitflip", None)]
    assert count(run, "rank_failed") == 0
    assert_same(final_losses(run), reference.losses, SAME_F64)


def test_nan_stops_the_run_before_the_update(session: ftnb.Session, gate: Gate) -> None:
    run = start(session, gate.cell)
    at_step = run.step + 4
    run.inject("nan", rank=1, at_step=at_step)
    report = run.wait(timeout_s=DEADLINE_S)
    assert report.state == "stopped" and report.steps == at_step - 1, str(report)
    (found,) = events_of(run, "nan_detected")
    assert (found["step"], found["ranks"]) == (at_step, [1])
    assert "--on-nan" in report.reason
    import torch

    assert all(torch.isfinite(tensor).all() for tensor in run.state_dict().values())


def test_nan_is_skipped(session: ftnb.Session, gate: Gate) -> None:
    run = start(session, gate.cell, on_nan="skip")
    at_step = run.step + 4
    run.inject("nan", rank=1, at_step=at_step)
    wait_until(lambda: run.step > at_step + 3, "it goes on")
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    (found,) = events_of(run, "nan_detected")
    assert (found["step"], found["ranks"], found["skipped"]) == (at_step, [1], True)
    check_books(run, report.steps)
    assert count(run, "rank_failed") == 0


def test_nan_is_undone_by_going_back(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell, on_nan="rollback", check_replicas=5)
    at_step = (run.step // 5 + 2) * 5 + 3
    run.inject("nan", rank=1, at_step=at_step)
    wait_until(lambda: count(run, "recovered") == 1, "it has gone back")
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    (back,) = events_of(run, "rolled_back")
    assert back["first_step"] == at_step - 2
    assert_same(final_losses(run), reference.losses, SAME_F64)


def test_nan_that_comes_again_ends_the_run(session: ftnb.Session, gate: Gate) -> None:
    """The numbers of the code, not of the machine: going back would go on for ever."""
    cell = paced_nan(gate, at_step=12)
    run = session.train(cell, steps=100, global_batch=16, on_nan="rollback", names={})
    gate.open()
    report = run.wait(timeout_s=DEADLINE_S)
    assert report.state == "stopped" and report.steps <= 11, str(report)
    assert "again" in report.reason


def paced_nan(gate: Gate, at_step: int) -> str:
    """A cell whose loss is NaN whenever a certain sample of step `at_step` is in it."""
    from cluster_tools import DATA, MODEL, indices_of

    index = indices_of(at_step, 50, 16)[0]
    return (
        DATA
        + MODEL
        + f"""
dataset = [(inputs[i], targets[i], i) for i in range(50)]
seen = 0
def training_step(model, batch):
    global seen
    x, y, which = batch
    loss = torch.nn.functional.mse_loss(model(x), y)
    if {index} in which.tolist():
        seen += 1
        if seen >= 3:
            loss = loss * float("nan")
    return loss
"""
    )


def test_a_slow_rank_is_named_and_stays(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    run.inject("slow", rank=2, factor=3)
    wait_until(lambda: count(run, "straggler_detected") == 1, "it is found out", 90)
    report = finish(run, gate)
    check_end(report, [])
    (found,) = events_of(run, "straggler_detected")
    assert found["rank"] == 2 and 2.0 < found["factor"] < 4.5, found
    assert any("Rank 2" in note for note in report.notes)
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_very_slow_rank_is_not_out_of_step(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """What it sleeps makes the others wait in the next step, and is many typical steps long."""
    run = start(session, gate.cell)
    wait_until(lambda: run.step >= 10, "it is known what is typical")
    run.inject("slow", rank=2, factor=10, duration_s=3)
    after = run.step
    wait_until(lambda: run.step > after + 5, "the training goes on")
    check_end(finish(run, gate), [])
    assert count(run, "rank_suspected") == 0
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_slow_rank_is_evicted_when_asked(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell, evict_stragglers=True)
    run.inject("slow", rank=2, factor=3)
    with_limit = 120
    wait_until(lambda: count(run, "rank_joined") == 1, "it is replaced", with_limit)
    report = finish(run, gate)
    check_end(report, [2], kinds=["straggler"])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_restart_goes_back_to_the_start_with_everybody(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell, recovery="restart")
    wait_until(lambda: run.step >= 8, "some steps are done")
    run.inject("kill", rank=1)
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [1])
    (regrouped,) = events_of(run, "regrouped")[:1]
    (back,) = events_of(run, "rolled_back")
    assert back["first_step"] == 1 and back["last_step"] >= 8
    assert regrouped["world_size"] == 4, "nobody trains before the world is full again"
    assert report.lost_steps >= 8 and report.lost_samples > report.lost_steps
    assert_same(final_losses(run), reference.losses, SAME_F64)


def test_a_fault_that_never_fires_is_reported(session: ftnb.Session, gate: Gate) -> None:
    run = start(session, gate.cell)
    run.inject("stall", rank=1, after_s=1000)
    run.inject("nan", rank=2, at_step=400)
    run.stop()
    report = run.report()
    assert sorted(fault.kind for fault in report.faults) == ["nan", "stall"]
    assert not any(fault.fired for fault in report.faults)
    assert all("did not happen" in fault.outcome for fault in report.faults)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("kill", {"factor": 3}, "factor"),
        ("nan", {"duration_s": 3}, "duration"),
        ("hang", {"at_step": 5, "after_s": 1}, "at_step"),
        ("gill", {}, "gil"),
        ("disk-full", {}, "not available"),
        ("slow", {"factor": 0.5}, "factor"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_run_goes_on(
    session: ftnb.Session, gate: Gate, kind: str, options: dict[str, Any], words: str
) -> None:
    run = start(session, gate.cell)
    with pytest.raises(UsageError) as caught:
        run.inject(kind, rank=1, **options)
    says(caught.value, words)
    before = run.step
    wait_until(lambda: run.step > before, "it trains")
    assert count(run, "fault_injected") == 0


def test_the_last_lines_of_a_rank_that_died_are_shown(session: ftnb.Session, gate: Gate) -> None:
    cell = paced(
        "import torch\ntorch.manual_seed(0)\n"
        "dataset = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 1))\n"
        "model = torch.nn.Linear(6, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "print('the last thing it said')\nloss_fn = torch.nn.functional.mse_loss\n",
        gate,
    )
    run = start(session, cell)
    kill(session, 2)
    wait_joined(session, run, 1)
    finish(run, gate)
    (failed,) = events_of(run, "rank_failed")
    assert "SIGKILL" in failed["reason"] and "memory" in failed["reason"]
    assert any("the last thing it said" in line for line in failed["last_output"])


def test_a_rank_that_hangs_while_others_regroup(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Rank 1 dies while rank 2 stands in its own code: the next generation must not wait for it for ever."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    wait_until(lambda: run.step >= 10, "every size of a share has been there")
    run.inject("stall", rank=2)
    wait_until(lambda: count(run, "fault_injected") == 1, "it stands")
    run.inject("kill", rank=1)
    wait_joined(session, run, 2)
    report = finish(run, gate)
    check_end(report, [1, 2], kinds=["kill", "stall"])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_stacks_show_where_everybody_stands(session: ftnb.Session, gate: Gate) -> None:
    run = start(session, gate.cell, hang_timeout_s=60)
    run.inject("stall", rank=2)
    wait_until(lambda: count(run, "fault_injected") == 1, "it stands")
    stacks = wait_until(
        lambda: (found := run.stacks()) and found[0].get("place") == "collective" and found, "the others wait for it"
    )
    assert sorted(stacks) == [0, 1, 2, 3]
    assert stacks[2]["place"] == "forward" and stacks[2]["stack"]
    process_of(session, 2)
    kill(session, 2)
    wait_joined(session, run, 1)
    finish(run, gate)


def test_an_injected_exception_says_nothing_about_the_next_newcomer(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """A newcomer that raises is not replaced, for the next one would raise as well; but this one was made to."""
    run = start(session, gate.cell)
    run.inject("kill", rank=1)
    wait_until(lambda: count(run, "rank_joined") == 1, "it is replaced", every_s=0.002)
    run.inject("exception", rank=1)
    wait_joined(session, run, 2)
    report = finish(run, gate)
    check_end(report, [1, 1], kinds=["kill", "exception"])
    raised, joined = (next(e["step"] for e in events_of(run, kind)[::-1]) for kind in ("fault_injected", "rank_joined"))
    assert raised - events_of(run, "rank_joined")[0]["step"] < 3 <= joined
    assert count(run, "spare_lost") == 0
    assert_same(losses_of(run), reference.losses, SAME_F64)


def wait_held(session: ftnb.Session) -> None:
    """Until all ranks have told, by heartbeat, that they are held."""

    def places() -> set[str]:
        return {entry["place"] for entry in session.status()["ranks"] if entry["rank"] is not None}

    wait_until(lambda: places() == {"held"}, "everybody has told that it waits")


def test_paused_when_all_have_gone_back_to_the_start(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """They stand after a step that does not exist."""
    run = start(session, gate.cell, recovery="restart")
    run.inject("kill", rank=1)
    run.pause()
    wait_until(lambda: run.state == "paused" and count(run, "regrouped") == 1, "all are there, and wait", JOIN_LIMIT_S)
    assert run.step == 0
    wait_held(session)
    run.unpause()
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [1])
    assert_same(final_losses(run), reference.losses, SAME_F64)


def test_an_interpreter_lock_that_is_held_right_after_a_pause_is_found(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """The last that was heard of the rank is that it is held, where it may stay as long as it likes."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    wait_until(lambda: run.step >= 10, "every size of a share has been there: the first one may take long")
    run.pause()
    wait_until(lambda: run.state == "paused", "it is paused")
    wait_held(session)
    gate.open()  # no 0.1 s from here to the fault: a heartbeat would come in between
    run.inject("gil", rank=3, at_step=run.step + 1)
    run.unpause()
    wait_until(lambda: count(run, "rank_failed") == 1, "it is found")
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    assert [(failure.rank, failure.kind) for failure in report.failures] == [(3, "gil")]
    assert_same(losses_of(run), reference.losses, SAME_F64)
