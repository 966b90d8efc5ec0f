"""Injected faults are the real thing: what each does to its process is seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import zmq
from desk import Desk, go_on, stopped, wait_until

from ftnb.rank import faults
from ftnb.rank.orders import Fault, Orders

HERE = Path(__file__).parent
HEARTBEAT_MS = (100, 400)  # as a supervisor watches its ranks
DEADLINE_S = 30.0


class Victim:
    """A process that ticks in one thread, and in another one lets a fault happen to itself."""

    def __init__(self, kind: str, duration_s: float | None = None, connection: Path | None = None) -> None:
        environment = dict(os.environ) | ({"FTNB_CONNECTION": str(connection)} if connection else {})
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "afflicted.py"), "strike", kind, "-" if duration_s is None else str(duration_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )
        self.pid = self.process.pid
        self.ticks, self.printed = 0, b""
        self._readers = [threading.Thread(target=self._count), threading.Thread(target=self._read)]
        for reader in self._readers:
            reader.start()
        wait_until(lambda: self.ticks > 3, "it ticks", DEADLINE_S)

    def _count(self) -> None:
        for _ in self.process.stderr:
            self.ticks += 1

    def _read(self) -> None:
        while chunk := os.read(self.process.stdout.fileno(), 4096):
            self.printed += chunk

    def strike(self) -> None:
        self.process.stdin.write(b"now\n")
        self.process.stdin.flush()
        wait_until(lambda: b"struck" in self.printed, "the fault", DEADLINE_S)

    def ended(self) -> int:
        status = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return status

    def ticks_in(self, seconds: float) -> int:
        before = self.ticks
        time.sleep(seconds)
        return self.ticks - before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def victim() -> Iterator[type[Victim]]:
    """Makes victims; in the end they are gone."""
    made = []

    def make(*args, **kwargs):
        made.append(Victim(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_kill(victim):
    one = victim("kill")
    one.strike()
    assert one.ended() == -signal.SIGKILL and b"over" not in one.printed


def test_exit_says_what_was_still_to_be_said(victim):
    one = victim("exit")
    one.strike()
    assert one.ended() == 0 and one.printed.endswith(b"not flushed")


def test_exception(victim):
    one = victim("exception")
    one.strike()
    assert one.ended() == 7 and b"raised injected by ftnb\n" in one.printed


def test_hang_stops_the_whole_process_until_somebody_continues_it(victim):
    one = victim("hang")
    one.strike()
    wait_until(lambda: stopped(one.pid), "state T", DEADLINE_S)
    time.sleep(0.05)  # what it had written has been read
    assert one.ticks_in(0.3) == 0 and b"over" not in one.printed
    go_on(one.pid)
    assert one.ended() == 7 and b"over" in one.printed


def test_stall_leaves_everything_else_going(victim):
    one = victim("stall")
    one.strike()
    before = one.ticks
    wait_until(lambda: one.ticks > before + 20, "it ticks on", DEADLINE_S)
    assert one.process.poll() is None and b"over" not in one.printed


@pytest.mark.parametrize("kind", ["stall", "gil"])
def test_what_has_a_duration_ends_after_it(victim, kind):
    one = victim(kind, 0.3)
    one.strike()
    assert one.ended() == 7 and b"over" in one.printed


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Desk(tmp_path, HEARTBEAT_MS) as found:
        found.heard[0] = []
        yield found


def connected(desk: Desk) -> None:
    """A supervisor that hears the victim, and forgets what its connection has been through."""
    desk.hear(0, "beat")
    desk.links.clear()


def test_gil_silences_python_while_its_connection_answers(victim, desk):
    one = victim("gil", None, desk.directory / "connection.json")
    connected(desk)
    one.strike()
    time.sleep(0.1)
    beats = len(desk.heard[0])
    assert one.ticks_in(1.0) == 0 and len(desk.heard[0]) == beats
    assert list(desk.links) == [], "ZeroMQ's own thread has not answered"
    assert not stopped(one.pid) and one.process.poll() is None


@pytest.mark.parametrize("kind", ["hang", "partition"])
def test_hang_and_partition_silence_the_connection_itself(victim, desk, kind):
    one = victim(kind, None, desk.directory / "connection.json")
    connected(desk)
    one.strike()
    wait_until(lambda: zmq.EVENT_DISCONNECTED in desk.links, "the connection is lost", DEADLINE_S)
    assert stopped(one.pid) == (kind == "hang") and one.process.poll() is None


def test_oom_grows_visibly_up_to_a_bound_and_ends_as_the_kernel_would_end_it(victim):
    one = victim("oom")
    process = psutil.Process(one.pid)
    before = process.memory_info().rss
    one.strike()
    seen = []
    while one.process.poll() is None:
        try:
            seen.append(process.memory_info().rss - before)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    assert one.ended() == -signal.SIGKILL and b"over" not in one.printed
    grown = [max(seen[i : i + 5]) for i in range(0, len(seen), 5)]  # as heartbeats see it, ten a second
    assert len([a for a, b in pairwise(grown) if b > a]) >= 2, grown
    bound = min(faults.OOM_MOST_BYTES, psutil.virtual_memory().total // faults.OOM_SHARE)
    assert bound // 4 < max(seen) < bound * 1.3
    assert one.printed.count(b"step 12: memory grows (injected by ftnb)") == 2


def test_oom_cannot_get_more_than_its_bound_even_when_it_counts_wrongly(victim, monkeypatch):
    code = (
        "from ftnb.rank import faults\n"
        "faults._limit_address_space(64 << 20)\n"
        "try:\n    b'1' * (80 << 20)\nexcept MemoryError:\n    print('refused')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S).stdout == "refused\n"


def test_a_kind_that_is_done_elsewhere_is_refused():
    with pytest.raises(ValueError, match="bitflip"):
        faults.strike(Fault(1, "bitflip", 3), 0, 3)


# --- when a fault is due


def orders_at(step: int) -> Orders:
    orders = Orders()
    orders.enter_step(step, generation=0)
    return orders


def test_a_fault_for_a_step_is_due_there_once_and_at_its_point():
    orders = orders_at(3)
    assert not orders.add_fault(Fault(1, "kill", 3)) and not orders.add_fault(Fault(2, "kill", 2))
    fault = Fault(3, "nan", 5)
    assert orders.add_fault(fault)
    assert orders.due_faults(4, "gradients") == [] == orders.due_faults(5, "forward")
    assert orders.due_faults(5, "gradients") == [fault]
    assert orders.due_faults(5, "gradients") == []
    orders.allow_fault(99)
    assert not fault.allowed.is_set()
    orders.allow_fault(3)
    assert fault.allowed.is_set()


def test_a_fault_without_a_step_is_due_at_the_next_point_of_its_kind():
    orders = orders_at(3)
    late, early = Fault(1, "bitflip", None), Fault(2, "stall", None)
    assert orders.add_fault(late) and orders.add_fault(early)
    assert orders.due_faults(3, "updated") == [late]  # in the step in flight, where its point is still to come
    assert orders.due_faults(4, "forward") == [early]  # in the next one


def test_what_was_planned_for_a_run_is_not_for_the_next_one():
    orders = orders_at(3)
    orders.add_fault(Fault(1, "kill", 5))
    orders.reset()
    assert orders.due_faults(5, "forward") == []


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="melt"):
        Orders().add_fault(Fault(1, "melt", 5))
