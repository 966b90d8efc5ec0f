"""What people report of other tools in public, each as a test: losses, hangs, and who is blamed for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import (
    DATA,
    DEADLINE_S,
    GLOBAL_BATCH,
    LOSS,
    MODEL,
    NUM_SAMPLES,
    SAME_F64,
    Reference,
    assert_same,
    check_books,
    indices_of,
    losses_of,
    says,
    wait_until,
)
from cluster_tools import cell_with_trouble as troubled
from comings import Gate, check_changes, check_end, count, finish, kill, process_of, start, wait_joined

import ftnb
from ftnb.demo_cell import SOURCE as DEMO

STEPS = 60
HANG_S = 2.0


def events_of(run: ftnb.Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == kind]


# --- "One worker died, the others sat there for half an hour", "our toy demo took 15 minutes to recover"


def test_a_toy_demo_goes_on_at_once(session: ftnb.Session) -> None:
    """The demo as it is shipped: nothing is set to be quicker than it is by default."""
    run = session.train(DEMO, steps=300, global_batch=64, names={})
    run.inject("kill", rank=1, at_step=20)
    report = run.wait(timeout_s=DEADLINE_S)
    assert report.state == "finished" and report.ok, str(report)
    (recovered,) = events_of(run, "recovered")
    assert recovered["lost_steps"] <= 1
    assert recovered["mttr_s"] < 10, "a hundredth of what was reported, on whatever machine"
    assert report.samples_missed == report.samples_repeated == 0


# --- "Every rank accuses its neighbour"

RING = """
def wait_for_neighbour(limit_s):
    open(f"{RING}-{rank}.begun", "w").close()
    neighbour, until = f"{RING}-{(rank + 1) % 4}.done", time.monotonic() + limit_s
    while not os.path.exists(neighbour) and time.monotonic() < until:
        time.sleep(0.01)
    open(f"{RING}-{rank}.done", "w").close()
"""


def in_a_ring(directory: Path, gate: Gate, limit_s: float) -> str:
    """In call 12, each rank waits for the next one in code of its own."""
    statement = f"calls == 12 and not os.path.exists(f'{{RING}}-{{rank}}.done') and wait_for_neighbour({limit_s})"
    return f"RING = {str(directory / 'ring')!r}\n" + troubled(f"{statement}; {gate.statement}") + RING


def test_a_circle_has_nobody_to_blame(session: ftnb.Session, gate: Gate, tmp_path: Path) -> None:
    """Each waits for the next, for ever: that is the code's doing, no rank's. The run ends and says where all stand."""
    pids = {process_of(session, rank).pid for rank in range(4)}
    run = session.train(
        in_a_ring(tmp_path, gate, 3600), steps=40, global_batch=GLOBAL_BATCH, hang_timeout_s=HANG_S, names={}
    )
    report = run.wait(timeout_s=DEADLINE_S)
    assert report.state in ("stopped", "failed") and report.steps == 11, str(report)
    assert count(run, "rank_failed") == 0, run.events()
    says(ValueError(report.reason), "[Nn]o rank has moved", "ranks 0, 1, 2 and 3 in forward of step 12", "--hang-timeout")
    (group,) = run.events()[-1]["stands"]
    assert all("wait_for_neighbour" in " ".join(stands["stack"]) for stands in run.stacks().values())
    assert group["ranks"] == [0, 1, 2, 3] and any("wait_for_neighbour" in line for line in group["stack"])
    for rank in range(4):  # those who wait for ever are let go
        (tmp_path / f"ring-{rank}.done").touch()
    wait_until(lambda: {entry["state"] for entry in session.status()["ranks"]} == {"idle"}, "all are free again")
    assert {process_of(session, rank).pid for rank in range(4)} == pids


def test_of_a_circle_the_one_that_is_stopped_is_named(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path
) -> None:
    """All wait for each other, and three of them could say so; one is the cause."""
    run = start(session, in_a_ring(tmp_path, gate, 4))
    wait_until((tmp_path / "ring-2.begun").exists, "rank 2 is in the circle")
    process_of(session, 2).signal(signal.SIGSTOP)
    wait_joined(session, run, 1)
    report = finish(run, gate)
    check_end(report, [2], kinds=["hang"])
    check_changes(run, [2])
    blamed = {event["rank"] for event in run.events() if event["kind"] in ("rank_suspected", "rank_failed")}
    assert blamed == {2}
    assert_same(losses_of(run), reference.losses, SAME_F64)


# --- "NaN on one rank, and the others wait in the all-reduce for ever"


def test_nan_in_the_data_of_one_rank(session: ftnb.Session, reference: Reference) -> None:
    sample = indices_of(7, NUM_SAMPLES, GLOBAL_BATCH)[5]
    # In the first epoch already, and in whose share: of 16 samples, each rank has four.
    step = next(s for s in range(1, 8) if sample in indices_of(s, NUM_SAMPLES, GLOBAL_BATCH))
    batch = indices_of(step, NUM_SAMPLES, GLOBAL_BATCH)
    assert len(batch) == GLOBAL_BATCH
    rank = batch.index(sample) // 4
    run = session.train(
        DATA + f"inputs[{sample}, 0] = float('nan')\n" + MODEL + LOSS, steps=40, global_batch=GLOBAL_BATCH, names={}
    )
    report = run.wait(timeout_s=DEADLINE_S)
    assert report.state == "stopped" and report.steps == step - 1, str(report)
    (found,) = events_of(run, "nan_detected")
    assert (found["step"], found["ranks"]) == (step, [rank])
    says(ValueError(report.reason), f"[Ss]tep {step}", f"rank {rank}", "loss", "--on-nan")
    assert count(run, "rank_failed") == count(run, "rank_suspected") == 0
    assert_same(losses_of(run), reference.losses[: step - 1], SAME_F64)
    pids = [process_of(session, rank).pid for rank in range(4)]
    wait_until(lambda: session.client[:].apply_sync(os.getpid) == pids, "all are free, and can be looked at")


# --- "A keep-alive was missed under load, and a healthy job was restarted"


def test_keep_alives_missed_under_load_restart_nothing(session: ftnb.Session, reference: Reference, gate: Gate) -> None:
    """Cores that others keep busy, and a rank that answers nothing for seconds, again and again."""
    held = "rank == 1 and calls in (12, 14, 16) and __import__('ctypes').PyDLL(None).poll(None, 0, 2500)"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 2))]
    try:
        run = start(session, troubled(f"{held}; {gate.statement}"))
        wait_until(lambda: run.step >= 20, "it is through", 120)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    report = finish(run, gate)
    check_end(report, [])
    assert not count(run, "rank_suspected") and not count(run, "regroup_started"), run.events()
    assert {line["generation"] for line in run.ledger()} == {1}
    assert_same(losses_of(run), reference.losses, SAME_F64)


# --- "An un-waited send whose sender exits"

# Large enough for a message to take a while.
WIDE = DATA + MODEL.replace("12", "20_000").replace("lr=0.05", "lr=1e-5") + """
import os, sys, threading, time
rank = int(os.environ["FTNB_RANK"])
calls = 0

def leave_in(function, me=threading.get_ident()):
    while not os.path.exists(LEFT):
        frame = sys._current_frames().get(me)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        if frame is not None:
            open(LEFT, "w").close()
            os._exit(0)
        time.sleep(0.0005)

if rank == 1:
    threading.Thread(target=leave_in, args=(FUNCTION,), daemon=True).start()

def training_step(model, batch):
    global calls
    calls += 1
    time.sleep(0.1 if rank == 3 else 0.01)  # the others have sent theirs, and wait for it
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize("function", ["wait_for_gradients", "give"], ids=["gradients", "state"])
def test_the_sender_exits_before_its_message_has_left(session: ftnb.Session, tmp_path: Path, function: str) -> None:
    """It takes half of its gradients with it, or of the state that it copies to a newcomer."""
    left = tmp_path / "left"
    cell = f"LEFT, FUNCTION = {str(left)!r}, {function!r}\n" + WIDE
    # The process that comes in the place of one that has left finds the file, and stays.
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, names={})
    lost = [1]
    if function == "give":
        kill(session, 2)
        lost = [1, 2]
    wait_until(left.exists, "it has left")
    report = run.wait(timeout_s=2 * DEADLINE_S)
    assert report.state == "finished" and report.ok, str(report)
    assert sorted(failure.rank for failure in report.failures) == lost
    (gone,) = [event for event in events_of(run, "rank_failed") if event["rank"] == 1]
    assert gone["failure"] == "exit" and "code 0" in gone["reason"]
    check_books(run, STEPS)
    quick = cell.replace("if rank == 1:", "if False:").replace("time.sleep(0.1 if rank == 3 else 0.01)", "pass")
    assert_same(losses_of(run), Reference(quick.replace('os.environ["FTNB_RANK"]', "'0'"), STEPS).losses, SAME_F64)


# --- "exitcode: -9, and not a word why"

GROWS = """
def grow():
    print("loading shard 17", flush=True)
    taken = []
    for _ in range(12):
        taken.append(b"1" * (30 << 20))
        time.sleep(0.12)
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when there is no more

def wild():
    print("loading shard 17", flush=True)
    __import__("ctypes").string_at(8)

def exits():
    print("loading shard 17", flush=True)
    os._exit(137)
"""


@pytest.mark.parametrize(
    ("what", "failure", "words"),
    [
        ("grow", "kill", ["SIGKILL", "memory had grown from \\d+ to \\d+ MB"]),
        ("wild", "crash", ["SIGSEGV", "invalid memory access"]),
        ("exits", "exit", ["exited with code 137"]),
    ],
)
def test_what_has_ended_a_worker_can_be_read(
    session: ftnb.Session, reference: Reference, what: str, failure: str, words: list[str]
) -> None:
    """In words, with the last lines that it had printed; in the events, and in the report."""
    cell = troubled(f"rank == 2 and calls == 12 and not os.path.exists(ONCE) and (open(ONCE, 'w').close(), {what}())")
    cell = f"ONCE = {str(Path.cwd() / what)!r}\n" + cell + GROWS
    Path(what).unlink(missing_ok=True)
    run = session.train(cell, steps=STEPS, global_batch=GLOBAL_BATCH, recovery="shrink", names={})
    report = run.wait(timeout_s=DEADLINE_S)
    check_end(report, [2], kinds=[failure], world_size=3)
    (failed,) = events_of(run, "rank_failed")
    says(ValueError(failed["reason"]), *words)
    assert "loading shard 17" in failed["last_output"]
    says(ValueError(str(report)), *words)
    check_books(run, STEPS)
    assert_same(losses_of(run), reference.losses[:STEPS], SAME_F64)
