"""Pause, stop, evaluation, schedulers, clipping, weighted losses: against a training in one process."""

from __future__ import annotations

import json

import pytest
from cluster_tools import (
    CELL,
    DATA,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    check_recoveries,
    check_report,
    losses_of,
    wait_until,
)

import ftnb

STEPS = 160


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CELL, 600)


def kinds_of(run: ftnb.Run) -> list[str]:
    return [event["kind"] for event in run.events()]


def test_pause_and_unpause(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=600, global_batch=GLOBAL_BATCH, names={})
    for _ in range(3):
        run.pause()
        assert run.state == "paused" and session.status()["state"] == "paused"
        step = run.step
        assert run.events()[-1]["kind"] == "paused" and run.events()[-1]["step"] == step
        wait_until(lambda s=step: len(run.metrics()) >= s, "the lines are on the disk")
        assert [line["step"] for line in run.metrics()] == list(range(1, step + 1))
        run.pause()  # once more changes nothing
        assert run.step == step
        run.unpause()
        wait_until(lambda s=step: run.step > s, "the training goes on")
    check_report(run.wait(timeout_s=60), [])
    assert kinds_of(run) == ["run_started", *["paused", "unpaused"] * 3, "run_finished"]
    check_books(run, 600)
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_kill_while_paused(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    run.pause()
    step = run.step
    run.inject("kill", rank=2)
    wait_until(lambda: "recovered" in kinds_of(run), "recovered although no step is done")
    wait_until(lambda: run.state == "paused", "still paused")
    assert run.step == step
    run.unpause()
    check_report(run.wait(timeout_s=60), [2])
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)


def test_stop_leaves_a_complete_directory_and_says_that_nothing_is_saved(
    session: ftnb.Session, reference: Reference
) -> None:
    run = session.train(CELL, steps=100_000, global_batch=GLOBAL_BATCH, names={})
    wait_until(lambda: run.step >= 20, "twenty steps are done")
    run.stop()
    report = run.report()
    assert report.state == run.state == "stopped"
    assert "othing was saved" in report.reason and "run.state_dict()" in report.reason
    steps = run.step
    assert report.steps == steps >= 20
    check_books(run, steps)
    assert_same(losses_of(run)[:600], reference.losses[: min(steps, 600)], SAME_F64)
    record = json.loads((run.directory / "run.json").read_text())
    assert record["state"] == "stopped" and record["ended"] > record["started"]
    assert record["options"]["global_batch"] == GLOBAL_BATCH and record["cell"] == CELL
    assert kinds_of(run)[-1] == "run_stopped"
    assert set(run.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}, "the ranks keep the model"
    assert report.samples_missed == report.samples_repeated == 0 and report.problems == []


def test_stop_while_paused_and_after_a_kill(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=100_000, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    run.inject("kill", rank=0)
    wait_until(lambda: "recovered" in kinds_of(run), "recovered")
    run.pause()
    run.stop(save=False)
    assert run.state == "stopped"
    assert kinds_of(run)[-3:] == ["recovered", "paused", "run_stopped"]
    check_books(run, run.step)


def test_faults_that_could_not_happen_are_named(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=100_000, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    run.inject("kill", rank=1, at_step=99_999)
    run.inject("kill", rank=2, after_s=3600)
    run.stop()
    missed = [event for event in run.events() if event["kind"] == "fault_not_fired"]
    assert sorted(event["rank"] for event in missed) == [1, 2]
    assert all("did not happen" in event["reason"] for event in missed)
    assert session.status()["state"] == "idle"


EVALUATE = """
def evaluate(model):
    assert not model.training and not torch.is_grad_enabled()
    torch.rand(3)  # its random draws leave no trace in the training
    return {"total": float(sum(p.sum() for p in model.parameters())), "size": torch.tensor(7)}
"""


def test_evaluate_every(session: ftnb.Session) -> None:
    """On rank 0, or on whoever comes next when that one is lost; the value is that of the step's own weights."""
    cell = CELL.replace("torch.nn.Tanh()", "torch.nn.Tanh(), torch.nn.Dropout(0.0)") + EVALUATE
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, evaluate_every=10, recovery="shrink", names={})
    run.inject("kill", rank=0, at_step=145)
    check_report(run.wait(timeout_s=60), [0])
    check_books(run, STEPS)
    check_recoveries(run, [0])
    evaluated = {line["step"]: line["total"] for line in run.metrics() if "total" in line}
    assert list(evaluated) == list(range(10, STEPS + 1, 10))
    assert {line.get("size") for line in run.metrics()} == {None, 7.0}
    reference = Reference(cell, STEPS, watch=lambda model: float(sum(p.sum() for p in model.parameters())))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    assert_same(evaluated.values(), reference.watched[9::10], SAME_F64)


def test_rank_0_is_killed_in_the_step_after_an_evaluation(session: ftnb.Session) -> None:
    run = session.train(CELL + EVALUATE, steps=STEPS, global_batch=GLOBAL_BATCH, evaluate_every=5, recovery="shrink", names={})
    run.inject("kill", rank=0, at_step=141)
    check_report(run.wait(timeout_s=60), [0])
    assert [line["step"] for line in run.metrics() if "total" in line] == list(range(5, STEPS + 1, 5))


def test_evaluate_raises(session: ftnb.Session) -> None:
    """Its one caller raises, then the next one: the same step twice, so the run stops and shows why."""
    cell = CELL + "def evaluate(model):\n    return {'x': model.nothing}\n"
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, evaluate_every=140, recovery="shrink", names={})
    report = run.wait(timeout_s=60)
    assert report.state == "failed"
    assert "AttributeError" in report.reason and "nothing" in report.reason
    check_report(session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60), [])


SCHEDULER = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)\n"


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_scheduler(session: ftnb.Session, interval: str) -> None:
    cell = CELL + SCHEDULER
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, scheduler_interval=interval, recovery="shrink", names={})
    run.inject("kill", rank=0, at_step=140)
    check_report(run.wait(timeout_s=60), [0])
    check_books(run, STEPS)
    reference = Reference(cell, STEPS, scheduler_interval=interval)
    assert_same([line["lr"] for line in run.metrics()], reference.rates, SAME_F64)
    assert len(set(reference.rates)) > 5, "the rate does change"
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_clip_norm(session: ftnb.Session) -> None:
    """Clipped after averaging: the norm is that of the mean gradient of the whole global batch."""
    limit = 0.2
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, clip_norm=limit, recovery="shrink", names={})
    run.inject("kill", rank=1, at_step=140)
    check_report(run.wait(timeout_s=60), [1])
    reference = Reference(CELL, STEPS, clip_norm=limit)
    assert sum(norm > limit for norm in reference.norms) > 10, "clipping does happen"
    assert_same([line["grad_norm"] for line in run.metrics()], reference.norms, SAME_F64)
    assert_same(losses_of(run), reference.losses, SAME_F64)


# Sequences of different lengths: the loss is a mean over the tokens that count, not over the samples.
TOKENS = """
import torch
_numbers = torch.Generator().manual_seed(3)
tokens = torch.randint(1, 11, (50, 8), generator=_numbers)
lengths = torch.randint(1, 9, (50,), generator=_numbers)
labels = torch.where(torch.arange(8) < lengths[:, None], (tokens * 3 + 1) % 11, -100)
dataset = torch.utils.data.TensorDataset(tokens, labels)
model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

def training_step(model, batch):
    tokens, labels = batch
    scores = model(tokens)
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
    known = labels != -100
    right = (scores.argmax(-1) == labels) & known
    return {"loss": loss, "weight": known.sum(), "accuracy": right.sum() / known.sum()}
"""
# The sum of weights travels through the all-reduce as float32.
SAME_WEIGHTED = 1e-5


@pytest.mark.parametrize("workers", [0, 1])
def test_weighted_loss_against_the_reference(session: ftnb.Session, workers: int) -> None:
    run = session.train(TOKENS, steps=STEPS, global_batch=GLOBAL_BATCH, workers=workers, recovery="shrink", names={})
    run.inject("kill", rank=2, at_step=140)
    check_report(run.wait(timeout_s=60), [2])
    check_books(run, STEPS)
    reference = Reference(TOKENS, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_WEIGHTED)
    # The gradient itself, in the first step before any rounding could grow, and in all others.
    assert_same([run.metrics()[0]["grad_norm"]], reference.norms[:1], 1e-6)
    norms = [(line["grad_norm"], norm) for line, norm in zip(run.metrics(), reference.norms)]
    # Rank 0 reports it: it is missing if the loss of a rank kept rank 0 from committing what others had committed.
    known = [pair for pair in norms if pair[0] is not None]
    assert len(known) >= STEPS - 1
    assert_same([found for found, _ in known], [wanted for _, wanted in known], 10 * SAME_WEIGHTED)
    for name, tensor in reference.model.state_dict().items():
        assert_same(run.state_dict()[name].flatten().tolist(), tensor.flatten().tolist(), 10 * SAME_WEIGHTED)
    assert all(0 <= line["accuracy"] <= 1 for line in run.metrics())
    # A mean over shares without the weights would be visibly another one.
    assert max(reference.losses) > 1.5 * min(reference.losses)


def test_a_plain_mean_in_training_step_is_the_same_as_loss_fn(session: ftnb.Session, reference: Reference) -> None:
    cell = (
        DATA
        + MODEL
        + (
            "def training_step(model, batch):\n    return {'loss': torch.nn.functional.mse_loss(model(batch[0]), batch[1])}\n"
        )
    )
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)


def test_collate_fn_and_dict_batches(session: ftnb.Session, reference: Reference) -> None:
    cell = (
        DATA
        + MODEL
        + """
def collate_fn(samples):
    xs, ys = zip(*samples)
    return {"x": torch.stack(xs), "y": torch.stack(ys)}

def training_step(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
"""
    )
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, workers=1, names={})
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)


def test_a_function_instead_of_a_cell(session: ftnb.Session, reference: Reference) -> None:
    def cell():
        import torch

        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(50, 6, generator=numbers, dtype=torch.float64)
        targets = torch.sin(inputs.sum(1, keepdim=True))
        dataset = torch.utils.data.TensorDataset(inputs, targets)  # noqa: F841
        model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # noqa: F841
        loss_fn = torch.nn.functional.mse_loss  # noqa: F841

    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH)
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)


def test_seed_changes_start_and_order(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=20, global_batch=GLOBAL_BATCH, seed=123, names={})
    check_report(run.wait(timeout_s=60), [])
    check_books(run, 20, seed=123)
    assert_same(losses_of(run), Reference(CELL, 20, seed=123).losses, SAME_F64)
    assert LOSS in CELL
