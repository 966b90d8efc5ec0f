"""Warm spares: they take the place of a lost rank in the same regroup, and are replaced themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import comings
import pytest
from cluster_tools import (
    CELL,
    GLOBAL_BATCH,
    NUM_RANKS,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    check_report,
    losses_of,
    pids_of,
    wait_until,
)
from comings import STEPS, Gate, check_changes, check_end, count, finish, kill, wait_joined
from shared_cluster import SharedCluster

import ftnb
from ftnb.wire import proc


@pytest.fixture(scope="module")
def with_spare(shared: SharedCluster) -> Iterator[ftnb.Session]:
    """Four ranks and a spare. The cluster without spares goes meanwhile: two of them are much for two cores."""
    shared.stop()
    session = ftnb.Session.start(NUM_RANKS, num_spares=1, name="spares", show=lambda text: None)
    shared.census.take()
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture
def session(with_spare: ftnb.Session, shared: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ftnb.Session]:
    """All four ranks and the spare are there, and no run goes on, before and after."""
    monkeypatch.chdir(shared.directory)
    yield with_spare
    shared.census.take()
    run = with_spare.run
    if run is not None and run.state not in ("finished", "stopped", "failed"):
        run.stop(save=False)


def spares(session: ftnb.Session) -> list[dict[str, Any]]:
    return [entry for entry in session.status()["ranks"] if entry["rank"] is None and entry["state"] == "spare"]


def wait_spare(session: ftnb.Session, other_than: set[int] = frozenset()) -> proc.ProcessId:
    """The process of a spare that is warm, and is none of these pids."""
    pid = wait_until(
        lambda: next((s["pid"] for s in spares(session) if s["pid"] not in other_than), None), "a warm spare",
        comings.JOIN_LIMIT_S,
    )
    process = proc.identify(pid)
    assert process is not None
    return process


def start(session: ftnb.Session, cell: str) -> ftnb.Run:
    """A run whose spare has run the cell."""
    wait_spare(session)
    run = comings.start(session, cell)
    wait_until(lambda: run.info()["num_spares"] == 1, "the spare has run the cell", comings.JOIN_LIMIT_S)
    return run


def check_all(run: ftnb.Run, gate: Gate, reference: Reference, lost: list[int]) -> None:
    check_end(finish(run, gate), lost)
    check_books(run, STEPS)
    check_changes(run, lost)
    assert_same(losses_of(run), reference.losses, SAME_F64)


@pytest.mark.parametrize("rank", [2, 0])
def test_a_spare_joins_in_the_same_regroup(session: ftnb.Session, reference: Reference, gate: Gate, rank: int) -> None:
    run = start(session, gate.cell)
    spare = wait_spare(session)
    kill(session, rank)
    wait_joined(session, run, 1)
    assert pids_of(session)[rank] == spare.pid
    another = wait_spare(session, {spare.pid})
    assert another != spare
    check_all(run, gate, reference, [rank])
    assert {line["world_size"] for line in run.metrics()} == {4}, "never with fewer"
    assert {line["generation"] for line in run.metrics()} == {1, 2}


def test_two_kills_with_one_spare(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    kill(session, 1, 3)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, [1, 3])
    wait_spare(session)


def test_one_kill_after_the_other(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    for number in range(1, 4):
        kill(session, number)
        wait_joined(session, run, number)
        wait_until(lambda: run.info()["num_spares"] == 1, "another spare has run the cell", comings.JOIN_LIMIT_S)
    check_all(run, gate, reference, [1, 2, 3])
    assert {line["world_size"] for line in run.metrics()} == {4}, "never with fewer"


def test_a_spare_that_still_runs_the_last_cell(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Its answer about the last run's cell must not be taken for one about this run's."""
    wait_spare(session)
    slow = "import os, time\nif os.environ['FTNB_RANK'] == '-1':\n    time.sleep(4)\n"
    last = session.train(slow + CELL, steps=2, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    check_report(last.wait(timeout_s=60), [])
    run = comings.start(session, slow + gate.cell)
    wait_until(lambda: run.info()["num_spares"] == 1, "the spare has run the cell", comings.JOIN_LIMIT_S)
    kill(session, 2)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [2])


def test_status_and_targets(session: ftnb.Session) -> None:
    """A spare has no rank, and commands reach the ranks, whoever fills them."""
    spare = wait_spare(session)
    entries = session.status()["ranks"]
    assert [entry["rank"] for entry in entries] == [0, 1, 2, 3, None]
    assert (entries[4]["pid"], entries[4]["state"]) == (spare.pid, "spare")
    assert session.status()["num_ranks"] == NUM_RANKS and session.status()["num_spares"] == 1
    for entry in entries[:4]:
        wait_until(lambda e=entry: e["engine"] in session.client.ids, "ipyparallel knows the engine")
        assert session.client[entry["engine"]].apply_sync(os.getpid) == entry["pid"]
        assert session.client[entry["engine"]].apply_sync(lambda: os.environ["FTNB_RANK"]) == str(entry["rank"])


def test_a_spare_lost_while_nothing_trains(session: ftnb.Session, reference: Reference) -> None:
    spare = wait_spare(session)
    assert spare.signal(signal.SIGKILL)
    another = wait_spare(session, {spare.pid})
    assert any(f"pid {spare.pid}" in note and "SIGKILL" in note for note in session.status()["notes"])
    said: list[str] = []
    run = session.train(CELL, steps=12, global_batch=GLOBAL_BATCH, names={}, show=said.append)
    check_report(run.wait(timeout_s=60), [])
    assert any(f"pid {spare.pid}" in line for line in said), said
    assert another.is_alive()


def test_a_spare_lost_during_a_run(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    spare = wait_spare(session)
    assert spare.signal(signal.SIGKILL)
    wait_spare(session, {spare.pid})
    wait_until(lambda: run.info()["num_spares"] == 1, "another one has run the cell", comings.JOIN_LIMIT_S)
    lost = [event for event in run.events() if event["kind"] == "spare_lost"]
    assert len(lost) == 1 and "rank" not in lost[0] and f"pid {spare.pid}" in lost[0]["reason"], lost
    kill(session, 2)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [2])
    assert {line["world_size"] for line in run.metrics()} == {4}


def test_a_spare_and_a_rank_at_once(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = start(session, gate.cell)
    spare = wait_spare(session)
    kill(session, 0)
    spare.signal(signal.SIGKILL)
    wait_until(lambda: count(run, "rank_joined"), "somebody has joined", comings.JOIN_LIMIT_S)
    wait_until(lambda: session.status()["world_size"] == NUM_RANKS and run.state == "running", "all are there")
    report = finish(run, gate)
    assert report.ok and report.state == "finished" and report.world_size_end == NUM_RANKS, str(report)
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses, SAME_F64)
    wait_spare(session, {spare.pid})


def test_a_spare_takes_a_place_while_nothing_trains(session: ftnb.Session, reference: Reference) -> None:
    """A rank lost between two runs: the next run is whole."""
    wait_spare(session)
    kill(session, 1)
    run = session.train(CELL, steps=12, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    check_report(run.wait(timeout_s=60), [])
    check_books(run, 12)
    assert_same(losses_of(run), reference.losses[:12], SAME_F64)
    wait_spare(session)


def test_the_supervisor_is_killed(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """The successor knows the spare, and uses it."""
    run = start(session, gate.cell)
    spare = wait_spare(session)
    supervisor = session.status()["supervisor_pid"]
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: session.status()["supervisor_pid"] != supervisor, "a successor")
    with comings.said_of(session, run):
        wait_until(lambda: run.info()["num_spares"] == 1, "the spare is still there", 30)
    kill(session, 3)
    wait_joined(session, run, 1)
    assert pids_of(session)[3] == spare.pid
    check_end(finish(run, gate), [3], kinds=("kill", "unknown"))
    check_books(run, STEPS)
    check_changes(run, [3])
    assert_same(losses_of(run), reference.losses, SAME_F64)
