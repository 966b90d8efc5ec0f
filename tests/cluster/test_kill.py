"""Ranks are killed with SIGKILL and not replaced: those left go on, and the result is that of the undisturbed run."""

from __future__ import annotations

import signal

import psutil
import pytest
from cluster_tools import (
    CELL,
    DATA,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    NUM_RANKS,
    NUM_SAMPLES,
    SAME_F32,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    check_recoveries,
    check_report,
    digest_of_model,
    losses_of,
    pids_of,
    position,
    processes_of,
    wait_until,
)

import ftnb
from ftnb.wire import proc

STEPS = 160  # 40 epochs; the last batch of each leaves two of four ranks without a sample
MANY_STEPS = 500  # long enough that a kill "now" finds the run going on


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CELL, MANY_STEPS)


def check_all(run: ftnb.Run, reference: Reference, steps: int, lost: list[int], **kwargs) -> list[dict]:
    """Everything that must hold after a run of `CELL` that lost these ranks."""
    report = run.wait(timeout_s=60)
    check_report(report, lost)
    check_books(run, steps)
    recovered = check_recoveries(run, lost, **kwargs)
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)
    return recovered


def test_undisturbed_run_is_the_reference(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    report = run.wait(timeout_s=60)
    check_report(report, [])
    check_books(run, STEPS)
    assert [event["kind"] for event in run.events()] == ["run_started", "run_finished"]
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
    assert_same([line["grad_norm"] for line in run.metrics()], reference.norms[:STEPS], SAME_F64)
    assert {line["loss_shares"] for line in run.metrics()} == {"4/4"}
    assert report.generations == 1


@pytest.mark.parametrize("rank", [2, 0])
def test_kill_inside_a_step(session: ftnb.Session, reference: Reference, rank: int) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    answer = run.inject("kill", rank=rank, at_step=140)
    assert answer["rank"] == rank and "step 140" in answer["reason"]
    check_all(run, reference, STEPS, [rank])
    events = run.events()
    for kind in ("fault_injected", "rank_failed"):
        event = events[position(events, kind, rank)]
        assert (event["rank"], event["step"]) == (rank, 140)
    recovered = next(event for event in events if event["kind"] == "recovered")
    # The others stood in the all-reduce of the very step: it is done again, and nothing else.
    assert (recovered["step"], recovered["lost_steps"], recovered["world_size"]) == (140, 1, 3)


@pytest.mark.parametrize(("rank", "when"), [(1, {}), (3, {"after_s": 0.2})], ids=["now", "after a time"])
def test_kill_at_no_step_in_particular(session: ftnb.Session, reference: Reference, rank: int, when: dict) -> None:
    run = session.train(CELL, steps=MANY_STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    wait_until(lambda: run.step >= 3, "three steps are done")
    run.inject("kill", rank=rank, **when)
    check_all(run, reference, MANY_STEPS, [rank])


def test_two_ranks_in_the_same_step(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    for rank in (0, 2):
        run.inject("kill", rank=rank, at_step=140)
    check_all(run, reference, STEPS, [0, 2])


def test_two_ranks_killed_from_outside_at_once(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=MANY_STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    ranks = processes_of(session)
    wait_until(lambda: run.step >= 3, "three steps are done")
    for rank in (1, 3):
        assert ranks[rank].signal(signal.SIGKILL)
    check_all(run, reference, MANY_STEPS, [1, 3], injected=[])
    reasons = [event["reason"] for event in run.events() if event["kind"] == "rank_failed"]
    assert all("SIGKILL" in reason and "injected" not in reason for reason in reasons)


def test_down_to_one_survivor(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    survivor = pids_of(session)[3]
    for number, rank in enumerate((0, 1, 2)):
        run.inject("kill", rank=rank, at_step=130 + 10 * number)
    recovered = check_all(run, reference, STEPS, [0, 1, 2])
    assert [event["ranks"] for event in recovered] == [[0], [1], [2]]
    assert [event["world_size"] for event in recovered] == [3, 2, 1]
    sizes = [line["world_size"] for line in run.metrics()]
    assert sizes == [4] * 129 + [3] * 10 + [2] * 10 + [1] * 11
    assert pids_of(session) == {3: survivor}


def test_second_kill_during_the_recovery(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=MANY_STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    ranks = processes_of(session)
    wait_until(lambda: run.step >= 3, "three steps are done")
    assert ranks[2].signal(signal.SIGKILL)
    wait_until(lambda: any(e["kind"] == "rank_failed" for e in run.events()), "the loss is noticed", every_s=0.001)
    assert ranks[0].signal(signal.SIGKILL)
    recovered = check_all(run, reference, MANY_STEPS, [0, 2], injected=[])
    assert len(recovered) in (1, 2)


def test_all_ranks_lost(session: ftnb.Session, reference: Reference) -> None:
    run = session.train(CELL, steps=20 * MANY_STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    ranks = processes_of(session)
    for process in ranks.values():
        process.signal(signal.SIGKILL)
    report = run.wait(timeout_s=60)
    assert report.state == "failed" and not report.ok
    assert "All ranks are lost" in report.reason and "SIGKILL" in report.reason
    events = run.events()
    assert sorted(e["rank"] for e in events if e["kind"] == "rank_failed") == [0, 1, 2, 3]
    assert events[-1]["kind"] == "run_failed"
    steps = len(run.ledger())
    check_books(run, steps)
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)

    # All four are started again by the next run, and the notes say so.
    shown: list[str] = []
    again = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}, show=shown.append)
    assert any("Ranks 0, 1, 2, 3 had been lost and were started again" in line for line in shown), shown
    check_all(again, reference, 8, [])
    assert not set(pids_of(session).values()) & {process.pid for process in ranks.values()}


def test_rank_lost_between_two_runs(session: ftnb.Session, reference: Reference) -> None:
    processes_of(session)[1].signal(signal.SIGKILL)
    wait_until(lambda: session.status()["ranks"][1]["state"] == "failed", "the supervisor notices")
    shown: list[str] = []
    run = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}, show=shown.append)
    assert any("Rank 1 had been lost and was started again" in line for line in shown), shown
    check_all(run, reference, 8, [])


@pytest.mark.parametrize("rank", [2, 0])
def test_kill_with_workers(session: ftnb.Session, reference: Reference, rank: int) -> None:
    engines = pids_of(session)
    before = {r: set(proc.session_members(pid)) for r, pid in engines.items()}
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, workers=2, recovery="shrink", names={})
    engines = pids_of(session)
    # What the training has added to each rank's session: its DataLoader workers.
    workers = {r: set(proc.session_members(pid)) - before.get(r, set()) for r, pid in engines.items()}
    workers = {r: {p for p in found if p.pid != engines[r]} for r, found in workers.items()}
    assert all(len(found) >= 2 for found in workers.values()), workers
    run.inject("kill", rank=rank, at_step=140)
    check_all(run, reference, STEPS, [rank])
    assert not [p for p in workers[rank] if p.is_alive()], "the dead rank's workers ended with it"
    # Those of the survivors end with the run.
    wait_until(lambda: not [p for found in workers.values() for p in found - before.get(rank, set())
                            if p.is_alive() and _is_worker(p)], "the other workers have ended")  # fmt: skip


def _is_worker(process: proc.ProcessId) -> bool:
    """A forked DataLoader worker: its parent is an engine, and it never executed a program of its own."""
    try:
        with open(f"/proc/{process.pid}/stat") as stat:
            parent = int(stat.read().rsplit(")", 1)[1].split()[1])
        with open(f"/proc/{process.pid}/cmdline") as own, open(f"/proc/{parent}/cmdline") as of_parent:
            return own.read() == of_parent.read()
    except OSError:
        return False


def test_epochs_with_kills_and_single_precision(session: ftnb.Session) -> None:
    """`epochs` instead of steps, in float32 as most people train; two kills in two epochs."""
    cell = CELL.replace("dtype=torch.float64", "dtype=torch.float32").replace(").double()", ")")
    run = session.train(cell, epochs=40, global_batch=GLOBAL_BATCH, seed=7, recovery="shrink", names={})
    run.inject("kill", rank=1, at_step=141)
    run.inject("kill", rank=3, at_step=148)  # the short last batch of epoch 37: two samples for three ranks
    report = run.wait(timeout_s=60)
    check_report(report, [1, 3])
    check_books(run, STEPS, seed=7)
    check_recoveries(run, [1, 3])
    assert_same(losses_of(run), Reference(cell, STEPS, seed=7).losses, SAME_F32)


def test_weights_are_those_of_the_reference(session: ftnb.Session) -> None:
    run = session.train(CELL, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    victim = run.inject("kill", at_step=150)["rank"]  # without a rank one is picked
    assert victim in range(NUM_RANKS)
    report = run.wait(timeout_s=60)
    check_report(report, [victim])
    expected = Reference(CELL, STEPS).model
    found = run.state_dict()
    for name, tensor in expected.state_dict().items():
        assert_same(found[name].flatten().tolist(), tensor.flatten().tolist(), SAME_F64)
    expected.load_state_dict(found)
    assert digest_of_model(expected) == report.weights_digest


NORM = """
model = torch.nn.Sequential(
    torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(12, 1)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""


def test_batchnorm_with_shares_of_one_sample(session: ftnb.Session) -> None:
    """Four samples for four ranks, at the end of an epoch two: BatchNorm cannot normalise a single value."""
    cell = DATA + NORM + LOSS
    run = session.train(cell, steps=130, global_batch=4, recovery="shrink", names={})
    run.inject("kill", rank=2, at_step=110)
    report = run.wait(timeout_s=60)
    check_report(report, [2])
    check_books(run, 130, global_batch=4)
    check_recoveries(run, [2])
    shares = {tuple(line["shares"].values()) for line in run.ledger()}
    assert shares == {(1, 1, 1, 1), (1, 1, 0, 0), (2, 1, 1), (1, 1, 0)}
    assert all(line["loss"] is not None for line in run.metrics())


def test_adam_and_a_larger_share_than_before(session: ftnb.Session) -> None:
    """Adam's state (two moments and a counter per parameter) is kept, too."""
    model = MODEL.replace("torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                          "torch.optim.Adam(model.parameters(), lr=0.01)")  # fmt: skip
    cell = DATA + model + LOSS
    run = session.train(cell, steps=STEPS, global_batch=NUM_SAMPLES, recovery="shrink", names={})
    run.inject("kill", rank=0, at_step=140)
    run.inject("kill", rank=1, at_step=150)
    check_report(run.wait(timeout_s=60), [0, 1])
    check_books(run, STEPS, global_batch=NUM_SAMPLES)
    assert_same(losses_of(run), Reference(cell, STEPS, global_batch=NUM_SAMPLES).losses, SAME_F64)


def test_what_the_rank_had_started_ends_with_it_in_whatever_session(session: ftnb.Session) -> None:
    """A child in the rank's session, and one in a session of its own (as daemons and launchers make)."""
    marks = ("97.25", "98.25")
    cell = CELL + """
import subprocess
subprocess.Popen(["sleep", "97.25"])
subprocess.Popen(["sleep", "98.25"], start_new_session=True)
"""

    def sleepers() -> list[psutil.Process]:
        running = [p for p in psutil.process_iter() if p.name() == "sleep" and p.status() != psutil.STATUS_ZOMBIE]
        return [p for p in running if p.cmdline()[-1] in marks]

    try:
        run = session.train(cell, steps=MANY_STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
        assert len(sleepers()) == 2 * session.num_ranks
        run.inject("kill", rank=1, at_step=MANY_STEPS - 10)
        report = run.wait(timeout_s=60)
        assert report.ok and len(report.failures) == 1
        assert len(sleepers()) == 2 * (session.num_ranks - 1)
    finally:
        for process in sleepers():
            process.kill()
