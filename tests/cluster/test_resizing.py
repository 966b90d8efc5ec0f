"""More ranks or fewer, on purpose: no step is lost or repeated, and nobody is reported as failed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import comings
import pytest
from cluster_tools import (
    CELL,
    GLOBAL_BATCH,
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
    says,
    wait_until,
)
from comings import STEPS, Gate, check_changes, check_end, count, entry_of, finish, kill, wait_joined

import ftnb
from ftnb.errors import ClusterError, RunError, UsageError


@pytest.fixture
def session(session: ftnb.Session) -> Iterator[ftnb.Session]:
    """The shared cluster, which has its four ranks again afterwards."""
    yield session
    if session.alive:
        run = session.run
        if run is not None and run.state not in ("finished", "stopped", "failed"):
            run.stop(save=False)
        session.resize(NUM_RANKS, show=lambda text: None)


def resize(session: ftnb.Session, num_ranks: int) -> None:
    session.resize(num_ranks, show=lambda text: None)


def trains_with(session: ftnb.Session, reference: Reference, num_ranks: int) -> None:
    run = session.train(CELL, steps=12, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    check_report(run.wait(timeout_s=60), [], world_size=num_ranks)
    check_books(run, 12)
    assert_same(losses_of(run), reference.losses[:12], SAME_F64)


def check_all(run: ftnb.Run, gate: Gate, reference: Reference, joined: list[int], world_size: int) -> None:
    check_end(finish(run, gate), [], world_size=world_size)
    check_books(run, STEPS)
    check_changes(run, [], joined)
    kinds = {event["kind"] for event in run.events()}
    assert not kinds & {"rank_failed", "rank_suspected", "recovered", "rolled_back", "spare_lost"}, kinds
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_idle(session: ftnb.Session, reference: Reference) -> None:
    trains_with(session, reference, 4)  # whoever the test before has lost is there again
    before = processes_of(session)
    resize(session, 2)
    assert processes_of(session) == {rank: before[rank] for rank in (0, 1)}
    wait_until(lambda: not any(before[rank].is_alive() for rank in (2, 3)), "the others have ended")
    assert session.num_ranks == 2
    trains_with(session, reference, 2)
    resize(session, 5)
    assert sorted(pids_of(session)) == [0, 1, 2, 3, 4]
    trains_with(session, reference, 5)
    wait_until(lambda: len(session.client.ids) == 5, "ipyparallel sees five")
    ranks = {e["rank"]: e["engine"] for e in session.status()["ranks"]}
    names = [session.client[ranks[rank]].apply_sync(lambda: __import__("os").environ["FTNB_RANK"]) for rank in range(5)]
    assert names == ["0", "1", "2", "3", "4"]


def test_down_and_up_while_training(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    before = processes_of(session)
    run.resize(2, show=lambda text: None)
    assert session.status()["world_size"] == 2
    wait_until(lambda: not any(before[rank].is_alive() for rank in (2, 3)), "the others have ended")
    run.resize(4, show=lambda text: None)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, [2, 3], 4)
    sizes = [line["world_size"] for line in run.metrics()]
    assert 2 in sizes and sizes[0] == sizes[-1] == 4


def test_more_than_at_the_start(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    run.resize(6, show=lambda text: None)
    wait_joined(session, run, 2, world_size=6)
    check_all(run, gate, reference, [4, 5], 6)
    trains_with(session, reference, 6)


def test_down_to_one_which_is_not_rank_0s_doing(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    run.resize(1, show=lambda text: None)
    target = run.step + 5
    wait_until(lambda: run.step >= target, "the one goes on")
    check_all(run, gate, reference, [], 1)
    trains_with(session, reference, 1)


def test_paused(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    run.pause()
    step = run.step
    for num_ranks in (3, 5):
        run.resize(num_ranks, show=lambda text: None)
        assert session.status()["world_size"] == num_ranks
        assert (run.state, run.step) == ("paused", step), "no step is done in between"
    run.unpause()
    check_all(run, gate, reference, [3, 4], 5)


def test_during_a_recovery(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    kill(session, 1)
    wait_until(lambda: count(run, "rank_failed"), "the loss is noticed", every_s=0.0005)
    run.resize(5, show=lambda text: None)
    wait_joined(session, run, 2, world_size=5)
    check_end(finish(run, gate), [1], world_size=5)
    check_books(run, STEPS)
    check_changes(run, [1], [1, 4])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_the_lost_rank_is_beyond_the_new_number(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Its replacement is on its way when it is not wanted any more."""
    run = comings.start(session, gate.cell)
    kill(session, 3)
    wait_until(lambda: entry_of(session, 3)["state"] == "starting", "a replacement is being started", every_s=0.002)
    run.resize(3, show=lambda text: None)
    target = run.step + 20
    wait_until(lambda: run.step >= target, "the three go on")
    wait_until(
        lambda: [entry["rank"] for entry in session.status()["ranks"]] == [0, 1, 2], "the one that nobody needs has ended", 20
    )
    check_end(finish(run, gate), [3], world_size=3)
    check_books(run, STEPS)
    check_changes(run, [3], [])
    assert_same(losses_of(run), reference.losses, SAME_F64)
    trains_with(session, reference, 3)


def test_after_shrinking(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """With `shrink` nobody is replaced, but who asks for ranks gets them."""
    run = comings.start(session, gate.cell, recovery="shrink")
    kill(session, 3)
    wait_until(lambda: count(run, "recovered"), "recovered")
    run.resize(5, show=lambda text: None)
    wait_joined(session, run, 2, world_size=5)
    check_end(finish(run, gate), [3], world_size=5)
    check_books(run, STEPS)
    check_changes(run, [3], [3, 4])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_a_rank_is_lost_meanwhile_and_nobody_replaces_it(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """With `shrink` it would be waited for in vain: that is said, and asking again brings it back."""
    run = comings.start(session, gate.cell, recovery="shrink")
    with ThreadPoolExecutor() as pool:
        resized = pool.submit(run.resize, 5, show=lambda text: None)
        wait_until(lambda: session.status()["wanted_ranks"] == 5, "the supervisor has heard of it", every_s=0.001)
        kill(session, 1)
        with pytest.raises(ClusterError, match=r"rank 1 was lost meanwhile.*resize -n 5"):
            resized.result(60)
    assert run.state != "finished"
    run.resize(5, show=lambda text: None)
    wait_joined(session, run, 2, world_size=5)
    check_end(finish(run, gate), [1], world_size=5)
    check_changes(run, [1], [1, 4])
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_to_the_number_that_was_there(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """It is the wanted number already, so nothing changes but that the lost rank is tried again."""
    run = comings.start(session, gate.cell, recovery="shrink")
    kill(session, 3)
    wait_until(lambda: count(run, "recovered"), "recovered")
    run.resize(NUM_RANKS, show=lambda text: None)
    wait_joined(session, run, 1)
    check_end(finish(run, gate), [3], world_size=NUM_RANKS)
    check_books(run, STEPS)
    check_changes(run, [3], [3])


def test_a_rank_dies_while_it_is_to_leave(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Its slot goes with it."""
    run = comings.start(session, gate.cell)
    session.request("resize", num_ranks=3)
    kill(session, 3)
    wait_until(
        lambda: [entry["rank"] for entry in session.status()["ranks"]] == [0, 1, 2], "there are three slots", 20
    )
    wait_until(lambda: session.status()["world_size"] == 3 and run.state == "running", "the three go on")
    report = finish(run, gate)
    assert report.ok and report.state == "finished" and report.world_size_end == 3, str(report)
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_too_late_to_leave(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """The run has no step boundary left at which they could leave: they leave when it is over."""
    last = f"calls < 3 or [time.sleep(0.01) for _ in iter(lambda: {gate.statement.split(' or ')[0]}, True)]"
    run = session.train(cell_with_trouble(last), steps=3, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    wait_until(lambda: run.step == 2, "all are in the last step")
    with ThreadPoolExecutor() as pool:
        resized = pool.submit(resize, session, 2)
        wait_until(lambda: session.status()["wanted_ranks"] == 2, "the supervisor has heard of it")
        check_end(finish(run, gate), [])
        resized.result(60)
    assert [entry["rank"] for entry in session.status()["ranks"]] == [0, 1]
    trains_with(session, reference, 2)


def test_only_one_that_should_have_left_holds_the_weights(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path
) -> None:
    """The replacement of the one that stays has come too late: whoever has the weights takes its slot."""
    slow = tmp_path / "slow"
    loading = f"import os, time\nwhile os.path.exists({str(slow)!r}): time.sleep(0.01)\n"
    run = comings.start(session, loading + gate.cell)
    slow.touch()
    kill(session, 0)
    wait_until(lambda: count(run, "recovered"), "recovered")
    with ThreadPoolExecutor() as pool:
        resized = pool.submit(resize, session, 1)
        wait_until(lambda: session.status()["world_size"] == 1, "the others have left")
        check_end(finish(run, gate), [0], world_size=1)
        resized.result(60)
    slow.unlink()
    wait_until(lambda: [entry["rank"] for entry in session.status()["ranks"]] == [0], "the replacement has ended", 20)
    assert_same(run.state_dict()["2.bias"].tolist(), reference.model.state_dict()["2.bias"].tolist(), SAME_F64)
    trains_with(session, reference, 1)


def test_what_is_refused_changes_nothing(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    pids = pids_of(session)
    for num_ranks, parts in (
        (0, ["num_ranks takes a whole number of at least 1, not 0"]),
        (-2, ["at least 1, not -2"]),
        (2.5, ["whole number"]),
        (GLOBAL_BATCH + 1, [f"global batch of {GLOBAL_BATCH}|memory|ranks need"]),
    ):
        with pytest.raises(UsageError) as caught:
            run.resize(num_ranks, show=lambda text: None)
        says(caught.value, *parts)
    said: list[str] = []
    run.resize(NUM_RANKS, show=said.append)
    assert said == ["The cluster 'shared' has 4 ranks already."]
    assert pids_of(session) == pids
    check_all(run, gate, reference, [], NUM_RANKS)
    assert [event["kind"] for event in run.events()] == ["run_started", "run_finished"]
    with pytest.raises(RunError) as over:
        run.resize(2, show=lambda text: None)
    says(over.value, "is over", "finished", "session.resize")
    assert session.num_ranks == NUM_RANKS
