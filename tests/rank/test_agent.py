"""The agent of a rank: what it tells while the training thread does whatever it does, and how it ends alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import zmq
from desk import CELL, Desk, end, stopped, wait_until
from peers import run_ranks

from ftnb.rank import agent, cut
from ftnb.rank.orders import Superseded
from ftnb.wire import messages, proc, reaper, records, sockets

HEARTBEAT_MS = (100, 400)  # as a supervisor watches its ranks
SLOW = """
def loss_fn(output, target):
    time.sleep(0.5)
    return torch.nn.functional.mse_loss(output, target)
"""
# Waits in its third step until the file is there.
WAITING_CELL = (
    CELL
    + """
import os
calls = 0

def loss_fn(output, target):
    global calls
    calls += 1
    if calls == 3:
        while not os.path.exists("go on"):
            time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)
"""
)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path, HEARTBEAT_MS) as found:
        yield found


def waits(desk: Desk) -> None:
    """Rank 0 trains, and waits in its third step."""
    desk.start(0)
    desk.train(0, cell=WAITING_CELL)
    wait_until(lambda: desk.last_beat(0)["step"] == 3, "the third step")
    desk.forget(0)


def test_beats_tell_number_time_memory_and_step(desk):
    waits(desk)
    beat = desk.last_beat(0)
    assert (beat["step"], beat["phase"]) == (3, "training")
    rss_mb = psutil.Process(desk.ranks[0].pid).memory_info().rss / 1e6
    assert beat["rss_mb"] == pytest.approx(rss_mb, rel=0.1)
    for _ in range(5):
        desk.last_beat(0)
    beats = [m for m in desk.heard[0] if m["op"] == "beat"]
    assert all(b["n"] == a["n"] + 1 and b["at"] > a["at"] for a, b in pairwise(beats))
    assert beats[-1]["at"] <= beats[-1]["came"]  # one machine, one clock


def beat_from_a_place(rank: int, directory: Path) -> None:
    one = agent.Agent(sockets.Connection.load(directory / "connection.json"), rank, 60.0)
    place = ("elsewhere", 42, time.monotonic() - 5)
    one.training = types.SimpleNamespace(place=place, rank=rank, in_flight=3, committed=2)
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://beats")
        there.connect("inproc://beats")
        one._beat(there)
        beat = messages.decode(here.recv_multipart())
    assert (beat["place"], beat["place_step"], beat["step"]) == ("elsewhere", 42, 3)
    assert 5 <= beat["place_s"] < 5 + 60


def test_beats_tell_the_place_of_the_training_thread(desk):
    run_ranks(beat_from_a_place, 1, desk.directory)


def test_stacks_begin_with_the_users_code(desk):
    desk.start(0)
    desk.tell(0, "stacks", id=1)
    answer = desk.hear(0, "stacks")
    assert (answer["id"], answer["place"], answer["step"], answer["stack"]) == (1, None, None, [])
    desk.train(0, cell=WAITING_CELL)
    wait_until(lambda: desk.last_beat(0)["step"] == 3, "the third step")
    desk.tell(0, "stacks", id=2)
    answer = desk.hear(0, "stacks", lambda m: m["id"] == 2)
    assert answer["step"] == 3
    line = WAITING_CELL.splitlines().index('        while not os.path.exists("go on"):') + 1
    first, source = answer["stack"][:2]
    assert first in (f'File "<ft_train cell>", line {line + n}, in loss_fn' for n in (0, 1))
    assert source.strip() in ('while not os.path.exists("go on"):', "time.sleep(0.01)")


def test_stacks_of_who_waits_for_a_peer_begin_with_the_loop(desk):
    for rank in (0, 1):
        desk.start(rank)
    desk.train(0, 1)
    os.kill(desk.ranks[1].pid, signal.SIGSTOP)
    wait_until(lambda: stopped(desk.ranks[1].pid), "rank 1 is stopped")

    def stack() -> list[str]:
        desk.forget(0)
        desk.tell(0, "stacks", id=1)
        return desk.hear(0, "stacks")["stack"]

    wait_until(lambda: any("collectives.py" in line for line in stack()), "rank 0 waits for its peer")
    lines = stack()
    assert "ftnb/rank/loop.py" in lines[0] and len(lines) <= 30
    assert not any("threading.py" in line or "worker.py" in line for line in lines)


def test_a_fault_now_strikes_in_the_next_step_and_is_recorded_before(desk):
    desk.start(0)
    desk.train(0)
    desk.tell(0, "fault", fault_id=5, kind="exception", at_step=None, duration_s=None, factor=None, seed=0)
    assert desk.hear(0, "fault_answer")["accepted"]
    step = desk.hear(0, "fault_due")["step"]
    time.sleep(0.2)
    assert not any(m["op"] == "step_failed" for m in desk.heard[0])  # nobody has said yet that it is on record
    desk.tell(0, "fault_go", fault_id=5)
    failure = desk.hear(0, "step_failed")["failure"]
    assert (failure["step"], failure["cause"]) == (step, "user")
    assert "injected by ftnb" in failure["error"]["evalue"]
    assert desk.steps(0) == step - 1


def test_a_fault_at_a_step_strikes_there(desk):
    desk.start(0)
    desk.train(0)
    at_step = desk.steps(0) + 20
    assert desk.inject(0, "exit", at_step=at_step) == at_step
    assert end(desk.ranks[0]) == 0
    assert desk.steps(0) == at_step - 1


def test_a_step_that_is_past_is_refused(desk):
    desk.start(0)
    desk.train(0)
    desk.tell(0, "fault", fault_id=1, kind="kill", at_step=1)
    assert desk.hear(0, "fault_answer")["accepted"] is False


def test_a_partition_now_does_not_wait_for_the_training_thread(desk):
    waits(desk)
    desk.links.clear()
    desk.tell(0, "fault", fault_id=1, kind="partition", at_step=None, duration_s=1.0)
    assert desk.hear(0, "fault_due")["step"] == 3
    desk.last_beat(0)  # not before it is on record
    assert list(desk.links) == []
    desk.tell(0, "fault_go", fault_id=1)
    wait_until(lambda: zmq.EVENT_DISCONNECTED in desk.links, "the connection is lost")
    desk.forget(0)
    # Healed, it is heard again, and hears.
    desk.last_beat(0)
    desk.tell(0, "fault", fault_id=2, kind="partition", at_step=None, duration_s=1.0)
    assert desk.hear(0, "fault_answer", lambda m: m["fault_id"] == 2)["accepted"]
    (desk.directory / "go on").touch()
    wait_until(lambda: desk.steps(0) > 5, "the training goes on")


def test_a_partition_holds_the_peers_up_and_heals(desk):
    for rank in (0, 1):
        desk.start(rank)
    desk.train(0, 1)
    desk.inject(1, "partition", at_step=desk.steps(1) + 5, duration_s=0.25)
    before = max(desk.steps(0), desk.steps(1))
    wait_until(lambda: min(desk.steps(0), desk.steps(1)) > before + 20, "both go on")
    assert not any(m["op"] == "step_failed" for rank in (0, 1) for m in desk.heard[rank])


# --- alone


@pytest.fixture
def bystander(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the cluster: it is ended when the cluster is reaped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    token = os.urandom(8).hex()
    records.ProcessRecords(tmp_path / records.FILE_NAME, token).note(records.OTHER, proc.identify(process.pid))
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def sign_of_life(tmp_path: Path) -> Iterator[None]:
    """The file by which a supervisor shows that it is there."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.1):
            (tmp_path / reaper.BEAT_NAME).touch()

    thread = threading.Thread(target=keep)
    thread.start()
    yield
    over.set()
    thread.join()


# Words are missing for 3 s in all; ZeroMQ gives a silent connection up after 0.5 s, and makes a new one.
ALONE = {
    "ALONE_EXTRA_S": 2.8, "BEAT_AFTER_WORD_S": 1.0, "HEARTBEAT_INTERVAL_MS": 100, "HEARTBEAT_TIMEOUT_MS": 500,
}  # fmt: skip


def test_who_is_cut_off_ends_itself_but_not_the_cluster_of_a_supervisor_that_is_there(desk, bystander, sign_of_life):
    desk.start(0, linger_s=0.2, **ALONE)
    desk.train(0)
    desk.inject(0, "partition")
    assert end(desk.ranks[0]) == 3
    assert bystander.poll() is None
    # It has connected again in the meantime; see the next test.
    assert list(desk.links).count(zmq.EVENT_HANDSHAKE_SUCCEEDED) > 2


def hear_in_a_cut(rank: int, directory: Path) -> None:
    os.environ["FTNB_CONNECTION"] = str(directory / "connection.json")
    connection = sockets.Connection.load(directory / "connection.json")
    one = agent.Agent(connection, rank, 60.0)
    word = {"op": "beat_seen", "term": 1}
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        one._hear(sock, word)
        before = one._last_word
        cut.of_this_process.start()
        one._hear(sock, {"op": "regroup", "generation": 7, "term": 1})
        one._hear(sock, {"op": "regroup", "generation": 8, "term": 1})
        assert one._last_word == before
        one.orders.check(6)  # not obeyed
        cut.of_this_process.heal()
        one._hear(sock, word)
        assert one._last_word > before
        with pytest.raises(Superseded):
            one.orders.check(7)


def test_what_comes_in_before_a_new_connection_is_cut_counts_after_the_healing_only(desk):
    run_ranks(hear_in_a_cut, 1, desk.directory)


def test_when_the_supervisor_is_gone_as_well_it_ends_the_whole_cluster(desk, bystander):
    desk.start(0, linger_s=0.2, **ALONE)
    desk.inject(0, "partition")
    assert end(desk.ranks[0]) == 3
    wait_until(lambda: bystander.poll() is not None, "the cluster is ended")


@pytest.mark.parametrize("kind", ["gil", "hang"])
def test_a_rank_without_a_word_ends_even_if_python_cannot_run(desk, sign_of_life, kind):
    desk.start(0, linger_s=0.2, ALONE_EXTRA_S=1.0, DEAD_MAN_EXTRA_S=1.0)
    desk.train(0, hang_timeout_s=1.0)
    # Armed for the training by now, not any more for the loading of a cell, which may take longer.
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until, "a word")
    desk.inject(0, kind)
    assert end(desk.ranks[0]) == -signal.SIGKILL


def test_python_may_be_silent_for_as_long_as_a_supervisor_puts_up_with_it(desk):
    desk.start(0, linger_s=1.0, ALONE_EXTRA_S=1.0, DEAD_MAN_EXTRA_S=0.2)
    desk.train(0, hang_timeout_s=30.0)
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until, "a word")
    desk.inject(0, "gil", duration_s=4.0)
    before = desk.steps(0)
    wait_until(lambda: desk.steps(0) > before + 20, "it goes on")


def test_python_may_be_silent_for_as_long_as_long_steps_take(desk):
    """In native code that keeps the interpreter lock, say: ten steps, as for the supervisor."""
    desk.start(0, linger_s=0.2, ALONE_EXTRA_S=0.5, DEAD_MAN_EXTRA_S=0.2)
    desk.train(0, cell=CELL + SLOW, hang_timeout_s=0.5)
    until = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until, "a word")
    desk.inject(0, "gil", duration_s=3.0)
    before = desk.steps(0)
    wait_until(lambda: desk.steps(0) > before + 1, "it goes on")
