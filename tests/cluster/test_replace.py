"""Ranks are killed and replaced: the world is whole again, and the result is that of the undisturbed run."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import comings
import pytest
from cluster_tools import (
    CELL,
    DATA,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    NUM_RANKS,
    SAME_F64,
    Reference,
    assert_same,
    cell_with_trouble,
    check_books,
    check_report,
    losses_of,
    pids_of,
    processes_of,
    wait_until,
)
from comings import STEPS, Gate, check_changes, check_end, count, entry_of, finish, kill, paced, wait_joined

import ftnb
from ftnb.wire import proc


def check_all(run: ftnb.Run, gate: Gate, reference: Reference, lost: list[int], **options) -> list[dict]:
    """Everything that must hold of a run of `CELL` that lost these ranks and got them back."""
    check_end(finish(run, gate), lost)
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
    return check_changes(run, lost, **options)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_rank_is_replaced(session: ftnb.Session, reference: Reference, gate: Gate, rank: int) -> None:
    run = comings.start(session, gate.cell)
    before = processes_of(session)
    victim = kill(session, rank)[0]
    wait_joined(session, run, 1)
    after = processes_of(session)
    assert victim not in after.values() and len(after) == NUM_RANKS
    assert {r: p for r, p in after.items() if r != rank} == {r: p for r, p in before.items() if r != rank}
    check_all(run, gate, reference, [rank])
    sizes = [line["world_size"] for line in run.metrics()]
    assert sizes[0] == sizes[-1] == 4 and 3 in sizes, "the others went on meanwhile"


def test_a_kill_inside_a_step(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    run.inject("kill", rank=1, at_step=run.step + 10)
    wait_joined(session, run, 1)
    recovered = check_all(run, gate, reference, [1])
    assert recovered[0]["lost_steps"] == 1


@pytest.mark.parametrize("ranks", [(1, 3), (0, 1)])
def test_two_ranks_at_once(session: ftnb.Session, reference: Reference, gate: Gate, ranks: tuple[int, ...]) -> None:
    run = comings.start(session, gate.cell)
    kill(session, *ranks)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, list(ranks))


def test_three_at_once(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """One survivor holds everything that the three newcomers need."""
    run = comings.start(session, gate.cell)
    kill(session, 0, 1, 2)
    wait_joined(session, run, 3)
    check_all(run, gate, reference, [0, 1, 2])


def test_a_replacement_is_killed_in_its_first_steps(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    kill(session, 2)
    wait_until(lambda: count(run, "rank_joined"), "the replacement has joined", comings.JOIN_LIMIT_S)
    kill(session, 2)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, [2, 2])


def test_another_one_is_killed_while_the_replacement_starts(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    run = comings.start(session, gate.cell)
    kill(session, 2)
    wait_until(lambda: entry_of(session, 2)["state"] in ("starting", "joining"), "a replacement is being started")
    kill(session, 0)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, [0, 2])


def test_the_replacement_is_killed_before_it_has_joined(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    run = comings.start(session, gate.cell)
    first = kill(session, 3)[0]

    def starting() -> proc.ProcessId | None:
        entry = entry_of(session, 3)
        process = proc.identify(entry["pid"]) if entry["pid"] and entry["state"] == "starting" else None
        return process if process != first else None

    starting_one = wait_until(starting, "a replacement is being started", every_s=0.002)
    assert starting_one.signal(signal.SIGKILL)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [3])
    lost = [event for event in run.events() if event["kind"] == "spare_lost"]
    assert [event["rank"] for event in lost] == [3] and str(starting_one.pid) in lost[0]["reason"], lost


ADAMW = MODEL.replace(
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)", "torch.optim.AdamW(model.parameters(), lr=0.01)"
)
SCHEDULER = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.97)\n"


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (DATA + ADAMW + LOSS, {}),
        (CELL + SCHEDULER, {"scheduler_interval": "step"}),
        (CELL + SCHEDULER, {"scheduler_interval": "epoch"}),
        (CELL, {"workers": 2}),
    ],
    ids=["AdamW", "scheduler per step", "scheduler per epoch", "two workers"],
)
def test_state_beside_the_weights_comes_along(session: ftnb.Session, gate: Gate, cell: str, options: dict) -> None:
    """A fresh optimizer, rate or place in the data on the newcomer would change every loss from there on."""
    run = comings.start(session, paced(cell, gate), **options)
    kill(session, 1)
    wait_joined(session, run, 1)
    check_end(finish(run, gate), [1])
    check_books(run, STEPS)
    check_changes(run, [1])
    interval = options.get("scheduler_interval", "epoch")
    alone = Reference(cell, STEPS, scheduler_interval=interval)
    assert_same(losses_of(run), alone.losses, SAME_F64)
    assert_same([line["lr"] for line in run.metrics()], alone.rates, SAME_F64)


NORM = """
model = torch.nn.Sequential(
    torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(12, 1)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""


def test_batchnorm_and_dropout(session: ftnb.Session, gate: Gate) -> None:
    """Buffers are state, too: the ranks compare them with the weights at the end."""
    run = comings.start(session, paced(DATA + NORM + LOSS, gate))
    kill(session, 0)
    wait_joined(session, run, 1)
    check_end(finish(run, gate), [0])
    check_books(run, STEPS)
    check_changes(run, [0])
    batches = [int(tensor) for name, tensor in run.state_dict().items() if name.endswith("num_batches_tracked")]
    assert batches == [STEPS], "counted in every step once, also on the newcomer"


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.long)])
def test_many_kills(session: ftnb.Session, gate: Gate, kills: int) -> None:
    """Every sample exactly once, and the world is whole again each time."""
    dice = random.Random(kills)
    steps = STEPS + 150 * kills
    run = comings.start(session, gate.cell, steps)
    lost = []
    for number in range(1, kills + 1):
        lost.append(dice.randrange(NUM_RANKS))
        kill(session, lost[-1])
        wait_joined(session, run, number)
        target = run.step + 5  # of use, so that the limits on useless newcomers stay out of it
        wait_until(lambda: run.step >= target, "five more steps", comings.JOIN_LIMIT_S)  # noqa: B023
    check_end(finish(run, gate), lost)
    check_books(run, steps)
    check_changes(run, lost)
    assert_same(losses_of(run), Reference(CELL, steps).losses, SAME_F64)


def test_a_run_that_ends_while_a_replacement_is_started(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    run.inject("kill", rank=2, at_step=STEPS - 5)
    report = run.wait(timeout_s=60)
    assert report.ok and report.world_size_end == 3, str(report)
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)
    again = session.train(CELL, steps=20, global_batch=GLOBAL_BATCH, names={})
    check_report(again.wait(timeout_s=60), [])
    check_books(again, 20)
    assert again.metrics()[0]["world_size"] == NUM_RANKS
    assert len(pids_of(session)) == NUM_RANKS


def test_a_run_that_begins_while_a_replacement_is_started(session: ftnb.Session, reference: Reference) -> None:
    """Killed in the very last step, and the next run comes at once."""
    for _ in range(3):
        run = session.train(CELL, steps=60, global_batch=GLOBAL_BATCH, names={})
        try:
            run.inject("kill", rank=1, at_step=60)
        except ftnb.FtnbError:
            continue  # over already: nothing is lost then
        report = run.wait(timeout_s=60)
        assert report.state == "finished" and report.ok, str(report)
        check_books(run, 60)
    again = session.train(CELL, steps=20, global_batch=GLOBAL_BATCH, names={})
    check_report(again.wait(timeout_s=60), [])
    assert_same(losses_of(again), reference.losses[:20], SAME_F64)


def test_a_name_that_only_px_has_defined(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    session.client[:].execute("ONLY_BY_PX = 1.0", block=True)
    run = comings.start(session, gate.cell + "scale = ONLY_BY_PX\n")
    kill(session, 2)
    wait_until(lambda: count(run, "spare_lost"), "somebody has tried", comings.JOIN_LIMIT_S)
    target = run.step + 40
    wait_until(lambda: run.step >= target, "the others go on", comings.JOIN_LIMIT_S)
    check_end(finish(run, gate), [2], world_size=3)
    check_books(run, STEPS)
    check_changes(run, [2], joined=[])
    assert_same(losses_of(run), reference.losses, SAME_F64)
    lost = [event for event in run.events() if event["kind"] == "spare_lost"]
    assert len(lost) == 1 and lost[0]["rank"] == 2, lost
    for words in ("ONLY_BY_PX", "%%px", "rank 2", "goes on"):
        assert words in lost[0]["reason"], lost
    # The next run has everybody again, and raises the error where it can be seen.
    check_report(session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60), [])


def test_a_newcomer_that_raises_in_its_first_step(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path
) -> None:
    """What depends on the process would go wrong on every other one as well: it is tried once."""
    cell = cell_with_trouble(f"{gate.statement}\n    if newcomer: raise ValueError('not on this one')") + (
        f"newcomer = os.path.exists({str(tmp_path)!r} + f'/was-here-{{rank}}')\n"
        f"open({str(tmp_path)!r} + f'/was-here-{{rank}}', 'w').close()\n"
    )
    run = comings.start(session, cell)
    kill(session, 1)
    wait_until(lambda: count(run, "spare_lost"), "one was tried", comings.JOIN_LIMIT_S)
    wait_until(lambda: run.state == "running", "the others go on")
    target = run.step + 40
    wait_until(lambda: run.step >= target, "the others go on", comings.JOIN_LIMIT_S)
    report = finish(run, gate)
    assert report.state == "finished" and report.ok, str(report)
    assert [failure.kind for failure in report.failures] == ["kill", "exception"]
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)
    assert (count(run, "rank_joined"), count(run, "spare_lost"), report.world_size_end) == (1, 1, 3)
    check_report(session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60), [])


def test_shrink_does_not_replace(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell, recovery="shrink")
    kill(session, 2)
    wait_until(lambda: count(run, "recovered"), "recovered")
    target = run.step + 50
    wait_until(lambda: run.step >= target, "fifty more steps", comings.JOIN_LIMIT_S)
    assert len(session.status()["ranks"]) == NUM_RANKS and entry_of(session, 2)["state"] in ("failed", "fenced")
    check_end(finish(run, gate), [2], world_size=3)
    check_books(run, STEPS)
    check_changes(run, [2], joined=[])
    assert_same(losses_of(run), reference.losses, SAME_F64)
    assert len(pids_of(session)) == 3
