"""The supervisor is killed or stopped: the training goes on, a successor takes over, nothing is lost or there twice."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
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
    command_line,
    losses_of,
    pids_of,
    processes_of,
    says,
    wait_until,
)
from comings import STEPS, Gate, check_changes, check_end, count, entry_of, finish, kill, wait_joined
from shared_cluster import SharedCluster

import ftnb
from ftnb.errors import ClusterError
from ftnb.wire import client, paths, proc

SUCCESSOR_LIMIT_S = 60.0
ADOPTED = ("kill", "unknown")  # the exit status of a rank that was adopted is told to nobody


@pytest.fixture(scope="module")
def reference() -> Reference:
    return comings.reference(2000)


@pytest.fixture(scope="module", autouse=True)
def fresh_cluster_afterwards(shared: SharedCluster) -> Iterator[None]:
    """Of ranks that were adopted nobody knows the exit status, which other tests ask for."""
    yield
    shared.stop()


@pytest.fixture(autouse=True)
def one_supervisor(cluster: SharedCluster, session: ftnb.Session) -> Iterator[None]:
    """In the end one is in charge, and no other runs. A notebook does not start successors without end: counted anew."""
    session._connection._takeovers.clear()
    yield
    if session.alive:
        pid = session.status()["supervisor_pid"]
        wait_until(lambda: supervisors(cluster) == [pid], f"only supervisor {pid} is left, not {supervisors(cluster)}")


def supervisors(cluster: SharedCluster) -> list[int]:
    mark = "-m ftnb.supervisor --name"
    return sorted(process.pid for process in cluster.census.take() if mark in command_line(process.pid))


def supervisor_of(session: ftnb.Session) -> proc.ProcessId:
    process = proc.identify(session.status()["supervisor_pid"])
    assert process is not None
    return process


def kill_supervisor(session: ftnb.Session) -> proc.ProcessId:
    supervisor = supervisor_of(session)
    assert supervisor.signal(signal.SIGKILL)
    return supervisor


def wait_successor(session: ftnb.Session, lost: proc.ProcessId) -> int:
    """The pid of whoever is in charge after `lost`."""
    pid = wait_until(
        lambda: (found := session.status()["supervisor_pid"]) != lost.pid and found, "a successor", SUCCESSOR_LIMIT_S
    )
    assert not lost.is_alive()
    return pid


def go_on(run: ftnb.Run, steps: int = 10) -> None:
    target = run.step + steps
    wait_until(lambda: run.step >= target, f"step {target} is done, in the view of the new supervisor")


def check_all(run: ftnb.Run, gate: Gate, reference: Reference, lost: list[int], steps: int = STEPS) -> None:
    check_end(finish(run, gate), lost, kinds=ADOPTED)
    check_books(run, steps)
    check_changes(run, lost)
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)


def kinds_of(run: ftnb.Run) -> list[str]:
    """What happened, in order; without stragglers: a successor that starts takes a core, and makes some rank slow."""
    return [event["kind"] for event in run.events() if not event["kind"].startswith("straggler_")]


def test_killed_while_training(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    before, term = pids_of(session), session.status()["term"]
    step = run.step
    lost = kill_supervisor(session)
    wait_successor(session, lost)
    status = session.status()
    assert status["term"] > term and status["generation"] == 1
    go_on(run)
    assert run.step > step and run.state == "running"
    assert pids_of(session) == before, "the same ranks"
    assert session.client[:].apply_sync(lambda: 6 * 7) == [42] * NUM_RANKS
    check_all(run, gate, reference, [])
    assert kinds_of(run) == ["run_started", "supervisor_started", "run_finished"]
    assert {line["generation"] for line in run.ledger()} == {1}, "the training did not notice"


def test_killed_while_training_at_full_speed(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Hundreds of steps whose reports nobody reads for a while."""
    gate.open()
    steps = 2000
    run = session.train(gate.cell, steps=steps, global_batch=GLOBAL_BATCH, names={})
    lost = kill_supervisor(session)
    wait_successor(session, lost)
    check_all(run, gate, reference, [], steps)
    assert kinds_of(run) == ["run_started", "supervisor_started", "run_finished"]


@pytest.mark.parametrize("order", ["rank first", "supervisor first"])
def test_killed_together_with_a_rank(session: ftnb.Session, reference: Reference, gate: Gate, order: str) -> None:
    run = comings.start(session, gate.cell)
    victim, supervisor = processes_of(session)[2], supervisor_of(session)
    both = [victim, supervisor] if order == "rank first" else [supervisor, victim]
    for process in both:
        assert process.signal(signal.SIGKILL)
    wait_successor(session, supervisor)
    wait_joined(session, run, 1)
    go_on(run)
    check_all(run, gate, reference, [2])


def test_a_rank_dies_while_nobody_is_in_charge(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    victims, supervisor = processes_of(session), kill_supervisor(session)
    wait_until(lambda: not supervisor.is_alive(), "the supervisor is gone", every_s=0.001)
    for rank in (0, 1):
        assert victims[rank].signal(signal.SIGKILL)
    wait_joined(session, run, 2)
    check_all(run, gate, reference, [0, 1])


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_a_rank_that_says_nothing_to_a_successor_is_the_one_that_is_blamed(
    session: ftnb.Session, reference: Reference, gate: Gate, fault: str
) -> None:
    """Those that wait for it are not told to connect again, and one that connects again is busy, not cut off."""
    run = comings.start(session, gate.cell, hang_timeout_s=1.0)
    wait_until(lambda: run.step >= 10, "every size of a share has been there")
    pid = session.status()["supervisor_pid"]
    run.inject(fault, rank=1)
    if fault == "gil":  # which the rank does when it is told that it is on record
        wait_until(lambda: entry_of(session, 1)["heartbeat_age_s"] > 0.3, "it has begun")
    assert proc.identify(pid).signal(signal.SIGKILL)
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [1], kinds=[fault])
    check_changes(run, [1])
    assert count(run, "regroup_started") == 2, "without it, and with another process in its place"
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)


def test_killed_while_paused(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    run.pause()
    step = run.step
    wait_successor(session, kill_supervisor(session))
    assert run.state == "paused"
    wait_until(lambda: run.step == step, "what the ranks had reported is read again")
    run.unpause()
    go_on(run)
    check_all(run, gate, reference, [])
    assert kinds_of(run) == ["run_started", "paused", "supervisor_started", "unpaused", "run_finished"]


def test_killed_in_the_middle_of_a_regroup(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    supervisor = supervisor_of(session)
    kill(session, 1)
    wait_until(lambda: count(run, "rank_failed"), "the loss is noticed", every_s=0.0005)
    assert supervisor.signal(signal.SIGKILL)
    wait_successor(session, supervisor)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [1])


def test_killed_while_a_newcomer_joins(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """At the other regroup: that in which the replacement is to get its state."""
    run = comings.start(session, gate.cell)
    supervisor = supervisor_of(session)
    kill(session, 1)
    wait_until(lambda: count(run, "regroup_started") >= 2, "the second regroup begins", comings.JOIN_LIMIT_S, 0.0005)
    assert supervisor.signal(signal.SIGKILL)
    wait_successor(session, supervisor)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [1])


def test_killed_right_after_train_returned(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = session.train(gate.cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    wait_successor(session, kill_supervisor(session))
    go_on(run)
    check_all(run, gate, reference, [])


def test_killed_while_a_replacement_starts(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    kill(session, 3)
    wait_until(lambda: entry_of(session, 3)["state"] == "starting", "a replacement is being started", every_s=0.002)
    wait_successor(session, kill_supervisor(session))
    wait_joined(session, run, 1)
    go_on(run)
    check_all(run, gate, reference, [3])


def test_killed_before_it_could_start_a_replacement(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """The replacement is on record, but nothing of it is there yet: it waits for the fork server."""
    run = comings.start(session, gate.cell)
    (server,) = fork_servers(cluster)
    assert server.signal(signal.SIGKILL)
    wait_until(lambda: fork_servers(cluster) - {server}, "another fork server is being started")
    kill(session, 3)
    wait_until(lambda: entry_of(session, 3)["state"] == "starting", "a replacement is on its way", every_s=0.002)
    kill(session, 2)  # so that all of this is put on record
    wait_until(lambda: {"intended": 3, "pid": None} in unborn(session), "it is on record")
    wait_successor(session, kill_supervisor(session))
    wait_joined(session, run, 2)
    go_on(run)
    check_all(run, gate, reference, [2, 3])


def fork_servers(cluster: SharedCluster) -> set[proc.ProcessId]:
    return {p for p in cluster.census.take() if "ftnb.rank.forkserver" in command_line(p.pid) and p.is_alive()}


def unborn(session: ftnb.Session) -> list[dict[str, object]]:
    """Those of the pool that are on record and have no process yet."""
    slots = json.loads((paths.cluster_dir(session.name) / "cluster.json").read_text())["fleet"]["slots"]
    return [{"intended": s["intended"], "pid": None} for s in slots if s["place"] == "pool" and s["pid"] is None]


def test_killed_while_idle(session: ftnb.Session, reference: Reference) -> None:
    session.train(CELL, steps=4, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60)
    before, run_before = pids_of(session), session.run
    wait_successor(session, kill_supervisor(session))
    assert session.status()["state"] == "idle" and pids_of(session) == before
    assert session.run.name == run_before.name and session.run.state == "finished"
    assert set(run_before.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}, "the ranks keep the model"
    run = session.train(CELL, steps=20, global_batch=GLOBAL_BATCH, names={})
    check_report(run.wait(timeout_s=60), [])
    check_books(run, 20)
    assert_same(losses_of(run), reference.losses[:20], SAME_F64)
    assert pids_of(session) == before


def test_killed_again_and_again(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    run = comings.start(session, gate.cell)
    for number in range(4):
        wait_successor(session, kill_supervisor(session))
        go_on(run, 2)
        if number == 1:
            kill(session, 0)
    wait_joined(session, run, 1)
    check_all(run, gate, reference, [0])
    assert kinds_of(run).count("supervisor_started") == 4


def test_successors_are_killed_while_they_take_over(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """Two that are killed before they have answered anybody, at moments that nobody chose."""
    run = comings.start(session, gate.cell)
    lost = kill_supervisor(session)
    killed = {lost.pid}
    for after_s in (0.2, 0.6):
        pid = wait_until(lambda: next((p for p in supervisors(cluster) if p not in killed), None), "a successor starts")
        time.sleep(after_s)  # somewhere in its start: no condition is waited for here
        if (process := proc.identify(pid)) is not None:
            process.signal(signal.SIGKILL)
        killed.add(pid)
    wait_until(lambda: session.status()["supervisor_pid"] not in killed, "a successor", SUCCESSOR_LIMIT_S)
    go_on(run)
    check_all(run, gate, reference, [])


def test_stopped_for_a_while_and_continued(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    run = comings.start(session, gate.cell)
    supervisor = supervisor_of(session)
    assert supervisor.signal(signal.SIGSTOP)
    try:
        time.sleep(5.0)  # what is tested, not what is waited for
        assert supervisors(cluster) == [supervisor.pid]
    finally:
        supervisor.signal(signal.SIGCONT)
    go_on(run)
    assert supervisor_of(session) == supervisor
    check_all(run, gate, reference, [])
    assert kinds_of(run) == ["run_started", "run_finished"], "no rank was suspected"


def test_stopped_for_good_is_replaced(
    session: ftnb.Session, reference: Reference, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_LIMIT_S", 3.0)
    run = comings.start(session, gate.cell)
    supervisor = supervisor_of(session)
    assert supervisor.signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: session._connection.supervisor_pid != supervisor.pid, "a successor", 2 * SUCCESSOR_LIMIT_S
        )
        assert not supervisor.is_alive(), "ended before another one is in charge"
    finally:
        supervisor.signal(signal.SIGCONT)
    monkeypatch.undo()
    wait_successor(session, supervisor)
    go_on(run)
    check_all(run, gate, reference, [])


def test_the_run_ends_while_nobody_is_in_charge(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    steps = 60
    run = comings.start(session, gate.cell, steps)
    wait_until(lambda: run.step >= steps - 30, "thirty steps are left")
    supervisor = kill_supervisor(session)
    gate.open()
    report = run.wait(timeout_s=60)
    wait_successor(session, supervisor)
    check_end(report, [])
    check_books(run, steps)
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)
    assert kinds_of(run) == ["run_started", "supervisor_started", "run_finished"]
    again = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={})
    check_report(again.wait(timeout_s=60), [])


def test_the_run_has_ended_before_anybody_is_in_charge(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path
) -> None:
    """Then all that a successor hears of the last steps is what it finds in shared memory."""
    steps = 60
    last = f"calls == {steps} and open('{tmp_path}/' + str(rank), 'w').close()"
    run = comings.start(session, cell_with_trouble(f"{gate.statement}; {last}"), steps)
    supervisor = supervisor_of(session)
    assert supervisor.signal(signal.SIGSTOP)
    try:
        gate.open()
        wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(NUM_RANKS)), "all did the last step")
        time.sleep(0.5)  # and have said so, or nearly: it has to be right in any case
    finally:
        supervisor.signal(signal.SIGKILL)
    report = run.wait(timeout_s=60)
    check_end(report, [])
    check_books(run, steps)
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)
    assert kinds_of(run) == ["run_started", "supervisor_started", "run_finished"]


def test_an_exception_while_nobody_is_in_charge(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Every rank raises, and there is nobody to tell: the successor hears of it, and the run ends with its reason."""
    run = comings.start(session, cell_with_trouble(f"{gate.statement}\n    if os.path.exists({str(gate.path)!r}): 1 / 0"))
    supervisor = kill_supervisor(session)
    gate.open()
    report = run.wait(timeout_s=60)
    assert report.state == "failed" and "ZeroDivisionError" in report.reason, report.reason
    wait_successor(session, supervisor)
    check_books(run, report.steps)
    check_report(session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}).wait(timeout_s=60), [])


def test_killed_while_the_ranks_run_the_cell(session: ftnb.Session, reference: Reference, tmp_path: Path) -> None:
    """The run has not begun, and does not: `train` says so, and the next one works."""
    errors: list[BaseException] = []
    cell = CELL + f"import os, time\nopen({str(tmp_path)!r} + '/running', 'w').close()\ntime.sleep(1.5)\n"

    def train() -> None:
        try:
            session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    wait_until(lambda: (tmp_path / "running").exists(), "the cell runs")
    supervisor = supervisor_of(session)
    supervisor.signal(signal.SIGKILL)
    thread.join(SUCCESSOR_LIMIT_S)
    assert not thread.is_alive() and len(errors) == 1 and isinstance(errors[0], ClusterError), errors
    says(errors[0], "'train'", "%ft_status")
    wait_successor(session, supervisor)
    run = session.train(CELL, steps=20, global_batch=GLOBAL_BATCH, names={})
    check_report(run.wait(timeout_s=60), [])
    assert_same(losses_of(run), reference.losses[:20], SAME_F64)


def test_the_directory_of_an_earlier_run_is_gone(session: ftnb.Session, reference: Reference) -> None:
    """That it was removed, or that somebody has written into it, is no reason to give up a cluster."""
    for spoil in (shutil.rmtree, lambda directory: (directory / "metrics.jsonl").write_text("no JSON\n")):
        run = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
        run.wait(timeout_s=60)
        ranks = pids_of(session)
        spoil(run.directory)
        wait_successor(session, kill_supervisor(session))
        assert (session.run.name, session.run.state) == (run.name, "finished")
        assert pids_of(session) == ranks
    again = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    check_report(again.wait(timeout_s=60), [])


def test_the_directory_of_the_run_is_gone(session: ftnb.Session, gate: Gate) -> None:
    """The run ends with a reason; its weights, and the cluster, are there."""
    run = comings.start(session, gate.cell)
    ranks = pids_of(session)
    shutil.rmtree(run.directory)
    wait_successor(session, kill_supervisor(session))
    wait_until(lambda: session.run.state == "failed", "it has ended")
    says(session.run.info()["reason"], "cannot be written", "No such file", str(run.directory))
    assert session.run.state_dict().keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    again = session.train(CELL, steps=8, global_batch=GLOBAL_BATCH, names={}, show=lambda text: None)
    check_report(again.wait(timeout_s=60), [])
    assert pids_of(session) == ranks
