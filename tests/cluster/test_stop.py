"""Stopping the cluster leaves no process, whatever is going on; twenty kills leave no trace in the survivors."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from cluster_tools import (
    CELL,
    GLOBAL_BATCH,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    check_recoveries,
    check_report,
    losses_of,
    processes_of,
    wait_until,
)
from shared_cluster import SharedCluster

import ftnb
from ftnb.wire import paths


def stop_and_look(cluster: SharedCluster, session: ftnb.Session) -> str:
    """Stop the cluster: nothing is left when `stop` returns. Returns the supervisor's log.

    The supervisor ends with 0 only when all it had started was gone within its own limit (5 s).
    """
    supervisor = session._process
    log = paths.cluster_dir(session.name) / "supervisor.log"
    before = cluster.census.take()
    assert len(before) > session.num_ranks, "supervisor, controller, engines"
    with log.open() as stream:  # the directory goes with a cluster that ends well
        cluster.stop()
        assert cluster.census.left() == []
        assert supervisor.returncode == 0
        text = stream.read()
    assert "did not end" not in text and "internal error" not in text.lower(), text
    assert not paths.cluster_dir(session.name).exists()
    return text


def exits(log: str) -> dict[int, str]:
    """Of each rank the words of its last exit."""
    return {int(rank): words for rank, words in re.findall(r"\(rank (\d+), pid \d+\) is gone, it was \w+: (.*)", log)}


def train_long(session: ftnb.Session, **options) -> ftnb.Run:
    run = session.train(CELL, steps=1_000_000, global_batch=GLOBAL_BATCH, recovery="shrink", names={}, **options)
    wait_until(lambda: run.step >= 5, "the training goes on")
    return run


def numbers_of(process: psutil.Process) -> tuple[int, int, int]:
    """Open descriptors, threads, and resident memory in MB."""
    return process.num_fds(), process.num_threads(), round(process.memory_info().rss / 1e6)


# What may come and go: a connection that is being closed, a thread of a pool, the allocator's caches.
ALLOWANCE = (4, 2, 40)
WARM_UP = 4  # runs until caches and thread pools have their size


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_kills_and_restarts_leave_the_survivor_as_it_was(cluster: SharedCluster, kills: int) -> None:
    """Rank 0 lives through it all; ranks 1 and 2 are killed in every run and started again by the next one."""
    session = cluster.session(num_ranks=3)
    steps, reference = 400, Reference(CELL, 400)  # long enough for both kills
    survivor = processes_of(session)[0]
    watched = {
        "rank 0": psutil.Process(survivor.pid), "supervisor": psutil.Process(session.hello["supervisor_pid"]),
    }  # fmt: skip
    numbers: list[dict[str, tuple[int, int, int]]] = []
    for number in range(kills // 2):
        run = session.train(CELL, steps=steps, global_batch=GLOBAL_BATCH, recovery="shrink", names={}, name="flat", show=lambda text: None)
        for rank in (1, 2) if number % 2 else (2, 1):
            run.inject("kill", rank=rank)
        check_report(run.wait(timeout_s=60), [1, 2], world_size=3)
        check_recoveries(run, [1, 2])
        check_books(run, steps)
        assert_same(losses_of(run), reference.losses, SAME_F64)
        assert processes_of(session) == {0: survivor}
        cluster.census.take()
        numbers.append({who: numbers_of(process) for who, process in watched.items()})
    before = numbers[WARM_UP]

    def flat() -> bool:
        numbers[-1] = {who: numbers_of(process) for who, process in watched.items()}
        return all(
            now <= early + allowed
            for who in watched
            for now, early, allowed in zip(numbers[-1][who], before[who], ALLOWANCE)
        )

    wait_until(flat, f"descriptors, threads, MB after each run: {numbers}", limit_s=10)
    log = stop_and_look(cluster, session)
    assert log.count("is gone, it was") == kills + 1, "every kill, and rank 0 at the end"
    assert exits(log)[0] == "it exited with code 0 (a clean exit)"


def test_stop_while_training(cluster: SharedCluster) -> None:
    session = cluster.session(num_ranks=3)
    run = train_long(session, workers=1)
    log = stop_and_look(cluster, session)
    assert exits(log) == dict.fromkeys(range(3), "it exited with code 0 (a clean exit)")
    # The run's directory is complete, and says how it ended.
    report = run.report()
    assert report.state == run.state == "stopped"
    assert report.problems == [] and run.events()[-1]["kind"] == "run_stopped"
    check_books(run, report.steps)


def test_stop_while_recovering_and_with_a_stopped_rank(cluster: SharedCluster) -> None:
    """Rank 2 is stopped by SIGSTOP, so the recovery from the loss of rank 1 cannot come to an end."""
    session = cluster.session(num_ranks=3)
    run = train_long(session)
    ranks = processes_of(session)
    assert ranks[2].signal(signal.SIGSTOP)
    assert ranks[1].signal(signal.SIGKILL)
    wait_until(lambda: run.state == "recovering", "it tries to recover")
    stop_and_look(cluster, session)
    assert run.report().state == "stopped"
    kinds = [event["kind"] for event in run.events()]
    assert kinds[-1] == "run_stopped" and "recovered" not in kinds
    check_books(run, len(run.ledger()))


def test_stop_with_a_stopped_rank_while_training(cluster: SharedCluster) -> None:
    session = cluster.session(num_ranks=2)
    run = train_long(session)
    assert processes_of(session)[0].signal(signal.SIGSTOP)
    stop_and_look(cluster, session)
    assert run.report().state == "stopped"


def test_stop_while_a_cell_is_being_run(cluster: SharedCluster) -> None:
    """A cell that takes long on one rank; somebody else stops the cluster meanwhile."""
    session = cluster.session(num_ranks=2)
    import threading

    errors: list[BaseException] = []

    def train() -> None:
        try:
            session.train(CELL + "import time\nopen('running', 'w').close()\ntime.sleep(600)\n", names={})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    wait_until(lambda: Path("running").exists(), "the cell runs")
    stop_and_look(cluster, session)
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1 and isinstance(errors[0], ftnb.FtnbError), errors


def test_sigterm_to_the_supervisor_ends_everything(cluster: SharedCluster) -> None:
    session = cluster.session(num_ranks=2)
    run = train_long(session)
    cluster.census.take()
    session._process.send_signal(signal.SIGTERM)
    wait_until(lambda: session._process.poll() is not None, "the supervisor ends")
    assert cluster.census.left() == []
    assert session._process.returncode == 0
    assert run.report().state == "stopped" and "SIGTERM" in run.report().reason
    assert not session.alive
