"""Pauses that are nobody's failure: nobody is suspected, nobody is lost, and no generation is formed for them.

How long a pause may be is not what is tested by its length here, but by its kind: each is longer than the limit that
would hold for a rank that does nothing but wait, and longer still in the runs that are marked `long`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import (
    DATA,
    GLOBAL_BATCH,
    MODEL,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    losses_of,
    wait_until,
)
from cluster_tools import cell_with_trouble as troubled
from comings import Gate, check_changes, check_end, count, finish, kill, start, wait_joined
from shared_cluster import SharedCluster

import ftnb
from ftnb.wire import proc

HANG_S = 2.0  # the limit for ranks that do not move
SUSPICIOUS = ("rank_suspected", "rank_failed", "straggler_detected", "regrouped")

# Real work of other people, as `nice` as ours: FTNB_BUSY_S=1800 for the half hour of the promise.
BUSY_S = float(os.environ.get("FTNB_BUSY_S", 60))


def check_innocent(run: ftnb.Run, report: Any, reference: Reference, *, supervisors: int = 0) -> None:
    """Nothing has happened that a user would have to read about, and the training is the undisturbed one."""
    check_end(report, [])
    kinds = [event["kind"] for event in run.events()]
    assert not [kind for kind in kinds if kind in SUSPICIOUS], kinds
    assert kinds.count("supervisor_started") == supervisors, kinds
    steps = len(run.metrics())
    check_books(run, steps)
    assert {line["generation"] for line in run.ledger()} == {1}
    assert_same(losses_of(run), reference.losses[:steps], SAME_F64)


def wait_for_steps(run: ftnb.Run, number: int, limit_s: float = 120.0) -> None:
    wanted = run.step + number
    wait_until(lambda: run.step >= wanted, f"{number} steps more", limit_s)


# --- the interpreter lock is held


def sorting(path: Path, millions: float) -> str:
    """On rank 1, when the test asks for it: a list is sorted, in one call, in which no other thread runs any Python."""
    words = f"sorted(str(hash(i) * 2654435761 % 2**32) for i in range(int({millions} * 1e6)))"
    return (
        f"(rank == 1 and os.path.exists({str(path)!r}) and not os.path.exists({str(path)!r} + '.done') "
        f"and ({words}.sort(key=lambda s: s[::-1]), open({str(path)!r} + '.done', 'w').close()))"
    )


@pytest.mark.parametrize("millions", [3])
def test_a_rank_sorts_millions_of_strings(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path, millions: int
) -> None:
    asked, done = tmp_path / "sort", tmp_path / "sort.done"
    run = start(session, troubled(f"{sorting(asked, millions)}; {gate.statement}"), hang_timeout_s=30)
    asked.touch()
    wait_until(done.exists, "it is sorted", 120)
    wait_for_steps(run, 3)
    check_innocent(run, finish(run, gate), reference)


# --- first steps


def slow_first(gate: Gate, seconds: float, who: str = "True") -> str:
    """A cell that behaves like a compiler: the first call for each size of the share takes its time."""
    statement = f"{who} and len(x) not in compiled and (compiled.add(len(x)), time.sleep({seconds})); {gate.statement}"
    return troubled(statement) + "compiled = set()\n"


@pytest.mark.parametrize("seconds", [6, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize("who", ["True", "rank == 2"], ids=["all", "one"])
def test_a_first_step_takes_its_time(
    session: ftnb.Session, reference: Reference, gate: Gate, seconds: float, who: str
) -> None:
    """Once for shares of four samples, and once for those at the end of the epoch."""
    run = session.train(
        slow_first(gate, seconds, who), steps=20, global_batch=GLOBAL_BATCH, hang_timeout_s=HANG_S, names={}
    )
    wait_until(lambda: run.step >= 6, "all sizes have been there", 60 + 4 * seconds)
    check_innocent(run, finish(run, gate), reference)


def test_a_replacement_takes_its_time_for_its_first_step(
    session: ftnb.Session, reference: Reference, gate: Gate
) -> None:
    """The others have done it long since, and wait in the collective for longer than their own limit."""
    run = start(session, slow_first(gate, 5, "rank == 2"), hang_timeout_s=HANG_S)
    kill(session, 2)
    wait_joined(session, run, 1)
    wait_for_steps(run, 6)
    report = finish(run, gate)
    check_end(report, [2])
    check_changes(run, [2])
    assert count(run, "rank_suspected") == 0
    assert_same(losses_of(run), reference.losses, SAME_F64)


COMPILED = DATA + MODEL + """
import time
began = time.monotonic()
model = torch.compile(model)
calls = 0

def training_step(model, batch):
    global calls
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    calls += 1
    if calls == 1:
        print(f"compiled after {time.monotonic() - began:.1f} s", flush=True)
    return loss
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_torch_compile_for_real(
    cluster: SharedCluster, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its cache, on all ranks at once, on however few cores there are; and nothing that it starts is left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    cluster.stop()  # the ranks get the environment of the notebook that starts them
    try:
        session = cluster.session()
        run = session.train(COMPILED, steps=40, global_batch=GLOBAL_BATCH, hang_timeout_s=HANG_S, names={})
        report = run.wait(timeout_s=600)
        check_innocent(run, report, reference)
        assert "compiled after" in run.logs(rank=0)
        assert any((tmp_path / "inductor").rglob("*.so")), "it has been compiled here"
        processes = cluster.census.take()
    finally:
        cluster.stop()
    assert len(processes) > 4 and not cluster.census.left()


# --- evaluate and save


def evaluating(statement: str) -> str:
    return f"\ndef evaluate(model):\n    {statement}\n    return {{'number': 1.0}}\n"


@pytest.mark.parametrize("seconds", [8, pytest.param(40, marks=pytest.mark.long)])
def test_evaluate_takes_its_time(session: ftnb.Session, reference: Reference, gate: Gate, seconds: float) -> None:
    """On rank 0 alone, while the others wait for it in the next step; and once more after the last step."""
    run = session.train(
        troubled(gate.statement) + evaluating(f"time.sleep({seconds})"), steps=16, global_batch=GLOBAL_BATCH,
        evaluate_every=8, hang_timeout_s=HANG_S, names={},
    )  # fmt: skip
    report = finish(run, gate)
    check_innocent(run, report, reference)
    assert [line["step"] for line in run.metrics() if "number" in line] == [8, 16]


def test_evaluate_holds_the_interpreter_lock(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    held = "import ctypes; ctypes.PyDLL(None).poll(None, 0, 5000)"
    run = session.train(
        troubled(gate.statement) + evaluating(held), steps=10, global_batch=GLOBAL_BATCH, evaluate_every=8,
        hang_timeout_s=HANG_S, names={},
    )  # fmt: skip
    check_innocent(run, finish(run, gate), reference)


# --- stopped from outside


def everybody(cluster: SharedCluster, session: ftnb.Session) -> tuple[proc.ProcessId, list[proc.ProcessId]]:
    """The supervisor, and all other processes of the cluster."""
    supervisor = proc.identify(session.status()["supervisor_pid"])
    return supervisor, [process for process in cluster.census.take() if process != supervisor]


@pytest.fixture
def sleepers() -> Iterator[Callable[[int, list[proc.ProcessId]], None]]:
    """Sends a signal to processes; at the end none of them stays stopped, whatever happens in between."""
    told: set[proc.ProcessId] = set()

    def send(signum: int, processes: list[proc.ProcessId]) -> None:
        told.update(processes)
        for process in processes:
            process.signal(signum)

    try:
        yield send
    finally:
        send(signal.SIGCONT, list(told))


@pytest.mark.parametrize("first", ["supervisor", "ranks"])
@pytest.mark.parametrize("between_s", [0.0, 0.3])
def test_everything_is_stopped_and_continued(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate, sleepers, first: str, between_s: float
) -> None:
    """A laptop that sleeps; the processes do not wake up in the same moment, whichever is first."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    supervisor, others = everybody(cluster, session)
    assert len(others) >= 6, "four ranks, the controller, the guardian"
    order = [[supervisor], others] if first == "supervisor" else [others, [supervisor]]
    for pause_s in (5.0, 1.0):
        sleepers(signal.SIGSTOP, order[0])
        sleepers(signal.SIGSTOP, order[1])
        time.sleep(pause_s)
        sleepers(signal.SIGCONT, order[0])
        time.sleep(between_s)
        sleepers(signal.SIGCONT, order[1])
        wait_for_steps(run, 5)
    check_innocent(run, finish(run, gate), reference)


def test_the_supervisor_alone_is_stopped(session: ftnb.Session, reference: Reference, gate: Gate, sleepers) -> None:
    """The ranks train on meanwhile; nobody starts a successor for a supervisor that is away for some seconds."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    supervisor = proc.identify(session.status()["supervisor_pid"])
    before = run.step
    sleepers(signal.SIGSTOP, [supervisor])
    time.sleep(5.0)
    sleepers(signal.SIGCONT, [supervisor])
    wait_for_steps(run, 5)
    assert run.step > before + 20, "its ranks have not waited for it"
    check_innocent(run, finish(run, gate), reference)
    assert session.status()["supervisor_pid"] == supervisor.pid


def test_everything_is_stopped_while_a_rank_is_replaced(
    cluster: SharedCluster, session: ftnb.Session, reference: Reference, gate: Gate, sleepers
) -> None:
    """The pause comes between a failure and its end: it makes no second failure of it."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    supervisor, others = everybody(cluster, session)
    kill(session, 1)
    sleepers(signal.SIGSTOP, [supervisor, *others])
    time.sleep(3.0)
    sleepers(signal.SIGCONT, [supervisor, *others])
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [1])
    check_changes(run, [1])
    assert count(run, "rank_suspected") == 0
    assert_same(losses_of(run), reference.losses, SAME_F64)


# --- a busy machine


@pytest.fixture
def busy_cores() -> Iterator[list[subprocess.Popen]]:
    """One process per core that does nothing but compute."""
    command = [sys.executable, "-c", "while True: sum(range(10**6))"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.long
def test_all_cores_are_kept_busy_by_others(session: ftnb.Session, busy_cores: list[subprocess.Popen]) -> None:
    run = session.train(
        troubled("time.sleep(0.001)"), steps=1_000_000, global_batch=GLOBAL_BATCH, hang_timeout_s=HANG_S, names={}
    )
    deadline = time.monotonic() + BUSY_S
    wait_until(lambda: time.monotonic() > deadline or not_innocent(run), "the time is over", BUSY_S + 60, every_s=0.5)
    run.stop(save=False)
    assert not not_innocent(run), [event["reason"] for event in run.events()]
    assert run.report().state == "stopped" and run.step > 0 and not run.report().problems
    assert all(process.poll() is None for process in busy_cores)


def not_innocent(run: ftnb.Run) -> list[str]:
    kinds = [event["kind"] for event in run.events()]
    return [kind for kind in kinds if kind in SUSPICIOUS]
