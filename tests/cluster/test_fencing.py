"""Who was given up can do nothing any more: continued, healed, late, or impossible to kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import SAME_F64, Reference, assert_same, check_books, losses_of, wait_until
from cluster_tools import cell_with_trouble as troubled
from comings import Gate, check_changes, check_end, count, finish, kill, process_of, start, wait_joined
from late_words import Ghost, Storm
from shared_cluster import SharedCluster
from test_orphans import Kernel, do_to

import ftnb
from ftnb.wire import proc

HANG_S = 2.0


# --- stopped and continued, cut off and healed

# Every rank notes in each step whether the process that the test has named is still there (not: waited for).
WITNESS = """
def there(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False

def note(size):
    if os.path.exists(VICTIM):
        with open(f"{VICTIM}-{rank}.notes", "a") as file:
            file.write(f"{size} {there(int(open(VICTIM).read()))}\\n")
"""


def witnessing(gate: Gate, victim: Path) -> str:
    return f"VICTIM = {str(victim)!r}\n" + troubled(f"note(len(x)); {gate.statement}") + WITNESS


def notes_of(victim: Path, rank: int) -> list[tuple[int, bool]]:
    lines = Path(f"{victim}-{rank}.notes").read_text().splitlines()
    return [(int(size), there == "True") for size, there in map(str.split, lines)]


@pytest.mark.parametrize("fault", ["hang", "partition", "stall"])
def test_it_is_gone_before_anybody_takes_over(
    session: ftnb.Session, reference: Reference, gate: Gate, tmp_path: Path, fault: str
) -> None:
    """A process that is merely stopped, or cut off, would come back one day: it is killed first."""
    victim = tmp_path / "victim"
    run = start(session, witnessing(gate, victim), hang_timeout_s=HANG_S)
    wait_until(lambda: run.step >= 10, "every size of a share has been there")
    process = process_of(session, 2)
    victim.with_suffix(".new").write_text(str(process.pid))
    victim.with_suffix(".new").rename(victim)
    wait_until(lambda: all(Path(f"{victim}-{rank}.notes").exists() for rank in range(4)), "it has been seen")
    run.inject(fault, rank=2)
    wait_joined(session, run, 1)
    assert not process.signal(signal.SIGCONT), "there is nobody to be continued"
    report = finish(run, gate)
    check_end(report, [2], kinds=[fault])
    check_changes(run, [2])
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    for rank in (0, 1, 3):
        notes = notes_of(victim, rank)
        assert notes[0][1], "at first it was there"
        # Of a batch of 16, four ranks have 4 samples each, and three have 5 or 6.
        without_it = [there for size, there in notes if size > 4]
        assert without_it and not any(without_it), f"rank {rank} has trained without it while it was there: {notes}"
    assert not proc.session_members(process.pid)


@pytest.mark.parametrize("how", ["stopped", "cut off"])
def test_it_comes_back_while_it_is_being_given_up(
    session: ftnb.Session, reference: Reference, gate: Gate, how: str
) -> None:
    """Pauses about as long as it takes to be given up: either nothing has happened, or the rank is lost for good."""
    run = start(session, gate.cell, hang_timeout_s=30)
    wait_until(lambda: run.step >= 10, "every size of a share has been there")
    lost = 0
    for number, pause_s in enumerate((0.45, 0.52, 0.58, 0.65, 0.75)):
        rank = number % 4
        process, step = process_of(session, rank), run.step
        if how == "stopped":
            process.signal(signal.SIGSTOP)
            time.sleep(pause_s)
            process.signal(signal.SIGCONT)
        else:
            run.inject("partition", rank=rank, duration_s=pause_s)
        wait_until(
            lambda process=process, step=step: run.step >= step + 12 or not process.is_alive(), "it goes on, or is gone"
        )
        if count(run, "rank_failed") > lost or not process.is_alive():
            lost += 1
            wait_until(lambda lost=lost: count(run, "rank_failed") == lost, "it is known to be lost")
        wait_joined(session, run, lost)
    report = finish(run, gate)
    failed = [event["rank"] for event in run.events() if event["kind"] == "rank_failed"]
    assert len(failed) == lost
    check_end(report, failed, kinds=["hang", "partition", "kill"])
    check_changes(run, failed)
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)


# --- late words


@pytest.fixture
def ghosts() -> Iterator[list[Ghost]]:
    found: list[Ghost] = []
    yield found
    for ghost in found:
        ghost.close()


def ghost_of(session: ftnb.Session, rank: int, process: proc.ProcessId, ghosts: list[Ghost]) -> Ghost:
    ghosts.append(Ghost(session.status()["name"], rank, process.pid, process.started))
    return ghosts[-1]


def check_undisturbed(
    session: ftnb.Session, run: ftnb.Run, reference: Reference, gate: Gate, num_events: int, storm: Storm
) -> None:
    """The run goes on without a further event; then rank 1 is lost in the middle of the storm, and nothing else is."""
    wanted = run.step + 5
    wait_until(lambda: run.step >= wanted, "it goes on")
    assert len(run.events()) == num_events
    with storm:
        kill(session, 1)
        wait_joined(session, run, 2)
    assert storm.rounds > 5
    report = finish(run, gate)
    check_end(report, [1, 2])
    check_changes(run, [1, 2])
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)


def test_what_the_dead_say_changes_nothing(
    session: ftnb.Session, reference: Reference, gate: Gate, ghosts: list[Ghost]
) -> None:
    """Whatever generation it speaks of, and while others are lost and replaced as well."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    (dead,) = kill(session, 2)
    wait_joined(session, run, 1)
    ghost = ghost_of(session, 2, dead, ghosts)
    ghost.hello()
    assert ghost.hear(0, 10)["op"] == "exit", "it is told that it has no business here"
    generation = max(event["generation"] for event in run.events())
    before, replacement = len(run.events()), process_of(session, 2)
    for told in range(generation + 3):
        ghost.beat()
        ghost.all_of(told)
    assert ghost.hear(1, 0.5) is None, "nobody serves it"
    check_undisturbed(session, run, reference, gate, before, Storm(ghost, 1, with_hello=True))
    assert process_of(session, 2) == replacement


def test_what_the_living_have_said_in_an_old_generation_changes_nothing(
    session: ftnb.Session, reference: Reference, gate: Gate, ghosts: list[Ghost]
) -> None:
    """Messages that were long on their way, of a rank that is a member still."""
    run = start(session, gate.cell, hang_timeout_s=HANG_S)
    kill(session, 2)
    wait_joined(session, run, 1)
    ghost = ghost_of(session, 0, process_of(session, 0), ghosts)
    before = len(run.events())
    ghost.all_of(1)
    answer = ghost.hear(1, 10)
    assert answer["ok"] is False and answer["id"] == 1, "the store is not that generation's any more"
    check_undisturbed(session, run, reference, gate, before, Storm(ghost, 1, with_hello=False))


def test_a_late_digest_is_not_that_of_the_weights(
    session: ftnb.Session, reference: Reference, gate: Gate, ghosts: list[Ghost]
) -> None:
    """All have finished, except that rank 0 still evaluates: then comes an older word of another one."""
    over = gate.path.with_name("evaluated")
    evaluate = f"\ndef evaluate(model):\n    while not os.path.exists({str(over)!r}): time.sleep(0.01)\n    return {{}}\n"
    run = start(session, gate.cell + evaluate, steps=40, evaluate_every=40, recovery="shrink")
    kill(session, 2)
    wait_until(lambda: count(run, "recovered") == 1, "it goes on without rank 2")
    gate.open()
    wait_until(lambda: session.status()["ranks"][3]["place"] == "finished", "rank 3 has finished")
    ghost = ghost_of(session, 3, process_of(session, 3), ghosts)
    ghost.all_of(1)
    assert ghost.hear(1, 10)["ok"] is False
    over.touch()
    report = run.wait(timeout_s=60)
    check_end(report, [2], world_size=3)
    assert_same(losses_of(run), reference.losses[:40], SAME_F64)


# --- a process that cannot be killed

# A traced process can be held at its exit: it is dying and would be in any `ps`, but it does not go. For everybody
# but its tracer, it looks like one that waits for a dead disk: no signal reaches it, its files and sockets stay open.
TRACER = """
import ctypes, os, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, CONT, TRACE_EXIT, EVENT_EXIT, WAIT_ALL = 0x4206, 7, 0x40, 6, 0x40000000
if libc.ptrace(SEIZE, pid, None, TRACE_EXIT):
    sys.exit(os.strerror(ctypes.get_errno()))
print("SEIZED", flush=True)
while True:
    _, status = os.waitpid(pid, WAIT_ALL)
    if status >> 16 == EVENT_EXIT:
        break
    libc.ptrace(CONT, pid, None, os.WSTOPSIG(status) if status >> 16 == 0 else None)
print("HELD", flush=True)
sys.stdin.read()  # when the tracer ends, what it has held goes
"""


class Tracer:
    def __init__(self, process: proc.ProcessId) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRACER, str(process.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.problem = "" if self._said() == "SEIZED" else self._process.stderr.read().strip()

    def _said(self) -> str:
        return self._process.stdout.readline().strip()

    def wait_held(self) -> None:
        assert self._said() == "HELD"

    def let_go(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            stream.close()


MAY_BE_TRACED = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace(2) as Linux has it")
def test_a_process_that_cannot_be_killed_is_cut_off(
    session: ftnb.Session, reference: Reference, gate: Gate, cluster: SharedCluster
) -> None:
    run = start(session, MAY_BE_TRACED + gate.cell, hang_timeout_s=HANG_S)
    process = process_of(session, 2)
    tracer = Tracer(process)
    try:
        if tracer.problem:
            pytest.skip(f"tracing is not allowed here: {tracer.problem}")
        kill(session, 2)
        tracer.wait_held()
        wait_joined(session, run, 1)
        assert process.is_alive(), "it is there all the time"
        assert process_of(session, 2) != process
        (fenced,) = [event for event in run.events() if event["kind"] == "rank_fenced"]
        assert "does not end" in fenced["reason"] and "cut off" in fenced["reason"]
        assert any(str(process.pid) in note and "SIGKILL" in note for note in session.status()["notes"])
        report = finish(run, gate)
        assert process.is_alive()
    finally:
        tracer.let_go()
    wait_until(lambda: not process.is_alive(), "it goes when the kernel lets it go")
    assert report.state == "finished" and report.ok, str(report)
    assert [failure.rank for failure in report.failures] == [2]
    check_changes(run, [2])
    check_books(run, len(reference.losses))
    assert_same(losses_of(run), reference.losses, SAME_F64)
    again = session.train(gate.cell, steps=20, global_batch=16, names={})
    assert again.wait(timeout_s=60).ok and session.status()["world_size"] == 4


# --- nobody is left who could end it


@pytest.mark.long
def test_ranks_that_hold_the_interpreter_lock_end_without_anybody(tmp_path: Path) -> None:
    """Kernel, supervisor and guardian are gone, and no rank can run a line of Python: the system's timer ends them.

    The controller, which does nothing by itself, stays: nobody is left who could end it.
    """
    path = tmp_path / "hold"
    held = f"os.path.exists({str(path)!r}) and __import__('ctypes').PyDLL(None).poll(None, 0, 10**6)"
    kernel = Kernel(tmp_path, cell=troubled(f"{held}; time.sleep(0.02)"))
    try:
        kernel.wait_ready()
        metrics = tmp_path / "ftnb_runs" / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 12, "it trains")
        members = kernel.members()
        path.touch()
        time.sleep(0.5)  # both are in the call, or in the collective that waits for the other, by now
        do_to(members, "kernel, supervisor, guardian", signal.SIGKILL)
        kernel.process.wait()
        ranks = [members["rank 0"], members["rank 1"]]
        wait_until(lambda: not any(rank.is_alive() for rank in ranks), "the ranks are gone", 60, every_s=0.1)
    finally:
        kernel.close()
