"""A rank's network is cut: its own sockets, really, without root; and healed again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from afflicted import Talk
from desk import wait_until
from peers import Peer, run_ranks

from ftnb.rank.cut import LOOK_EVERY_S, Cut
from ftnb.wire import sockets

SOON_S = 20.0
QUIET_S = 0.3  # so long nothing may come: fifteen lines would


class Other:
    """The process that is cut off, commanded over a Unix socket."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("afflicted.py")), "cut", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], cwd=directory,
        )
        theirs.close()
        self._socket = ours
        self._stream = ours.makefile("rw")

    def do(self, what: str, **fields: Any) -> Any:
        self._stream.write(json.dumps({"do": what, **fields}) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stream.close()
        self._socket.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    found = Other(tmp_path)
    yield found
    found.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def accepted(listener: socket.socket) -> Talk:
    return Talk(listener.accept()[0])


def quiet(other: Other, number: int, talk: Talk) -> bool:
    """Whether neither side hears anything for a while."""
    before = (len(other.do("heard")[number]), len(talk.heard))
    time.sleep(QUIET_S)
    return before == (len(other.do("heard")[number]), len(talk.heard))


def test_nothing_comes_in_or_goes_out_until_it_is_healed_and_nothing_is_lost(other, listener):
    other.do("connect", port=listener.getsockname()[1])
    talk = accepted(listener)
    wait_until(lambda: len(talk.heard) > 5 and len(other.do("heard")[0]) > 5, "both talk", SOON_S)
    other.do("cut", duration_s=None)
    time.sleep(0.05)  # what was under way has arrived
    assert quiet(other, 0, talk)
    # What is no network goes on: the commands' Unix socket, and files.
    assert other.do("file") == 1 and other.do("is on")
    other.do("heal")
    here, there = len(talk.heard), len(other.do("heard")[0])
    wait_until(lambda: len(talk.heard) > here + 30 and len(other.do("heard")[0]) > there + 30, "both talk again", SOON_S)
    for heard in (talk.heard, other.do("heard")[0]):
        assert heard == list(range(len(heard)))
    assert not other.do("is on") and other.do("file") == 2


def test_it_heals_by_itself_when_its_time_is_over(other, listener):
    other.do("connect", port=listener.getsockname()[1])
    talk = accepted(listener)
    other.do("cut", duration_s=0.3)
    assert other.do("is on")
    wait_until(lambda: not other.do("is on"), "the end of the cut", SOON_S)
    here = len(talk.heard)
    wait_until(lambda: len(talk.heard) > here + 10, "it talks again", SOON_S)
    # Once more, longer this time, and ended early: a second cut is like the first.
    other.do("cut", duration_s=60)
    time.sleep(0.05)
    assert quiet(other, 0, talk)
    other.do("heal")
    here = len(talk.heard)
    wait_until(lambda: len(talk.heard) > here + 10, "it talks once more", SOON_S)
    assert talk.heard == list(range(len(talk.heard)))


def test_connections_that_are_made_meanwhile_are_cut_as_well(other, listener):
    other.do("cut", duration_s=None)
    other.do("connect", port=listener.getsockname()[1])
    talks = [accepted(listener)]
    with socket.create_connection(("127.0.0.1", other.do("port"))) as ours:  # its listening socket is left alone
        other.do("accept")
        talks.append(Talk(ours))
        time.sleep(20 * LOOK_EVERY_S)
        for number, talk in enumerate(talks):
            assert quiet(other, number, talk)
        other.do("heal")
        for number, talk in enumerate(talks):
            wait_until(
                lambda n=number, t=talk: len(t.heard) > 30 and len(other.do("heard")[n]) > 30, "both talk", SOON_S
            )
            assert talk.heard == list(range(len(talk.heard)))


def close_one_in_the_cut(rank: int) -> None:
    here, there = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3):
            here.append(socket.create_connection(listener.getsockname()))
            there.append(listener.accept()[0])
    options = [sock.getsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, 40) for sock in here]
    descriptors = len(os.listdir("/proc/self/fd"))
    cut = Cut()
    cut.start()
    assert here[0].getsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, 40) != options[0]
    here[1].close()
    with open(os.devnull) as in_its_place:  # under the same number, as a rule
        cut.heal()
        assert in_its_place.read() == ""
    cut.heal()  # nothing left to do
    assert [s.getsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, 40) for s in (here[0], here[2])] == options[:2]
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    for sock in (*here, *there):
        sock.close()


def test_sockets_that_are_healed_are_as_before_and_those_that_were_closed_do_no_harm():
    run_ranks(close_one_in_the_cut, 1)


def test_messages_over_zeromq_come_later_in_order_and_none_is_lost(tmp_path):
    server_public, server_secret = zmq.curve_keypair()
    peer_public, peer_secret = zmq.curve_keypair()
    with zmq.Context() as context, sockets.server_socket(context, zmq.ROUTER, server_secret, server_public) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        connection = sockets.Connection(
            "test", os.getpid(), "0", "127.0.0.1", port, port, server_public.decode(), peer_public.decode(),
            peer_secret.decode(), "0",
        )
        (tmp_path / "connection.json").write_text(connection.to_json())
        rank = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zeromq_peer.py")), str(tmp_path / "connection.json"), "1.0"],
        )
        try:
            came: list[tuple[float, int]] = []
            said = 0
            while True:  # it echoes what it hears, and says by itself what number it is at
                if server.poll(1):
                    sender, kind, number = server.recv_multipart()
                    if kind == b"end":
                        break
                    if kind == b"said":
                        came.append((time.monotonic(), int(number)))
                        server.send_multipart([sender, b"%d" % said])
                        said += 1
                assert rank.poll() is None
            heard = json.loads(number)
        finally:
            rank.kill()
            rank.wait()
    assert [number for _, number in came] == list(range(len(came)))
    assert heard == list(range(len(heard))) and len(heard) > 50
    assert max(b[0] - a[0] for a, b in pairwise(came)) > 0.5, "it was not cut off at all"


def reduce_across_a_cut(rank: int, directory: Path) -> float:
    peer = Peer(rank, directory, "model = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=1)\n")
    group = peer.form([0, 1])
    numbers = torch.full((100_000,), float(rank + 1))
    torch.distributed.all_reduce(numbers)
    cut = Cut()
    if rank == 1:
        cut.start()
    numbers = torch.full((100_000,), float(rank + 1))
    work = torch.distributed.all_reduce(numbers, async_op=True)
    time.sleep(0.5)
    assert not work.is_completed(), "the sum went through the cut"
    cut.heal()
    wait_until(work.is_completed, "the sum after the healing", SOON_S)
    total = float(numbers.sum())
    torch.distributed.barrier()
    group.destroy()
    return total


def test_a_sum_over_gloo_waits_while_it_is_cut_and_goes_on_after(tmp_path):
    assert run_ranks(reduce_across_a_cut, 2, tmp_path) == [300_000.0, 300_000.0]
